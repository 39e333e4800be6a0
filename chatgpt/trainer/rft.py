"""Rejection-sampling fine-tuning (RFT): rounds of generating, selecting by score, and SFT on the selected responses.

Each round samples `num_samples_per_prompt` responses per prompt and keeps those at or above a quantile of the prompt's
scores but never the worst, without duplicates (Dong et al. 2023, "RAFT"; Yuan et al. 2023; trlX's RFT, with a quantile
that rises from round to round). The kept responses are learned for `max_epochs` passes. There is no KL penalty: the
quantile and few epochs keep the policy near.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from chatgpt.data.formats import note_model
from chatgpt.data.prompts import as_prompts
from chatgpt.rollout import RolloutEngine
from chatgpt.rollout.registry import engine_for
from chatgpt.rollout.sampling import sampling_for
from chatgpt.strategies.base import Strategy
from chatgpt.strategies.registry import prepared_by
from chatgpt.trainer.base import config_of
from chatgpt.trainer.collect import Collector
from chatgpt.trainer.experience.scorers import as_score, as_scorer, check_columns, described, scored, sequence_score
from chatgpt.trainer.objectives.config import SFTConfig
from chatgpt.trainer.objectives.sft import SFTObjective
from chatgpt.trainer.offline import Method, OfflineTrainer
from chatgpt.types import Prompt, Sample, Sequence


@dataclass(kw_only=True)
class RFTConfig(SFTConfig):
    """Settings of `RFTTrainer`."""

    num_rounds: int = 4
    """number of rounds of generating and learning"""
    num_samples_per_prompt: int = 8
    start_quantile: float = 0.7
    """quantile of each prompt's scores in the first round; trlX uses 0.7"""
    end_quantile: float = 0.95
    """quantile in the last round; trlX uses 0.95"""
    max_epochs: int = 1
    """passes over the kept responses of a round"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        if self.max_steps is not None:
            raise ValueError(
                f'max_steps={self.max_steps} does not end an RFT run, whose rounds are learned whole; set num_rounds'
            )

    def quantile(self, round_number: int) -> float:
        """Returns the quantile of round 0 .. num_rounds − 1, linear between the two."""
        share = round_number / max(self.num_rounds - 1, 1)
        return self.start_quantile + share * (self.end_quantile - self.start_quantile)


def select(samples: SequenceOf[Sample], scores: SequenceOf[float], quantile: float) -> list[int]:
    """Returns the positions of the samples to keep: in each group those at or above its quantile, without duplicates.

    A group of equal scores has none. The quantile is the 'higher' one, an actual score. If it is the lowest of its
    group, as with a reward of 0 or 1 and few successes, only better samples are kept; a quantile of 0 keeps all.
    Episodes of a failed environment are in no group.
    """
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        if not sample.failed:
            groups.setdefault(sample.group, []).append(i)
    kept = []
    for members in groups.values():
        of_group = sorted(scores[i] for i in members)
        if of_group[0] == of_group[-1]:
            continue
        threshold = of_group[math.ceil(quantile * (len(of_group) - 1) - 1e-9)]
        if quantile > 0 and threshold == of_group[0]:
            threshold = next(s for s in of_group if s > of_group[0])
        seen: set[tuple[int, ...]] = set()
        for i in members:
            text = tuple(samples[i].response_ids.tolist())
            if scores[i] >= threshold and text not in seen:
                seen.add(text)
                kept.append(i)
    return kept


class RFTTrainer(OfflineTrainer):
    """Trainer that alternates sampling and SFT of an actor.

    Metrics, beside `sft/...`: `rft/score_mean` and `rft/kept_score_mean` of the current round, `rft/kept` (share of
    samples), `rft/quantile`, `rft/round`. A logged phase is a round; `log_interval` has no effect. A decaying learning
    rate ends with the last round, on the assumption that the remaining rounds are as long as the current one.

    Args:
        prompts: as for `PPOTrainer.fit`.
        reward: a prepared reward model, a function `fn(prompts, responses, **columns)`, or a scorer.
        eval_data: demonstrations for `sft/val_...`.
        kwargs: settings of `RFTConfig` and generation keywords.
    """

    config: RFTConfig
    resumes_any_step = False  # checkpoints do not hold the kept samples of a round

    def __init__(
        self,
        strategy: Strategy | str,
        actor: nn.Module,
        optim: Optimizer,
        prompts: Any,
        reward: Any,
        eval_data: SequenceOf[Sequence] | None = None,
        *,
        config: RFTConfig | None = None,
        engine: RolloutEngine | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        config, generation = RFTConfig.split('RFTTrainer', config, kwargs)
        strategy, (actor, optim), reward = prepared_by(strategy, (actor, optim), reward)
        assert not isinstance(strategy, str)
        note_model(tokenizer, config_of(strategy, actor))
        self.prompts = as_prompts(prompts, tokenizer)
        scorer = as_scorer(reward)
        if scorer is None:
            raise ValueError(
                'RFTTrainer chooses by a reward, and got None; give a reward model or fn(prompts, responses, **columns)'
            )
        check_columns(scorer, self.prompts)
        self.scorer = scorer
        super().__init__(
            strategy,
            actor,
            optim,
            None,
            eval_data,
            method=ROUNDS,
            config=config,
            callbacks=callbacks,
            tokenizer=tokenizer,
            run_dir=run_dir,
        )
        sampling, stop_strings = sampling_for(strategy.unwrap(actor), tokenizer, generation)
        if not sampling.do_sample:
            raise ValueError('RFT chooses among different responses: do_sample=False gives only one')
        self.collector = Collector(
            strategy,
            engine or engine_for(strategy.unwrap(actor)),
            sampling,
            policy=partial(strategy.full_model, actor),
            tokenizer=tokenizer,
            stop_strings=stop_strings,
        )
        self.collector.set_prompts(self.prompts)
        self.round = 0
        """rounds done"""
        self.round_metrics: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {'round': self.round, 'round_metrics': self.round_metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.round, self.round_metrics = int(state['round']), dict(state['round_metrics'])

    def fingerprint(self) -> dict[str, Any]:
        return (
            super().fingerprint()
            | self.collector.fingerprint()
            | {'num_records': len(self.prompts), 'reward': described(self.scorer)}
        )

    def facts(self) -> dict[str, Any]:
        return {'method': 'rft', 'reward': described(self.scorer)} | self.collector.facts()

    def fit(self) -> None:
        """Runs the rounds that are left of `num_rounds`: after `load_checkpoint` it continues with the next one, and a
        second call has none."""
        c = self.config
        self.is_resuming = False
        with self.running(num_phases=self.phase + c.num_rounds - self.round):
            while self.round < c.num_rounds and not self.stop_agreed():
                self.train_data = self.chosen(self.round)
                if self.train_data:
                    self._learn_round()
                else:
                    self.round += 1
                    self.num_phases = self.phase + c.num_rounds - self.round
                    self.warn(
                        f'RFT round {self.round}: no prompt has responses of different scores; nothing is learned'
                    )

    def _learn_round(self) -> None:
        c = self.config
        per_epoch = -(-len(self.train_data) // c.train_batch_size)
        total = per_epoch * c.max_epochs
        self.epochs_before += c.max_epochs
        self.batches_done = 0
        self.expect_updates(total * (c.num_rounds - self.round))
        # A phase is a round, so that no checkpoint lies within one: it does not hold the kept samples.
        self.learn_phase(total, per_epoch, total)

    def end_phase(self, metrics: dict[str, float]) -> None:
        self.round += 1
        super().end_phase(metrics | self.round_metrics | self.collector.draw_metrics())

    def scored_samples(self, number: int) -> list[tuple[Sample, float]]:
        """Returns the samples of sampling round `number` with their scores, the same list on every rank."""
        strategy, n = self.strategy, self.config.num_samples_per_prompt
        mine = range(strategy.rank, len(self.prompts), strategy.world_size)
        prompts: list[Prompt] = [self.prompts[i] for i in mine for _ in range(n)]
        first = number * len(self.prompts) * n
        indices = [first + i * n + j for i in mine for j in range(n)]
        groups = [i for i in mine for _ in range(n)]
        with self.clock.measure('collect'):
            samples = self.collector.generate(prompts, indices=indices, groups=groups)
        with self.clock.measure('score'):
            given = scored(self.scorer, samples, strategy)
        checked = [(sample, as_score(value, sample, 'the reward')) for sample, value in given]
        return [(sample, sequence_score(s, sample)) for sample, s in checked]

    def chosen(self, number: int) -> list[Sequence]:
        """Returns the sequences to learn in round `number`, the same list on every rank, and sets `round_metrics`.
        Subclasses may choose others."""
        pairs = self.scored_samples(number)
        quantile = self.config.quantile(number)
        kept = select([s for s, _ in pairs], [x for _, x in pairs], quantile)
        self.round_metrics = {
            'rft/round': float(number + 1),
            'rft/quantile': quantile,
            'rft/kept': len(kept) / len(pairs),
            'rft/score_mean': sum(x for _, x in pairs) / len(pairs),
            'rft/kept_score_mean': sum(pairs[i][1] for i in kept) / max(len(kept), 1),
        }
        return [
            Sequence(prompt_ids=s.prompt_ids, response_ids=s.response_ids, response_mask=s.response_mask)
            for s in (pairs[i][0] for i in kept)
        ]


ROUNDS = Method(RFTConfig, lambda config: SFTObjective())
