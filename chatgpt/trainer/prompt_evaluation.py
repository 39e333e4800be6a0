"""Evaluation of a policy on prompts: responses, their scores and metrics, a table. For any trainer's actor, any
strategy.

    Evaluator(PromptEvaluation(prompts, tokenizer, reward_fn), interval=10, metric='score_mean')

Every evaluation uses the same random numbers, so two evaluations differ by the policy alone. `callbacks.Evaluator`
decides when to evaluate, `callbacks.SaveCheckpoint` which checkpoint is best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from chatgpt.data.formats import note_model
from chatgpt.data.prompts import as_prompts
from chatgpt.environments import EnvironmentSettings
from chatgpt.rollout import RolloutEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.rollout.registry import engine_for
from chatgpt.rollout.sampling import sampling_for
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.base import config_of
from chatgpt.trainer.callbacks.base import TrainerView, say
from chatgpt.trainer.callbacks.jsonl import RunFile
from chatgpt.trainer.callbacks.samples import episode_row, format_table, prompt_row, shown_parts
from chatgpt.trainer.collect import Collector
from chatgpt.trainer.experience.scorers import as_scorer, call_on, scored, sequence_score
from chatgpt.types import EVAL_INDEX, Sample

Decoding = Callable[[Any], AbstractContextManager[Any]]
"""a context of generation, given the whole model"""
MetricFn = Callable[..., Mapping[str, SequenceOf[float]]]


class PromptEvaluation:
    """A function of a trainer, called on every rank, that returns {name: number}, the same on every rank.

    Returns `score_mean` and `score_std` if there is a reward, `length_mean`, `ended` (share), the mean of every list of
    `metric_fn` as `metrics/<name>`, and for episodes `num_turns_mean`, `failed_share` and, if the environment provides
    it, `success_share`.

    Args:
        prompts: as for `PPOTrainer.fit`.
        tokenizer: decodes responses, and ends them; None takes the trainer's.
        reward: a prepared reward model, a function `fn(prompts, responses, **columns)`, or a scorer; None takes the
            trainer's, if any.
        metric_fn: a function of texts, with arguments as of a reward function, such as `fn(prompts, outputs,
            **columns)` → {name: one number per sample}; runs on rank 0.
        model: name in `trainer.models()` of the model that generates; None takes 'actor', else the only one.
        engine: generates; None takes the default of `PPOTrainer`.
        environment, environment_settings: as for `PPOTrainer`, with other tasks than those of training.
        num_rows: rows of the table that is printed and written to `run_dir/eval_samples.jsonl`; 0 for none.
        generate: generation keywords, such as max_new_tokens and do_sample; greedy without `do_sample`.
    """

    def __init__(
        self,
        prompts: Any,
        tokenizer: Any = None,
        reward: Any = None,
        *,
        metric_fn: MetricFn | None = None,
        model: str | None = None,
        engine: RolloutEngine | None = None,
        environment: Any = None,
        environment_settings: EnvironmentSettings | None = None,
        seed: int = 0,
        num_rows: int = 4,
        **generate: Any,
    ) -> None:
        self.prompts, self.tokenizer, self.metric_fn = prompts, tokenizer, metric_fn
        self.scorer = as_scorer(reward) if reward is not None else None
        self.model, self.seed, self.num_rows = model, seed, num_rows
        self.engine = engine
        self.environment, self.environment_settings = environment, environment_settings
        self.generate = {'do_sample': False} | generate
        self.last: list[dict[str, Any]] = []
        """rows of the latest evaluation, on rank 0: prompt, response, score and metrics"""
        self._file = RunFile('eval_samples.jsonl')
        self._begun: tuple[int, int] = (0, -1)
        self._tokenized: tuple[int, Any] | None = None

    def __call__(self, trainer: TrainerView, decoding: Decoding = nullcontext) -> dict[str, float]:
        strategy, tokenizer = trainer.strategy, self.tokenizer or trainer.tokenizer
        models = trainer.models()
        name = self.model or ('actor' if 'actor' in models else next(iter(models)))
        if name not in models:
            raise ValueError(f'PromptEvaluation: the trainer has no model {name!r}; it has {", ".join(models)}')
        actor = models[name]
        bare: Any = strategy.unwrap(actor)
        if self.engine is None:
            self.engine = engine_for(bare, keep=False)  # no cache is kept between two evaluations
        note_model(tokenizer, config_of(strategy, actor))
        if self._tokenized is None or self._tokenized[0] != id(tokenizer):
            self._tokenized = id(tokenizer), as_prompts(self.prompts, tokenizer)
        prompts = self._tokenized[1]
        sampling, stops = sampling_for(bare, tokenizer, self.generate)
        mine = range(strategy.rank, len(prompts), strategy.world_size)
        engine = self.engine
        if self.environment is not None:
            engine = EpisodeEngine(engine, self.environment, tokenizer, self.environment_settings, stop_strings=stops)
        with nullcontext() if self.environment is None else engine:
            collector = Collector(
                strategy,
                engine,
                sampling,
                policy=partial(_policy, strategy, actor, decoding),
                tokenizer=tokenizer,
                stop_strings=stops,
            )
            samples = collector.generate(
                [prompts[i] for i in mine], indices=[EVAL_INDEX + i for i in mine], seed=self.seed
            )
        scorer = self.scorer or trainer.scorer
        everyone = [
            (sample, None if s is None else sequence_score(s, sample))
            for sample, s in scored(scorer, samples, strategy)
        ]
        metrics = strategy.run_on_rank0(lambda: self._metrics([s for s, _ in everyone]))
        self._show(trainer, everyone, metrics)
        return self._summary(everyone, metrics)

    def _metrics(self, samples: list[Sample]) -> dict[str, list[float]]:
        if self.metric_fn is None:
            return {}
        given = call_on(self.metric_fn, samples)
        result = {name: [float(v) for v in values] for name, values in given.items()}
        for name, values in result.items():
            if len(values) != len(samples):
                raise ValueError(f'metric_fn: {name!r} has {len(values)} numbers for {len(samples)} samples')
        return result

    def _summary(self, pairs: list[tuple[Sample, float | None]], metrics: dict[str, list[float]]) -> dict[str, float]:
        count = len(pairs)
        result = {
            'length_mean': sum(s.num_actions for s, _ in pairs) / count,
            'ended': sum(s.ended for s, _ in pairs) / count,
        }
        scores = [x for _, x in pairs if x is not None]
        if scores:
            mean = sum(scores) / count
            result['score_mean'] = mean
            result['score_std'] = (sum((x - mean) ** 2 for x in scores) / count) ** 0.5
        episodes = [s.episode for s, _ in pairs if s.episode is not None]
        if episodes:
            result['num_turns_mean'] = sum(len(e.turns) for e in episodes) / count
            result['failed_share'] = sum(e.failed for e in episodes) / count
        if any(e.success is not None for e in episodes):
            result['success_share'] = sum(bool(e.success) for e in episodes) / count
        return result | {f'metrics/{name}': sum(values) / count for name, values in metrics.items()}

    def _show(
        self, trainer: TrainerView, pairs: list[tuple[Sample, float | None]], metrics: dict[str, list[float]]
    ) -> None:
        if not trainer.strategy.is_rank_0:
            return
        self.last = [
            {**prompt_row(s), 'response': s.response_text}
            | ({} if score is None else {'score': score})
            | {name: values[i] for name, values in metrics.items()}
            | episode_row(s, self.tokenizer or trainer.tokenizer)
            for i, (s, score) in enumerate(pairs)
        ]
        rows = self.last[: self.num_rows]
        if not rows:
            return
        if self._begun[0] != id(trainer) or trainer.phase < self._begun[1]:
            # another run, or one reset to an earlier phase: the next write truncates later lines
            self._file.forget()
        self._begun = id(trainer), trainer.phase
        self._file.write(trainer, trainer.phase, rows)
        shown = [shown_parts(row) for row in rows]
        names = [n for n in shown[0] if n not in ('prompt', 'response')]
        after = f' after phase {trainer.phase}' if trainer.phase else ''
        say(f'evaluation samples{after}\n{format_table(shown, [*names, "prompt", "response"])}')


@contextmanager
def _policy(strategy: Strategy, actor: nn.Module, decoding: Decoding, **needs: Any) -> Iterator[Any]:
    with strategy.full_model(actor, **needs) as full, decoding(full):
        yield full
