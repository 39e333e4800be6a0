"""trlX's pipelines of prompts, and conversion of samples to sequences of tokens.

Trainers read only the items of a pipeline; this library pads and loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from chatgpt.data import Demonstration, TokenizerOptions, tokenize_demonstration
from chatgpt.types import Prompt, Sequence
from chatgpt_compat.records import all_but_first
from chatgpt_compat.trlx.config import Register

_PIPELINES = Register('pipelines')
register_datapipeline, get_pipeline = _PIPELINES.add, _PIPELINES.find


@dataclass
class PromptElement:
    """A prompt of a pipeline of 2022."""

    text: str
    tokens: Any


@dataclass
class PromptBatch:
    """A batch of prompts of a pipeline of 2022."""

    text: Iterable[str]
    tokens: Any


@register_datapipeline
class BasePipeline(Dataset[Any]):
    """Base of pipelines: `__getitem__` and `__len__`. An item is a text, ids, a dict with `input_ids` (or a `prompt`)
    and metadata, or a `PromptElement`."""

    def __init__(self, path: str = 'dataset') -> None:
        super().__init__()

    def __len__(self) -> int:
        raise NotImplementedError(f'{type(self).__name__} needs __len__')

    def create_loader(self, batch_size: int, shuffle: bool = False, **options: Any) -> Any:
        """Returns a loader of lists of items, for use by scripts."""
        return DataLoader(self, batch_size=batch_size, shuffle=shuffle, collate_fn=list)


@register_datapipeline
class PromptPipeline(BasePipeline):
    """Tokenized prompts: `(prompts, max_prompt_length, tokenizer, add_special_tokens=False)`, or `(prompts, tokenizer)`
    as in 2022.

    `prompts` are texts, or dicts with a `prompt` and keys for reward and metric functions; the dicts are not changed.
    Longer prompts are truncated on the tokenizer's truncation side.
    """

    def __init__(
        self,
        prompts: SequenceOf[Any],
        max_prompt_length: Any = None,
        tokenizer: Any = None,
        add_special_tokens: bool = False,
    ) -> None:
        super().__init__()
        if tokenizer is None and not isinstance(max_prompt_length, (int, type(None))):
            tokenizer, max_prompt_length = max_prompt_length, None
        if tokenizer is None:
            raise ValueError('PromptPipeline needs a tokenizer; token ids without one are not served')
        if len(prompts) == 0:
            raise ValueError('PromptPipeline: there are no prompts')
        self.tokenizer = tokenizer
        rows = [dict(item) if isinstance(item, Mapping) else {'prompt': item} for item in prompts]
        texts = [row.pop('prompt') for row in rows]
        cut = {} if max_prompt_length is None else {'truncation': True, 'max_length': max_prompt_length}
        ids = tokenizer(texts, padding=False, add_special_tokens=add_special_tokens, **cut)['input_ids']
        self.prompts = [
            {'input_ids': list(tokens), 'attention_mask': [1] * len(tokens)} | columns
            for tokens, columns in zip(ids, rows, strict=True)
        ]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.prompts[index]

    def __len__(self) -> int:
        return len(self.prompts)

    def create_loader(self, batch_size: int, shuffle: bool = False, **options: Any) -> Any:
        """Returns a loader of padded batches with `input_ids`, `attention_mask` and the metadata."""

        def collated(items: list[dict[str, Any]]) -> Any:
            batch = self.tokenizer.pad([{'input_ids': item['input_ids']} for item in items], return_tensors='pt')
            for name in items[0]:
                if name not in ('input_ids', 'attention_mask'):
                    batch[name] = [item[name] for item in items]
            return batch

        return DataLoader(self, batch_size=batch_size, shuffle=shuffle, collate_fn=collated)


class First(BasePipeline):
    """The first `count` items of a pipeline."""

    def __init__(self, pipeline: Any, count: int) -> None:
        super().__init__()
        self.pipeline, self.count = pipeline, count

    def __getitem__(self, index: int) -> Any:
        return self.pipeline[index]

    def __len__(self) -> int:
        return min(self.count, len(self.pipeline))


def prompts_of(pipeline: Any, tokenizer: Any) -> list[Prompt]:
    """Returns the items of any pipeline as `Prompt` records; an empty prompt becomes the begin token."""
    return [_prompt(pipeline[i], tokenizer) for i in range(len(pipeline))]


def _prompt(item: Any, tokenizer: Any) -> Prompt:
    columns, mask = dict[str, Any](), None
    if isinstance(item, PromptElement):
        item = item.tokens if item.tokens is not None else item.text
    if isinstance(item, Mapping):
        hidden = ('input_ids', 'attention_mask', 'prompt', 'token_type_ids')
        columns = {name: value for name, value in item.items() if name not in hidden}
        mask = item.get('attention_mask') if 'input_ids' in item else None
        item = item['input_ids'] if 'input_ids' in item else item['prompt']
    if isinstance(item, str):
        item = tokenizer(item, add_special_tokens=False)['input_ids']
    ids = torch.as_tensor(item, dtype=torch.int64).flatten()
    if mask is not None:
        ids = ids[torch.as_tensor(mask).flatten().bool()]
    else:
        real = (ids != tokenizer.pad_token_id).nonzero().flatten()  # drops pad tokens at both ends
        ids = ids[real[0] : real[-1] + 1] if len(real) else ids[:0]
    return Prompt(ids=ids if len(ids) else torch.tensor([begin_id(tokenizer)]), columns=columns)


def begin_id(tokenizer: Any) -> int:
    """Returns the begin token, or the end token if the tokenizer has none."""
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


# ---------------------------------------------------------------------- samples


def tokenize_dialogue(dialogue: Any, tokenizer: Any, max_length: int = 2048) -> Sequence:
    """Returns the sequence of a sample: a text, which follows the begin token, or alternating prompts and outputs. The
    first message is the prompt; of the others the outputs count. The end token is added if it is missing.

    Longer samples are truncated on the tokenizer's truncation side; if the rest begins with an output, a begin token is
    added before it. Raises ValueError for an odd number of messages, and if no token is left that counts.
    """
    if isinstance(dialogue, str):
        messages = [(False, [begin_id(tokenizer)]), (True, _ids(_ended(dialogue, tokenizer), tokenizer))]
    else:
        texts = [str(text) for text in dialogue]
        if not texts or len(texts) % 2:
            raise ValueError(f'a sample has {len(texts)} messages; give prompt and output in turn, an even number')
        texts[-1] = _ended(texts[-1], tokenizer)
        messages = [(i % 2 == 1, _ids(text, tokenizer)) for i, text in enumerate(texts)]
    flat = [(token, is_output) for is_output, ids in messages for token in ids]
    left = tokenizer.truncation_side == 'left'
    kept = flat[-max_length:] if left else flat[:max_length]
    if kept and kept[0][1]:
        kept = [(begin_id(tokenizer), False), *(kept[1:] if left and len(kept) == max_length else kept)]
        kept = kept[:max_length]
    first = next((i for i, (_, is_output) in enumerate(kept) if is_output), len(kept))
    if first == len(kept):
        raise ValueError(f'a sample of {len(flat)} tokens has no output within max_length={max_length}')
    ids, counts = (torch.tensor(column) for column in zip(*kept, strict=True))
    return Sequence(prompt_ids=ids[:first], response_ids=ids[first:], response_mask=counts[first:])


def tokenize_pair(sample: Any, tokenizer: Any, max_length: int = 2048) -> Sequence:
    """Returns the sequence of a sample (prompt, output) for an encoder-decoder, each with its own special tokens and at
    most `max_length` tokens. Raises ValueError for anything else."""
    if isinstance(sample, str) or len(sample) != 2:
        what = 'a text' if isinstance(sample, str) else f'{len(sample)} messages'
        raise ValueError(f'a sample of an encoder-decoder is a prompt and an output, and this is {what}')
    example = Demonstration(prompt=str(sample[0]), response=str(sample[1]))
    return tokenize_demonstration(example, tokenizer, TokenizerOptions(max_length=max_length))


def text_sequence(text: str, tokenizer: Any, max_length: int) -> Sequence:
    """Returns a sequence in which every token of a text except the first is learned, without an added end token, as in
    trlX's SFT. Raises ValueError for fewer than two tokens."""
    ids = torch.tensor(_ids(text, tokenizer, max_length))
    if len(ids) < 2:
        raise ValueError(f'the sample {text!r} has {len(ids)} tokens; a text to learn needs two')
    return all_but_first(ids)


def _ids(text: str, tokenizer: Any, max_length: int | None = None) -> list[int]:
    cut = {} if max_length is None else {'truncation': True, 'max_length': max_length}
    return list(tokenizer(text, add_special_tokens=False, **cut)['input_ids'])


def _ended(text: str, tokenizer: Any) -> str:
    end = tokenizer.eos_token
    return text if end is None or text.endswith(end) else text + end
