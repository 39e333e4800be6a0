"""trlX's `AccelerateRFTTrainer`: rounds of sampling, choosing by rising percentiles, and learning the chosen texts, on
this library's `RFTTrainer`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from chatgpt.data import PromptSet
from chatgpt.trainer import RFTConfig, RFTTrainer
from chatgpt.types import Sample, Sequence
from chatgpt_compat.records import all_but_first
from chatgpt_compat.trlx import settings
from chatgpt_compat.trlx.pipeline import prompts_of
from chatgpt_compat.trlx.rewards import RewardFunction
from chatgpt_compat.trlx.trainers import AccelerateRLTrainer, engine_for, register_trainer

MARGIN = 1e-3
"""what thresholds keep from the least and the greatest of them"""


def thresholds_of(scores: SequenceOf[SequenceOf[float]], quantile: float) -> np.ndarray:
    """Returns the threshold of each prompt's scores: its interpolated quantile, within the range of all thresholds
    without `MARGIN` at both ends."""
    found = np.array([np.quantile(np.array(of_prompt), quantile) for of_prompt in scores])
    return np.clip(found, found.min() + MARGIN, found.max() - MARGIN)


class GrowingRFT(RFTTrainer):
    """RFT as in trlX: the samples of all rounds stay, those at or above their prompt's threshold are learned, and the
    prompt is learned with the output.

    The first choice is made twice, and every `improve_steps` choices new samples join, as in trlX.
    """

    improve_steps = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool: dict[tuple[int, ...], list[tuple[Sample, float]]] = {}
        """prompt -> its samples so far"""
        self.growths = 0

    def chosen(self, number: int) -> list[Sequence]:
        c, step = self.config, max(number - 1, 0) % self.improve_steps
        if step == 0:
            for sample, score in self.scored_samples(self.growths):
                self.pool.setdefault(tuple(sample.prompt_ids.tolist()), []).append((sample, score))
            self.growths += 1
        quantile = c.start_quantile + (c.end_quantile - c.start_quantile) / self.improve_steps * step
        scores = [[score for _, score in samples] for samples in self.pool.values()]
        texts: dict[tuple[int, ...], float] = {}
        for samples, threshold in zip(self.pool.values(), thresholds_of(scores, quantile), strict=True):
            for sample, score in samples:
                if score >= threshold:
                    texts[(*sample.prompt_ids.tolist(), *sample.response_ids.tolist())] = score
        everything = [score for of_prompt in scores for score in of_prompt]
        mean = sum(everything) / len(everything)
        self.round_metrics = {
            'rft/round': float(number + 1),
            'rft/quantile': quantile,
            'rft/kept': len(texts) / len(everything),
            'rft/score_mean': mean,
            'rft/kept_score_mean': sum(texts.values()) / max(len(texts), 1),
            'scores_mean': mean,
            'len_samples_selected': float(len(texts)),
        }
        return [all_but_first(torch.tensor(ids)) for ids in texts] or list(self.train_data or ())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise ValueError('trlx: a run of AccelerateRFTTrainer cannot resume: a checkpoint has no samples; start again')


@register_trainer
class AccelerateRFTTrainer(AccelerateRLTrainer):
    """Rejection-sampling fine-tuning by `chatgpt.trainer.RFTTrainer`; an epoch is a round."""

    evaluates_reward, needs = True, ('n_generations_per_prompt', 'RFTConfig')
    prompt_pipeline: Any = None

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Sets the prompts to sample from."""
        self.prompt_pipeline = pipeline

    def make_experience(self) -> None:
        """Does nothing: `learn` samples at the beginning of a round."""

    def build(self) -> GrowingRFT:
        if self.prompt_pipeline is None:
            raise ValueError('RFT needs prompts: give prompts, or add_prompt_pipeline')
        config, method = self.config, self.config.method
        gen = settings.generation(config, experience=True)
        separator = settings.separator(config)
        learning = settings.offline_settings(config)
        rounds = RFTConfig(
            num_rounds=config.train.epochs,
            num_samples_per_prompt=method.n_generations_per_prompt,
            start_quantile=method.start_percentile,
            end_quantile=method.end_percentile,
            **learning | {'max_steps': None, 'max_epochs': 1},
        )
        model, optim = self.strategy.prepare(self.with_optimizer(self.actor))
        trainer = GrowingRFT(
            self.strategy,
            model,
            optim,
            PromptSet(prompts_of(self.prompt_pipeline, self.tokenizer)),
            RewardFunction(self.reward, self.tokenizer, separator=separator),
            config=rounds,
            engine=engine_for(gen, config),
            **settings.sampling_keywords(gen, self.stop_sequences),
            **self.common(config.train.total_steps),
        )
        trainer.improve_steps = method.n_improve_steps
        return trainer
