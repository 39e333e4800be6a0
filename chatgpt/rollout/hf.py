"""An engine that calls `model.generate`, for models and settings that the local engine does not support.

Prompts are padded on the left, with an attention mask; if a check finds that padding changes the model's numbers, only
prompts of equal length are batched. Any GenerationConfig field is accepted (`SamplingParams.extra`). Random draws
depend on (seed, sample index, position), as in `LocalEngine`. Beam search is transformers' own, with a torch generator
seeded per batch. An encoder-decoder reads prompts padded on the right, as in learning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from chatgpt.batching import collate
from chatgpt.nn.actor import Actor
from chatgpt.nn.compiled import not_compiled
from chatgpt.nn.layouts import start_token
from chatgpt.nn.packing import flat_hidden
from chatgpt.nn.trunk import base_model, is_encoder_decoder, position_limit, row_limit, text_config
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities, CheckedEngine, changing_shapes
from chatgpt.rollout.local.masks import windows_of
from chatgpt.rollout.randomness import sample_keys, stream_keys, uniforms
from chatgpt.rollout.sampling import SamplingParams, TokenSampler
from chatgpt.types import FinishReason, Sample
from chatgpt.types import Sequence as TokenSequence

if TYPE_CHECKING:
    from collections.abc import Iterator


CHECK_LENGTHS = (5, 3, 4)
CHECK_STEPS = 3
FORWARD_MISMATCH = 'HFEngine: what {} generates does not agree with its plain forward: {}'
FILTER_EXTRAS = frozenset(('min_p', 'typical_p', 'epsilon_cutoff', 'eta_cutoff', 'top_h', 'watermarking_config'))
"""extra settings that transformers applies after temperature, top_k and top_p"""
TOKENWISE_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)


class _StopCallback(StoppingCriteria):
    """Calls `sampling.stop` for each row and records the number of response tokens at which it stops."""

    def __init__(
        self, stop: Callable[[Sequence[int]], bool], prompt_width: int, min_new_tokens: int, rows: int
    ) -> None:
        self.stop, self.prompt_width, self.min_new_tokens = stop, prompt_width, min_new_tokens
        self.stopped_at: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        responses = input_ids[:, self.prompt_width :].tolist()
        for row, ids in enumerate(responses):
            if self.stopped_at[row] is None and len(ids) >= self.min_new_tokens and self.stop(ids):
                self.stopped_at[row] = len(ids)
        return torch.tensor([at is not None for at in self.stopped_at], device=input_ids.device)


class _KeepLogits(LogitsProcessor):
    """The first of the logits processors; keeps the (rows, V) logits of the current step."""

    scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores = scores
        return scores


class _ActorHead(_KeepLogits):
    """Replaces the model's logits by those of the actor's head, which may differ (ILQL)."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.states = actor, None

    def keep(self, _: Any, args: Any, output: Any) -> None:
        self.states = output.last_hidden_state[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids, self.actor.head(self.states))


class _DrawTokens(LogitsProcessor):
    """The last of the logits processors: draws each step's tokens as `LocalEngine` does and masks all others, so that
    transformers must choose them. Keeps their recorded numbers, not the logits."""

    def __init__(self, call: Call, actor: Actor, device: torch.device) -> None:
        self.temperature, sampling = call.sampling.temperature, call.sampling
        if _has_filter_extras(sampling):
            sampling = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0)
        self.sampler = TokenSampler(sampling, device)
        self.logits = _ActorHead(actor) if getattr(actor, 'changes_logits', False) else _KeepLogits()
        self.keys = sample_keys(call.seed, torch.tensor(call.indices)).to(device)[:, None]
        self.offsets = torch.tensor(call.offsets, device=device)[:, None]
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []
        """log-probs, filtered log-probs and edge distances of each step, (rows, 1) each"""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.logits.scores is not None
        sampling, step = self.sampler.sampling, len(self.steps)
        uniform = uniforms(self.keys, self.offsets + step) if sampling.do_sample else None
        early = step < sampling.min_new_tokens
        no_end = torch.ones(len(scores), dtype=torch.bool, device=scores.device) if early else None
        draw = self.sampler(scores, uniform, no_end)
        token = draw.token[:, None]
        plain = torch.log_softmax(self.logits.scores.float() / self.temperature, dim=-1).gather(1, token)
        edge = torch.ones_like(plain) if draw.edge_distance is None else draw.edge_distance[:, None]
        self.steps.append((plain, draw.filtered_logprob[:, None], edge))
        self.logits.scores = None
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    @contextmanager
    def around(self, model: Any) -> Iterator[None]:
        """Context in which `model.generate` applies these processors."""
        make = model._get_logits_processor

        def ours(*args: Any, **kwargs: Any) -> LogitsProcessorList:
            return LogitsProcessorList([self.logits, *make(*args, **kwargs), self])

        with ExitStack() as undone:
            if isinstance(self.logits, _ActorHead):
                undone.callback(model.get_decoder().register_forward_hook(self.logits.keep).remove)
            model._get_logits_processor = ours
            undone.callback(delattr, model, '_get_logits_processor')
            yield


class HFEngine(CheckedEngine):
    """Generates with `model.generate` of the actor's transformers model, in batches of `max_batch_size` prompts.

    With extra settings, `filtered_logprobs` include all of transformers' logits processors.
    """

    abilities = Abilities(copies_weights=False, reproducible=True)

    def __init__(self, *, max_batch_size: int = 64) -> None:
        if max_batch_size < 1:
            raise ValueError(f'HFEngine: max_batch_size={max_batch_size}; give a positive integer')
        self.max_batch_size = max_batch_size
        self._pads = True
        """False if padding on the left changes the model's numbers; then only prompts of equal length are batched"""
        self._window_error: str | None = None
        """why generation beyond the attention window is wrong, '' if it is correct, None if not checked yet"""
        self._checked: Any = None

    def hold(self, actor: Actor) -> None:
        """Keeps the actor, with dropout off. A new model's generation is first compared with its plain forward.

        Raises:
            ValueError: the model has no `generate`, the actor's head differs from the model's, or generation does not
                agree with the plain forward.
        """
        if not hasattr(actor.model, 'generate'):
            raise ValueError(
                f'HFEngine: {type(actor.model).__name__} has no generate method; give a causal language model'
            )
        own_head = isinstance(actor, Actor) and is_encoder_decoder(actor.model)  # `_ActorHead` calls it at each step
        if getattr(actor, 'changes_logits', False) and not own_head:
            raise ValueError(
                f"HFEngine: {type(actor).__name__} changes the model's logits, which model.generate would not see; use "
                'LocalEngine'
            )
        super().hold(actor)
        parameter, config = next(actor.parameters()), actor.model.config
        kind = (type(actor.model), parameter.dtype, parameter.device, str(config.to_dict()))
        if self._checked != kind:
            try:
                self._pads = self._check(actor)
            except Exception:
                self.end()
                raise
            self._checked, self._window_error = kind, None

    def _check(self, actor: Actor) -> bool:
        """Returns True if prompts of different lengths may be batched. Raises ValueError if even prompts of equal
        length give other logits than the plain forward."""
        found = []
        for lengths in (CHECK_LENGTHS, CHECK_LENGTHS[:1] * 2):
            why = _forward_mismatch(actor, lengths)
            if not why:
                break
            found.append(why)
        else:
            raise ValueError(FORWARD_MISMATCH.format(type(actor.model).__name__, found[-1]))
        pad = getattr(actor.model.config, 'pad_token_id', None)
        if pad is not None and is_encoder_decoder(actor.model):  # a sampled padding token must be attended to
            why = _forward_mismatch(actor, lengths, first=pad)
            if why:
                why += f', after a drawn padding token ({pad})'
                raise ValueError(FORWARD_MISMATCH.format(type(actor.model).__name__, why))
        return lengths is CHECK_LENGTHS

    def check(self, config: Any, call: Call) -> list[int]:
        """Checks a call. The first time that sequences exceed the model's attention window, generation beyond it is
        compared with the plain forward. Raises ValueError if they disagree, and for a second turn of an
        encoder-decoder."""
        if any(call.offsets) and is_encoder_decoder(self._actor.model):
            raise ValueError(
                f'{type(self._actor.model).__name__} is an encoder-decoder, whose prompt cannot hold what it has '
                'written: it has one turn; use a causal language model for episodes of several'
            )
        limits, windows = super().check(config, call), windows_of(config)
        longest = max((len(p.ids) + limit for p, limit in zip(call.prompts, limits, strict=True)), default=0)
        if windows is None or longest <= windows.sizes[0]:
            return limits
        if self._window_error is None:
            lengths = windows.example_lengths if self._pads_to(longest) else [windows.example_lengths[-2]] * 2
            self._window_error = _forward_mismatch(self._actor, lengths)
        if self._window_error:
            raise ValueError(
                f'HFEngine: what {type(self._actor.model).__name__} generates beyond its attention window of '
                f'{windows.sizes[0]} does not agree with its plain forward ({self._window_error}); give shorter '
                f'sequences than {longest} tokens'
            )
        return limits

    def _pads_to(self, longest: int) -> bool:
        """Returns True if prompts may be padded on the left when sequences grow to `longest` tokens."""
        most = row_limit(self._actor.model.config)
        return self._pads and (most is None or longest <= most)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        samples: dict[int, Sample] = {}
        lengths = [len(prompt.ids) for prompt in call.prompts]
        longest = max(lengths, default=0) + max(limits, default=0)
        pads, apart = self._pads_to(longest), _has_fewer_positions(self._actor.model, longest)
        # a batch generates as many tokens for each row as for the one with the highest limit
        keys = [(0 if pads else n, limit if apart else 0) for n, limit in zip(lengths, limits, strict=True)]
        for places in self._batches(keys):
            part = call.part(places)
            samples |= zip(places, self._batch(part, [limits[i] for i in places]), strict=True)
        return [samples[i] for i in range(len(limits))]

    def _batches(self, keys: list[tuple[int, int]]) -> Iterator[list[int]]:
        """Yields the positions of the prompts of each batch, which have equal keys."""
        groups: dict[tuple[int, int], list[int]] = {}
        for place, key in enumerate(keys):
            groups.setdefault(key, []).append(place)
        for group in groups.values():
            for first in range(0, len(group), self.max_batch_size):
                yield group[first : first + self.max_batch_size]

    def _batch(self, call: Call, limits: list[int]) -> list[Sample]:
        prompts, sampling = call.prompts, call.sampling
        model = self._actor.model
        device = next(model.parameters()).device
        encodes = is_encoder_decoder(model)
        input_ids, attention_mask = padded([p.ids for p in prompts], _pad_token(model, sampling), on_left=not encodes)
        width = 1 if encodes else input_ids.shape[1]  # tokens before the responses
        stop = None
        criteria = StoppingCriteriaList()
        if sampling.stop is not None:
            stop = _StopCallback(sampling.stop, width, sampling.min_new_tokens, len(prompts))
            criteria.append(stop)
        key = int(stream_keys(call.seed, torch.tensor(call.indices[:1]), torch.tensor(call.offsets[:1]))[0])
        config = _generation_config(sampling, max(limits), model)
        record = None
        if config.get_generation_mode() in TOKENWISE_MODES:
            record = _DrawTokens(call, self._actor, device)
        elif getattr(self._actor, 'changes_logits', False):
            raise ValueError(
                f'HFEngine: {type(self._actor).__name__} draws from logits of its own, which only sampling and greedy '
                f'decoding see; leave out {", ".join(sampling.extra)}'
            )
        elif stop is not None and (config.num_beams or 1) > 1:
            raise ValueError('HFEngine: a beam cannot stop alone; leave num_beams out, or stop and stop_strings')
        else:  # with beams a row's token may come from another row's logits, which is known only at the end
            config.output_logits = config.output_scores = True
        self.abilities = Abilities(copies_weights=False, reproducible=record is not None)
        held = record.around(model) if record is not None else nullcontext()
        with (
            _bare_generation_config(model),
            torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []),
            torch.no_grad(),
            held,
            not_compiled(),  # an encoder is called without a cache
            changing_shapes(device),
        ):
            torch.manual_seed(key)  # `generate` takes no generator of its own
            output = model.generate(
                input_ids.to(device),
                attention_mask=attention_mask.to(device),
                generation_config=config,
                stopping_criteria=criteria,
            )
        responses = output.sequences[:, width:]
        steps = record.steps if record is not None else _beam_records(output, responses, sampling)
        logprobs, filtered, edges = (torch.cat(column, dim=1).cpu() for column in zip(*steps, strict=True))
        stopped_at = stop.stopped_at if stop else [None] * len(prompts)
        rows = zip(responses.tolist(), stopped_at, limits, strict=True)
        ends = [_response_length(ids, sampling.eos_token_ids, at, limit) for ids, at, limit in rows]
        # greedy beams may take tokens outside of the filter
        call.check_finite(logprobs, filtered if record is not None else logprobs, [length for length, _ in ends])
        return call.samples((responses.cpu(), logprobs, filtered, edges), *zip(*ends, strict=True))


def _beam_records(output: Any, responses: Tensor, sampling: SamplingParams) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns log-probs of the raw logits, log-probs after transformers' processors, and edge distances of 1 for each
    step, (rows, 1) fp32 each."""
    sampler, steps = TokenSampler(sampling, responses.device), []
    beams = getattr(output, 'beam_indices', None)
    for t in range(responses.shape[1]):
        # with beams, token t of row i may come from the scores of another row
        rows, token = slice(None) if beams is None else beams[:, t].clamp(min=0), responses[:, t : t + 1]
        plain = torch.log_softmax(output.logits[t][rows].float() / sampling.temperature, dim=-1).gather(1, token)
        scores = torch.log_softmax(output.scores[t][rows].float(), dim=-1)
        if not sampling.do_sample:  # transformers leaves temperature and filters out of greedy scores
            scores = sampler.filter(torch.log_softmax(scores / sampling.temperature, dim=-1))[0]
        steps.append((plain, scores.gather(1, token), torch.ones_like(plain)))
    return steps


@torch.no_grad()
def _forward_mismatch(actor: Actor, lengths: Sequence[int], first: int | None = None) -> str:
    """Compares greedy generation from left-padded prompts of these lengths with plain forwards of each sequence, and
    returns why they disagree, or ''. `first` is forced as the first token of an encoder-decoder."""
    model: Any = actor.model
    device, vocab = next(actor.parameters()).device, text_config(model.config).vocab_size
    width, encodes = max(lengths), is_encoder_decoder(model)
    prompts = [((torch.arange(width - n, width) + row * width) * 7919 + 13) % vocab for row, n in enumerate(lengths)]
    sampling = SamplingParams(max_new_tokens=CHECK_STEPS, do_sample=False)
    ids, mask = (x.to(device) for x in padded(prompts, _pad_token(model, sampling), on_left=not encodes))
    config = _generation_config(sampling, CHECK_STEPS, model)
    config.output_logits, config.forced_bos_token_id = True, first
    try:
        with _bare_generation_config(model):
            output = model.generate(ids, attention_mask=mask, generation_config=config)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        return f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
    difference = scale = 0.0
    for row in range(len(lengths)):
        response = output.sequences[row, 1 if encodes else width :]
        states = _plain_states(actor, prompts[row].to(device), response)
        plain = Actor.head(actor, states).float()  # the model's own head, even if the actor overrides it
        generated = torch.stack([step[row] for step in output.logits]).float()
        difference = max(difference, float((plain - generated).abs().max()))
        scale = max(scale, float(plain.abs().max()))
    wide = next(actor.parameters()).dtype in (torch.float32, torch.float64)
    allowed = max(scale, 1e-6) * (1e-3 if wide else 5e-2)
    if difference <= allowed:  # False for NaN
        return ''
    return f'logits differ by {difference:.1e}, more than {allowed:.1e}'


def _plain_states(actor: Actor, prompt: Tensor, response: Tensor) -> Tensor:
    """Returns (A, D) states that predict the tokens of a response, from a forward of this sequence alone."""
    if is_encoder_decoder(actor.model):
        mask = torch.ones(len(response), dtype=torch.bool)
        record = TokenSequence(prompt_ids=prompt, response_ids=response, response_mask=mask)
        batch = collate([record]).to(response.device)
        return flat_hidden(base_model(actor.model), batch)[batch.action_index]
    ids = torch.cat([prompt, response])[None]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return actor.trunk(ids, position_ids=positions)[0, len(prompt) - 1 : -1]


def padded(sequences: Sequence[Tensor], pad_id: int, *, on_left: bool) -> tuple[Tensor, Tensor]:
    """Pads sequences of ids; returns ids and mask, (rows, width) int64."""
    width = max(len(ids) for ids in sequences)
    input_ids = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(sequences):
        place = slice(width - len(ids), width) if on_left else slice(len(ids))
        input_ids[row, place] = ids
        mask[row, place] = 1
    return input_ids, mask


def _pad_token(model: Any, sampling: SamplingParams) -> int:
    """Returns the padding token; for an encoder-decoder the config's own, because its positions may depend on it."""
    own = getattr(model.config, 'pad_token_id', None) if is_encoder_decoder(model) else None
    pad = sampling.pad_token_id if own is None else own
    return pad if pad < text_config(model.config).vocab_size else 0  # it is masked, but embedded


def _has_fewer_positions(model: Any, length: int) -> bool:
    """Returns True if a table of a decoder's positions ends before this length; rotary positions go on."""
    most = None if is_encoder_decoder(model) else position_limit(model.config)
    if most is None or length <= most:
        return False
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    return any(most <= table.num_embeddings <= most + 4 for table in tables)  # some begin with reserved rows


def _response_length(
    ids: list[int], eos: tuple[int, ...], stopped_at: int | None, limit: int
) -> tuple[int, FinishReason]:
    end = next((t + 1 for t, token in enumerate(ids) if token in eos), None)
    if end is not None and end <= limit and (stopped_at is None or end <= stopped_at):
        return end, 'eos'
    if stopped_at is not None and stopped_at <= limit:
        return stopped_at, 'stop'
    return min(len(ids), limit), 'length'


def _has_filter_extras(sampling: SamplingParams) -> bool:
    """Returns True if an extra setting filters the distribution. transformers applies it after temperature, top_k and
    top_p, so it then applies these too, and only the draw is made here."""
    return sampling.do_sample and not FILTER_EXTRAS.isdisjoint(sampling.extra)


def _generation_config(sampling: SamplingParams, max_new_tokens: int, model: Any) -> GenerationConfig:
    settings: dict[str, Any] = {
        'max_new_tokens': max_new_tokens,
        'do_sample': sampling.do_sample,
        'eos_token_id': list(sampling.eos_token_ids) or None,
        'pad_token_id': _pad_token(model, sampling),
        'min_new_tokens': sampling.min_new_tokens or None,
        'return_dict_in_generate': True,
        'use_cache': True,
    }
    if sampling.do_sample:
        settings |= {'temperature': sampling.temperature, 'top_k': sampling.top_k, 'top_p': sampling.top_p}
    if is_encoder_decoder(model):
        settings['decoder_start_token_id'] = start_token(model.config)
    mode = GenerationConfig(**(settings | dict(sampling.extra))).get_generation_mode()
    if mode in TOKENWISE_MODES and not _has_filter_extras(sampling):  # `_DrawTokens`'s
        settings |= {'min_new_tokens': None}
        settings |= {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0} if sampling.do_sample else {}
    return GenerationConfig(**(settings | dict(sampling.extra)))


@contextmanager
def _bare_generation_config(model: Any) -> Iterator[None]:
    """Context without the model's generation defaults, from which `generate` would fill all unset fields (end tokens,
    top_k, penalties)."""
    saved = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved
