"""`TextEnvironment` of TRL 0.7 to 0.11, in which a model calls tools within its text, and its result, `TextHistory`.

The model calls a tool with `<request><NAME>INPUT<call>`; the tool's output and `<response>` follow; `<submit>` ends the
episode. Tool outputs are masked, so that `PPOTrainer.step(queries, responses, rewards, masks)` does not learn them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from chatgpt_compat.trl.core import padded

REQUEST, CALL, RESPONSE, SUBMIT = '<request>', '<call>', '<response>', '<submit>'
_CALL = re.compile(f'{REQUEST}<(.*?)>(.*?){CALL}', re.DOTALL)


class StringStoppingCriteria(StoppingCriteria):
    """Stops when every sequence of a batch has one of the strings after its prompt; `lengths` has the number of tokens
    of each up to then."""

    def __init__(self, stop_strings: SequenceOf[str], tokenizer: Any, prompt_length: int) -> None:
        self.stop_strings, self.tokenizer, self.start = list(stop_strings), tokenizer, prompt_length
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:  # type: ignore[override]
        for row, text in enumerate(self.tokenizer.batch_decode(input_ids[:, self.start :])):
            if row not in self.lengths and any(string in text for string in self.stop_strings):
                self.lengths[row] = input_ids.shape[1] - self.start
        return len(self.lengths) == len(input_ids)


class TextHistory:
    """Segments of one episode: `text`, `tokens` and `token_masks` (1 for what the model wrote), and `reward`."""

    def __init__(self, text: str, tokens: Tensor, system: bool = True) -> None:
        self.text, self.tokens = '', tokens[:0]
        self.token_masks = torch.zeros(0, dtype=torch.long, device=tokens.device)
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.completed = self.truncated = False
        self.reward: Any = 0.0
        self.append_segment(text, tokens, system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Raises ValueError for an empty text or no tokens."""
        if not text or not len(tokens):
            raise ValueError('TextHistory: a segment must have text and tokens')
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        self.token_masks = torch.cat([self.token_masks, torch.full_like(tokens, 0 if system else 1)])

    def complete(self, truncated: bool = False) -> None:
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        start, end = self.text_spans[-1]
        return self.text[start:end]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens of the first segment, the tokens after it and their mask."""
        cut = self.token_spans[0][1]
        return self.tokens[:cut], self.tokens[cut:], self.token_masks[cut:]

    def show_text(self, show_legend: bool = False) -> None:
        """Prints the text; parts that are not the model's are in brackets."""
        parts = zip(self.text_spans, self.system_spans, strict=True)
        print(''.join(f'[{self.text[a:b]}]' if system else self.text[a:b] for (a, b), system in parts))


class TextEnvironment:
    """Runs a model with tools over a list of tasks.

    Args:
        model: a model with a value head, or any with `generate`.
        tools: a dict by name, or a list, which takes the class names; each maps a text to a text.
        reward_fn: called with the last segment of each episode and the keywords of `run`; returns one reward each.
        prompt: text before every task.
        max_tool_reponse: maximum number of characters of a tool's output (spelled as in TRL).
        max_length: maximum number of tokens of an episode; None for no limit.
    """

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        tools: Mapping[str, Callable[[str], str]] | SequenceOf[Any] = (),
        reward_fn: Callable[..., SequenceOf[Any]] | None = None,
        prompt: str = '',
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.reward_fn, self.prompt = model, tokenizer, reward_fn, prompt or ''
        self.tools = dict(tools) if isinstance(tools, Mapping) else {type(tool).__name__: tool for tool in tools}
        self.max_turns, self.max_tool_response, self.max_length = max_turns, max_tool_reponse, max_length
        self.generation_kwargs = dict(generation_kwargs or {})
        self.request_token, self.call_token, self.response_token, self.submit_token = REQUEST, CALL, RESPONSE, SUBMIT

    def run(self, queries: SequenceOf[str], **rewards_kwargs: Any) -> tuple[Any, Any, Any, Any, list[TextHistory]]:
        """Returns queries, responses and masks (int64 tensors of each episode), rewards, histories."""
        histories = [TextHistory(self.prompt + task, self._ids(self.prompt + task)) for task in queries]
        for _ in range(self.max_turns):
            if not (active := [history for history in histories if not history.completed]):
                break
            self.generate(active)
            for history in active:
                self._end(history, model_turn=True)
                self.step(history)
                self._end(history, model_turn=False)
        if self.reward_fn is not None:
            rewards = self.reward_fn([history.last_text_segment for history in histories], **rewards_kwargs)
            for history, reward in zip(histories, rewards, strict=True):
                history.reward = reward
        parts = [history.split_query_response_tokens() for history in histories]
        columns = [list(column) for column in zip(*parts, strict=True)]
        return columns[0], columns[1], columns[2], [history.reward for history in histories], histories

    def step(self, history: TextHistory) -> TextHistory:
        """Runs the tool that an episode calls at its end, unless the episode is complete."""
        if history.completed:
            return history
        found = _CALL.search(history.last_text_segment)
        tool, query = (found[1], found[2]) if found else (None, None)
        if tool is None or query is None:
            answer = f'Unknown tool call: {history.last_text_segment}'
        elif tool not in self.tools:
            answer = f'Unknown tool {tool}.'
        else:
            try:
                answer = str(self.tools[tool](query))
            except Exception as error:
                answer = f'Tool error: {error}'
        if len(answer) > self.max_tool_response:
            answer = f'{answer[: self.max_tool_response - 3]}...'
        history.append_segment(answer + RESPONSE, self._ids(answer + RESPONSE))
        return history

    def generate(self, histories: list[TextHistory], batch_size: int = 16) -> list[TextHistory]:
        """Appends to each a generated segment, up to `<call>` or `<submit>`."""
        for start in range(0, len(histories), batch_size):
            batch = histories[start : start + batch_size]
            tokens = [history.tokens for history in batch]
            ids, mask = padded(tokens, self.tokenizer.pad_token_id or 0, on_left=True)
            stop = StringStoppingCriteria([CALL, SUBMIT], self.tokenizer, ids.shape[1])
            options = self.generation_kwargs | {'stopping_criteria': StoppingCriteriaList([stop])}
            out = self.model.generate(input_ids=ids, attention_mask=mask, **options)
            for row, history in enumerate(batch):
                new = out[row, ids.shape[1] :][: stop.lengths.get(row)]
                history.append_segment(self.tokenizer.decode(new) or ' ', new, system=False)
        return histories

    def _ids(self, text: str) -> Tensor:
        device = getattr(getattr(self.model, 'pretrained_model', self.model), 'device', 'cpu')
        return self.tokenizer(text, return_tensors='pt')['input_ids'][0].to(device)

    def _end(self, history: TextHistory, model_turn: bool) -> None:
        """Completes an episode that is too long, has an end token or `<submit>`, or does not call a tool."""
        last = history.last_text_segment
        too_long = self.max_length is not None and len(history.tokens) > self.max_length
        calls = REQUEST in last and CALL in last
        if too_long or self.tokenizer.eos_token in history.text or SUBMIT in last or (model_turn and not calls):
            history.complete(truncated=history.truncated or too_long)
