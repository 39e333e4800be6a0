"""Generation of episodes with several turns, on top of any rollout engine.

A transcript is append-only: the ids that the policy sampled, then the ids of the observation, which
`Sample.response_mask` excludes. Positions of random draws count both, so turns never share a random number.

An engine with `plays_turns` keeps its cache between turns; another one is called once per turn with the transcript as
the prompt. Batches depend on token counts and order only, never on how long an environment takes, so a run on a CPU is
reproducible to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chatgpt.environments import EnvironmentSettings, Failure, Runner, Step, find_environment, seed_of
from chatgpt.environments.base import InvalidStep, Observation, joined
from chatgpt.environments.registry import described
from chatgpt.environments.transcript import ChatTemplate, TranscriptFormat, for_workers, transcript_for
from chatgpt.nn.layouts import check_causal
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import EngineAround, RolloutEngine
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.rollout.stop import StopStrings
from chatgpt.types import Episode, EpisodeEnd, FinishReason, Prompt, Sample, Turn

if TYPE_CHECKING:
    from chatgpt.nn import Actor


def check_writes_turns(config: Any) -> None:
    """Raises ValueError for an encoder-decoder, because one response holds all turns."""
    check_causal(config, 'the turns of an environment are written by')


class EpisodeEngine(EngineAround):
    """Generates whole episodes with an engine that generates responses.

    Args:
        engine: generates the turns.
        environment: creates the environment of an episode: a class, a function without arguments, or a name.
        tokenizer: encodes observations and decodes turns.
        settings: limits of turns. A call's `max_new_tokens` and `max_length` bound the whole response, turns and
            observations.
        stop_strings: strings that end a turn, the same as in the call's sampling.
        transcript: converts observations to ids. By default `ChatTemplate` for an environment with tools or messages or
            where the settings or the tokenizer's choice for text require it, otherwise `TextOrChat`.

    Raises:
        ValueError: no tokenizer, an environment that cannot be created, observations that cannot be encoded, a chat
            template that does not allow appending turns, or an engine with `slice_tokens`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Any,
        tokenizer: Any,
        settings: EnvironmentSettings | None = None,
        *,
        stop_strings: StopStrings | None = None,
        transcript: TranscriptFormat | None = None,
    ) -> None:
        if tokenizer is None:
            raise ValueError('an environment needs a tokenizer: its observations are texts')
        super().__init__(engine)
        self.refuse_parts('an environment plays whole episodes')
        self.tokenizer = tokenizer
        self.settings = settings or EnvironmentSettings()
        self.factory = find_environment(environment)
        self.stop_strings = stop_strings
        self.transcript = transcript or transcript_for(self.factory, tokenizer, self.settings)
        self.runner = Runner(self.factory, self.settings)
        limits: dict[str, Any] = {n: getattr(self.settings, n) for n in ('max_turns', 'max_turn_tokens')}
        if self.settings.apply_chat_template is not None:
            limits['apply_chat_template'] = self.settings.apply_chat_template
        if self.settings.chat_template_kwargs:
            limits['chat_template_kwargs'] = dict(self.settings.chat_template_kwargs)
        self.environment = described(self.factory) | limits
        if engine.abilities.spans_ranks and not engine.abilities.takes_environments:
            raise ValueError(
                'episodes take a different number of turns on each rank, and ranks call this engine together: leave '
                'vllm_tensor_parallel out, or use rollout workers'
            )
        self.is_remote = engine.abilities.takes_environments
        """True if environments run in the engine's workers"""
        if self.is_remote:
            given = {'environment': environment, 'stop_strings': stop_strings, 'transcript': transcript}
            sent, settled = for_workers(tokenizer, self.settings)
            around = partial(EpisodeEngine, **given, tokenizer=sent, settings=settled)
            engine.put_around(around, identity=(given, tokenizer, settings))
        ahead = self.is_remote and engine.abilities.answers_ahead
        self.abilities = replace(
            engine.abilities, answers_ahead=ahead, runs_actor=False, plays_turns=False, takes_environments=False
        )

    def begin(self, actor: Actor) -> None:
        check_writes_turns(getattr(actor, 'config', None))
        super().begin(actor)

    def close(self) -> None:
        """Stops the threads or processes that run environments."""
        self.runner.close()

    def generate(self, call: Call) -> list[Sample]:
        """Returns one episode per prompt, in the order of the prompts; see `RolloutEngine.generate`.

        A prompt's ids, which may be empty, precede the first observation. Raises ValueError for `offsets` and `limits`,
        which belong to turns.
        """
        if any(call.offsets) or any(limit is not None for limit in call.limits):
            raise ValueError('EpisodeEngine.generate takes no offsets and limits; give its engine a turn to draw')
        if self.is_remote:
            return self.engine.generate(call)
        transcripts = [_Transcript(*of) for of in zip(call.indices, call.groups, call.prompts, strict=True)]
        conversations = _Conversations(self, call.sampling, call.seed, transcripts)
        try:
            conversations.run()
        finally:
            conversations.forget()
        return [t.sample(call.sampling.temperature, self._decoded) for t in transcripts]

    def columns(self, prompt: Prompt) -> dict[str, Any]:
        """Returns the columns of a data row that are passed to `reset`."""
        messages = prompt.messages
        if isinstance(self.transcript, ChatTemplate):
            messages = self.transcript.messages(prompt)
        return {**prompt.columns, 'prompt': messages} if messages else prompt.columns

    def openings(self, prompts: Sequence[Prompt], *, seed: int, groups: Sequence[int]) -> list[list[int]]:
        """Returns the ids before the first turn of each prompt's episode, from environments that are reset and then
        discarded. Warns if an environment's first observation differs between two resets with the same seed.

        Raises:
            ValueError: an environment failed.
        """
        begun = [self._begun(seed_of(seed, group), prompt) for group, prompt in zip(groups, prompts, strict=True)]
        for group, prompt, first in list(zip(groups, prompts, begun, strict=True))[:1]:
            if self._begun(seed_of(seed, group), prompt) != first:
                warnings.warn(
                    f'environment {self.runner.name} begins in two ways with one seed, so the samples of a group have '
                    'different tasks and a run does not repeat: let reset draw from random.Random(seed)',
                    stacklevel=2,
                )
        return [self.transcript.first(prompt, first) for prompt, first in zip(prompts, begun, strict=True)]

    def _begun(self, seed: int, prompt: Prompt) -> Observation:
        self.runner.start('opening', seed, self.columns(prompt))
        answer = self.runner.result('opening')
        self.runner.forget('opening')
        if isinstance(answer, Failure):
            raise ValueError(f'environment: {answer.message}')
        return answer.observation

    def last_turn(self, prompt: Prompt, observation: Observation) -> str:
        """Returns the text of the last message before the first response, or '' for plain text."""
        if isinstance(observation, str):
            chat = getattr(self.transcript, 'format', self.transcript)  # that of a `TextOrChat`
            if not isinstance(chat, ChatTemplate):
                return ''
            observation = joined(chat.messages(prompt), observation)
        return str(observation[-1].get('content') or '') if observation else ''

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def response_of(self, turn: Sample, before: list[int]) -> str | dict[str, Any]:
        """Returns a turn in the form that `step` takes: its text without end token and (except for SkyRL-Gym) stop
        string, or a message if there are tools. `before` holds the ids of the preceding observation or prompt."""
        turn_ids = turn.response_ids.tolist()
        if isinstance(self.transcript, ChatTemplate) and self.transcript.tools is not None:
            return self.transcript.message(turn_ids, turn.finish_reason, before)
        if self.stop_strings is not None and not getattr(self.factory, 'keeps_stop', False):
            return self.stop_strings.text_of(turn_ids)
        return self._decoded(turn_ids)


class _Transcript:
    """An episode in progress."""

    def __init__(self, key: int, group: int, prompt: Prompt) -> None:
        self.key, self.group, self.prompt = key, group, prompt
        self.prompt_ids: list[int] = []
        self.last_turn = ''
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        """ids, mask, log-probs, filtered log-probs and edge distances of each turn and each observation"""
        self.length = 0
        self.room = 0  # maximum number of tokens after the prompt
        self.turns: list[Turn] = []
        self.end: EpisodeEnd | None = None
        self.finish: FinishReason = 'length'
        self.message = ''
        self.success: bool | None = None
        self.step_s = 0.0

    def add_turn(self, turn: Sample) -> None:
        self.turns.append(Turn(start=self.length, stop=self.length + turn.num_actions))
        self._add(turn.response_ids, True, turn.logprobs, turn.filtered_logprobs, turn.edge_distances)

    def add_observation(self, ids: Tensor) -> None:
        zeros = torch.zeros(len(ids))
        self._add(ids, False, zeros, zeros, torch.ones(len(ids)))

    def _add(self, ids: Tensor, counts: bool, logprobs: Tensor, filtered: Tensor, edges: Tensor) -> None:
        self.parts.append((ids, torch.full((len(ids),), counts), logprobs, filtered, edges))
        self.length += len(ids)

    def reward(self, rewards: dict[str, float]) -> None:
        """Sets the rewards of the latest turn."""
        self.turns[-1] = replace(self.turns[-1], rewards=rewards)

    def ids(self) -> Tensor:
        return torch.cat([torch.tensor(self.prompt_ids, dtype=torch.int64), *(part[0] for part in self.parts)])

    def sample(self, temperature: float, decode: Callable[[list[int]], str]) -> Sample:
        assert self.end is not None
        if not self.parts:  # a sample has at least one token; without a turn it is one that the mask excludes
            self.add_observation(torch.tensor(self.prompt_ids[-1:], dtype=torch.int64))
        ids, mask, logprobs, filtered, edges = map(torch.cat, zip(*self.parts, strict=True))
        return Sample(
            index=self.key,
            group=self.group,
            prompt_ids=torch.tensor(self.prompt_ids, dtype=torch.int64),
            response_ids=ids,
            response_mask=mask,
            logprobs=logprobs,
            filtered_logprobs=filtered,
            edge_distances=edges,
            finish_reason='eos' if self.end == 'terminated' else 'length',
            temperature=temperature,
            prompt_text=decode(self.prompt_ids),
            last_turn=self.last_turn,
            response_text=decode(ids.tolist()),
            columns=self.prompt.columns,
            episode=Episode(
                turns=tuple(self.turns), end=self.end, message=self.message, success=self.success, step_s=self.step_s
            ),
        )


class _Conversations:
    """The episodes of a call, and their `Turns`."""

    def __init__(self, owner: EpisodeEngine, sampling: SamplingParams, seed: int, all_: list[_Transcript]) -> None:
        self.owner, self.sampling, self.seed, self.all = owner, sampling, seed, all_
        self.live: list[_Transcript] = []

    def run(self) -> None:
        runner = self.owner.runner
        for t in self.all:
            runner.start(t.key, seed_of(self.seed, t.group), self.owner.columns(t.prompt))
        for t in self.all:
            self._open(t, runner.result(t.key))
        self.live = [t for t in self.all if t.end is None]
        engine = self.owner.engine
        if engine.abilities.plays_turns and self.live:
            engine.converse(self._call(self.live), self)
            return
        rest = list(range(len(self.live)))
        while rest:
            call = self._call([self.live[i] for i in rest])
            offsets = [self.live[i].length for i in rest]
            limits: list[int | None] = [self.limit(i) for i in rest]
            for i, turn in zip(rest, engine.generate(replace(call, offsets=offsets, limits=limits)), strict=True):
                self.ended(i, turn)
            rest = [i for i in rest if self.next(i) is not None]

    def _call(self, transcripts: list[_Transcript]) -> Call:
        """Makes the call for the next turns of these transcripts."""
        return Call.of(
            [Prompt(ids=t.ids()) for t in transcripts],
            self.sampling,
            seed=self.seed,
            indices=[t.key for t in transcripts],
            groups=[t.group for t in transcripts],
        )

    def forget(self) -> None:
        for t in self.all:
            self.owner.runner.forget(t.key)

    def _open(self, t: _Transcript, answer: Step | Failure) -> None:
        prompt_ids = t.prompt.ids.tolist()
        if isinstance(answer, Failure):
            t.prompt_ids = prompt_ids or [self.sampling.pad_token_id]
            self._fail(t, answer)
            return
        try:
            t.prompt_ids = self.owner.transcript.first(t.prompt, answer.observation)
            t.last_turn = self.owner.last_turn(t.prompt, answer.observation)
        except InvalidStep as error:
            t.prompt_ids = prompt_ids or [self.sampling.pad_token_id]
            self._refuse(t, error)
            return
        t.room = self.sampling.room(len(t.prompt_ids))
        t.step_s += answer.seconds
        if t.room < 1:
            t.end = 'tokens'

    def limit(self, i: int) -> int:
        most, left = self.owner.settings.max_turn_tokens, self.live[i].room - self.live[i].length
        return left if most is None else min(left, most)

    def ended(self, i: int, turn: Sample) -> None:
        t = self.live[i]
        before = t.parts[-1][0].tolist() if t.parts else t.prompt_ids
        t.add_turn(turn)
        t.finish = turn.finish_reason
        self.owner.runner.act(t.key, self.owner.response_of(turn, before))

    def next(self, i: int) -> Tensor | None:
        t = self.live[i]
        answer = self.owner.runner.result(t.key)
        if isinstance(answer, Failure):
            self._fail(t, answer)
            return None
        t.step_s += answer.seconds
        t.reward(answer.rewards)
        t.success = answer.success if answer.success is not None else t.success
        if answer.terminated or answer.truncated:
            t.end = 'terminated' if answer.terminated else 'truncated'
            return None
        if len(t.turns) == self.owner.settings.max_turns:
            self._cut(t, 'turns')
            return None
        turn = t.parts[-1][0].tolist()
        try:
            ids = torch.tensor(self.owner.transcript.after(turn, t.finish, answer.observation), dtype=torch.int64)
        except InvalidStep as error:
            self._refuse(t, error)
            return None
        if t.length + len(ids) >= t.room:
            self._cut(t, 'tokens')
            return None
        t.add_observation(ids)
        return ids

    def _cut(self, t: _Transcript, reason: EpisodeEnd) -> None:
        """Ends an episode at a limit, before its environment ends it."""
        runner = self.owner.runner
        runner.finish(t.key)
        answer = runner.result(t.key)
        if isinstance(answer, Failure):
            self._fail(t, answer)
            return
        t.end = reason
        t.step_s += answer.seconds
        given = t.turns[-1].rewards
        t.reward(given | {name: given.get(name, 0.0) + value for name, value in answer.rewards.items()})

    def _refuse(self, t: _Transcript, error: InvalidStep) -> None:
        self._fail(t, Failure(reason='invalid', message=f'{self.owner.runner.name}: {error}'))

    def _fail(self, t: _Transcript, failure: Failure) -> None:
        t.end, t.message = failure.reason, failure.message
        t.step_s += failure.seconds
