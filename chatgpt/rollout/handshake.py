"""Checks that an engine with copied weights computes the same log-probs as the actor.

`Handshake.of(actor)` runs a short sequence through the actor and keeps the most likely tokens and their log-probs after
a few prefixes. The engine generates its greedy next token after the same prefixes. A missing, outdated or misplaced
tensor shows as a difference of log-probs far above what rounding in the two dtypes explains.

`CheckedEngine` makes the check after each transfer, before the first sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chatgpt.nn.trunk import in_eval_mode, position_limit, text_config
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.types import Prompt, Sample

LENGTHS = (2, 4, 8, 16)
"""lengths of the prefixes"""
NUM_TOP_TOKENS = 32
"""number of tokens that are kept after each prefix"""
TOLERANCES = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.5}
"""largest allowed difference in nats. In fp32 two programs agree to 1e-5 on a CPU, and to 1e-2 on a GPU with TF32.
bf16 has 8 bits of mantissa: rounding a logit of 20 once is an error of up to 0.06, and a trunk rounds in every layer"""
GREEDY = SamplingParams(max_new_tokens=1, do_sample=False)


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """The actor's most likely next tokens after a few prompts."""

    engine: str
    """class name of the engine, for messages"""
    prompt_ids: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    """the most likely tokens after each prompt, in descending order"""
    logprobs: tuple[tuple[float, ...], ...]
    dtype: torch.dtype
    """dtype of the actor's weights"""
    tolerance: float | None = None
    """in nats; None chooses by dtype"""

    @classmethod
    @torch.no_grad()
    def of(cls, actor: Any, engine: str, tolerance: float | None = None) -> Handshake:
        """Makes a handshake from one forward of the actor over at most 16 tokens.

        Raises:
            FloatingPointError: the actor's log-probs are not finite.
        """
        config = text_config(actor.model.config)
        positions = position_limit(config)
        length = LENGTHS[-1] if positions is None else max(1, min(LENGTHS[-1], positions - 1))
        ends = [n for n in LENGTHS if n <= length] or [length]
        parameter = next(actor.parameters())
        ids = torch.arange(1, length + 1) * 7919 % config.vocab_size
        row, position_ids = ids[None].to(parameter.device), torch.arange(length, device=parameter.device)[None]
        with in_eval_mode(actor):
            hidden = actor.trunk(row, position_ids=position_ids)[0]
            logits = actor.head(hidden[[n - 1 for n in ends]])
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        if not torch.isfinite(logprobs).all():
            raise FloatingPointError(f'{engine}: log-probs of the actor are not finite, before it is given its weights')
        values, tokens = logprobs.topk(min(NUM_TOP_TOKENS, logprobs.shape[-1]), dim=-1)
        return cls(
            engine=engine,
            prompt_ids=tuple(tuple(ids[:n].tolist()) for n in ends),
            tokens=tuple(map(tuple, tokens.tolist())),
            logprobs=tuple(map(tuple, values.tolist())),
            dtype=parameter.dtype,
            tolerance=tolerance,
        )

    def prompts(self) -> list[Prompt]:
        return [Prompt(ids=torch.tensor(ids)) for ids in self.prompt_ids]

    def best(self) -> list[tuple[int, float]]:
        """Returns the most likely token after each prompt and its log-prob."""
        return [(tokens[0], logprobs[0]) for tokens, logprobs in zip(self.tokens, self.logprobs, strict=True)]

    def ask(self, generate: Callable[[list[Prompt], SamplingParams], Sequence[Sample]]) -> list[tuple[int, float]]:
        """Returns an engine's greedy token after each prompt and its log-prob."""
        samples = generate(self.prompts(), GREEDY)
        return [(int(s.response_ids[0]), float(s.logprobs[0])) for s in samples]

    def difference(self, found: Sequence[tuple[int, float]]) -> float:
        """Returns the largest difference of a log-prob that these greedy tokens show."""
        return max(map(self._token_difference, range(len(self.prompt_ids)), found))

    def _token_difference(self, i: int, found: tuple[int, float]) -> float:
        token, logprob = found
        tokens, logprobs = self.tokens[i], self.logprobs[i]
        if token in tokens:
            return abs(logprob - logprobs[tokens.index(token)])
        # Not among the actor's top tokens: this token's log-prob or the best one's has moved by at least half the gap.
        return max(abs(logprob - logprobs[0]), (logprobs[0] - logprobs[-1]) / 2)

    def check(self, found: Sequence[tuple[int, float]], dtype: torch.dtype | None = None) -> float:
        """Returns the difference of an engine that computes in `dtype`, by default the actor's.

        Raises:
            RuntimeError: the difference exceeds the tolerance.
        """
        difference = self.difference(found)
        dtypes = {self.dtype, dtype or self.dtype}
        explained = max(TOLERANCES.get(d, TOLERANCES[torch.bfloat16]) for d in dtypes)
        explained = explained if self.tolerance is None else self.tolerance
        if not difference <= explained:
            names = ' and '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))
            raise RuntimeError(
                f'{self.engine}: after a transfer of weights a log-prob of the engine differs from the '
                f"actor's by {difference:.2g} nats, where {names} {'explain' if len(dtypes) > 1 else 'explains'} "
                f'{explained:g}: it does not compute with the weights that it was sent; look at which tensors arrived, '
                "at its config.json, and at options that change its numbers (quantization, dtype); an engine's "
                'attribute tolerance sets another limit'
            )
        return difference
