"""trlX's trainers on this library's: the interface that scripts use, built from a `TRLConfig`.

Models are loaded at the first use, by `learn`, `.model` or `generate`, after all checks.
"""

from __future__ import annotations

import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from chatgpt import nn
from chatgpt.data import PromptSet, note_model
from chatgpt.nn import freeze_below, hidden_size, load_causal_lm, load_config, mlp_head, start_token
from chatgpt.nn.records import is_here
from chatgpt.rollout import HFEngine, LocalEngine, from_generation_kwargs
from chatgpt.rollout.sampling import sampling_for
from chatgpt.strategies import strategy_by_name
from chatgpt.trainer import Collector, ILQLTrainer, PPOTrainer, PromptEvaluation, SFTConfig, SFTTrainer, rewarded
from chatgpt.types import EVAL_INDEX, Prompt
from chatgpt_compat.accelerator import Accelerator
from chatgpt_compat.peft import lora_arguments
from chatgpt_compat.statistics import evaluated
from chatgpt_compat.trlx import settings
from chatgpt_compat.trlx.callbacks import Checkpoints, RolloutFiles, Statistics, StepEvaluator, StopAtSteps
from chatgpt_compat.trlx.config import NEMO, Register, TRLConfig
from chatgpt_compat.trlx.pipeline import First, prompts_of, text_sequence, tokenize_dialogue, tokenize_pair
from chatgpt_compat.trlx.rewards import OnRank0, RewardFunction, metric_function
from chatgpt_compat.trlx.settings import Sweep

_TRAINERS = Register('trainers', {'nemo': NEMO})
register_trainer = _TRAINERS.add
OLD_NAMES = {
    'AcceleratePPOModel': 'AcceleratePPOTrainer',
    'AccelerateILQLModel': 'AccelerateILQLTrainer',
    'ILQLModel': 'AccelerateILQLTrainer',
}
"""name in files of 2022 → current name"""


def trainer_class_of(name: str) -> type[Any]:
    """Returns the trainer class of a registered name in any case, or of a name of 2022. Raises ValueError."""
    return _TRAINERS.find(OLD_NAMES.get(name, name))


class AccelerateRLTrainer(ABC):
    """Base of the trainers.

    Args:
        config: a `TRLConfig`.
        reward_fn, metric_fn: functions with trlX's arguments, see `rewards`.
        stop_sequences: a response ends before the first of these texts.
        strategy: replaces the one of the launcher's environment.
    """

    evaluates_reward: ClassVar[bool] = False
    needs: ClassVar[tuple[str, str] | None] = None
    """a field that the method config must have, and the name of the config with it"""

    def __init__(
        self,
        config: TRLConfig,
        reward_fn: Any = None,
        metric_fn: Callable[..., Any] | None = None,
        stop_sequences: SequenceOf[str] | None = None,
        train_mode: bool = False,
        strategy: Any = None,
    ) -> None:
        settings.check(config)
        if self.needs is not None and not hasattr(config.method, self.needs[0]):
            given, wanted = type(config.method).__name__, self.needs[1]
            raise ValueError(f'trlx: config.method is a {given}, and this trainer needs a {wanted}')
        self.config, self.reward_fn, self.metric_fn = config, reward_fn, metric_fn
        self.stop_sequences = list(stop_sequences or ())
        self.eval_pipeline: Any = None
        self._strategy = strategy
        self._draws = 0

    # ------------------------------------------------------------------ parts

    @cached_property
    def strategy(self) -> Any:
        """The strategy: one process, or the strategy of the launcher's environment."""
        if self._strategy is not None and not isinstance(self._strategy, str):
            return self._strategy
        name = self._strategy or settings.strategy_name()
        found = strategy_by_name(name, seed=self.config.train.seed, precision=settings.precision())
        atexit.register(found.close)
        return found

    @cached_property
    def tokenizer(self) -> Any:
        path = settings.tokenizer_path(self.config)
        section = self.config.tokenizer
        if isinstance(path, (str, Path)):
            from transformers import AutoTokenizer

            extra = section.tokenizer_extra_configs if section is not None else {}
            path = AutoTokenizer.from_pretrained(path, **extra)
        if section is not None:
            path.padding_side, path.truncation_side = section.padding_side, section.truncation_side
        if separator := settings.separator(self.config):
            path.sep_token = separator
        if path.pad_token is None:
            path.pad_token = path.eos_token
        note_model(path, SimpleNamespace(is_encoder_decoder=settings.is_seq2seq(self.config)))
        return path

    @cached_property
    def actor(self) -> Any:
        """The model to train, not prepared."""
        with self.strategy.model_init_context():
            return self.make_actor()

    def make_actor(self) -> Any:
        model = self.load_model()
        return nn.Actor(model, **self.lora(model))

    def lora(self, model: Any) -> dict[str, Any]:
        """Returns the adapter arguments of `model.peft_config`; {} without one."""
        given = self.config.model
        if given.peft_config is None:
            return {}
        if given.num_layers_unfrozen > 0:
            settings.warn(f'num_layers_unfrozen={given.num_layers_unfrozen} is ignored with a peft_config, as in trlX')
        return lora_arguments(given.peft_config, model)

    @cached_property
    def trainer(self) -> Any:
        """This library's trainer, with prepared models."""
        return self.build()

    @abstractmethod
    def build(self) -> Any:
        """Builds this library's trainer with prepared models."""

    @property
    def model(self) -> Any:
        """The trained model with trlX's interface, see `ModelView`."""
        return ModelView(self.actor)

    @property
    def opt(self) -> Any:
        return next(iter(self.trainer.optimizers().values()))

    @cached_property
    def accelerator(self) -> Accelerator:
        return Accelerator(self.strategy)

    @property
    def iter_count(self) -> int:
        """The number of optimizer steps so far."""
        return int(self.trainer.num_updates)

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        return settings.generation(self.config)

    # ------------------------------------------------------------------ data

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Sets the prompts of evaluations."""
        self.eval_pipeline = eval_pipeline

    def push_to_store(self, data: Any) -> None:
        raise ValueError(
            f'{type(self).__name__}.push_to_store is not served: rollouts are collected within learn(); give '
            'make_experience samples, or drive chatgpt.trainer.PPOTrainer.step by hand'
        )

    # ------------------------------------------------------------------ the run

    def learn(self) -> dict[str, float]:
        """Trains and returns the metrics of the last evaluation under trlX's names."""
        trainer = self.trainer
        resume = self.config.train.resume_from_checkpoint
        if resume and Path(resume).exists():
            trainer.load_checkpoint(resume)
        self.fit(trainer)
        last = next((c.last for c in trainer.callbacks if isinstance(c, StepEvaluator)), {})
        return evaluated(last)

    def fit(self, trainer: Any) -> None:
        trainer.fit()

    def evaluate(self) -> dict[str, float]:
        """Returns `reward/mean` and `metrics/<name>` of responses to the evaluation prompts."""
        found = self._evaluation(self.trainer)
        return evaluated({f'eval/{name}': value for name, value in found.items()})

    def callbacks(self, total_steps: int) -> list[Any]:
        """Returns the callbacks of every run."""
        train = self.config.train
        chosen = [Statistics(), StopAtSteps(total_steps), Checkpoints(train, total_steps)]
        chosen += settings.tracker(self.config)
        if self.eval_pipeline is not None:
            metric = 'score_mean' if self.evaluates_reward and self._sweep is None else None
            chosen.append(StepEvaluator(self._evaluation, train.eval_interval, metric))
        return chosen

    # ------------------------------------------------------------------ evaluation

    @cached_property
    def reward(self) -> Any:
        """The reward function, also if only rank 0 has one. A collective at the first access.

        Raises:
            ValueError: rank 0 has no callable.
        """
        can_be_called = self.strategy.all_gather_object(callable(self.reward_fn))
        if not can_be_called[0]:
            raise ValueError(f'trlx: there is no reward_fn that can be called; got {self.reward_fn!r}')
        return self.reward_fn if all(can_be_called) else OnRank0(self.reward_fn)

    @property
    def _sweep(self) -> Sweep | None:
        return settings.sweep_of(self.generate_kwargs)

    @cached_property
    def _evaluations(self) -> list[tuple[str, Any]]:
        """Returns (suffix of the names, evaluation) for every value of a sweep."""
        if self.eval_pipeline is None:
            raise ValueError('there is nothing to evaluate on: give eval_prompts, or add_eval_pipeline')
        prompts = PromptSet(prompts_of(self.eval_pipeline, self.tokenizer))
        gen = self.generate_kwargs
        if (sweep := self._sweep) is None:
            return [('', self._one_evaluation(prompts, gen))]
        each = [(value, gen | {sweep.name: value}) for value in sweep.values]
        return [(f'@{sweep.name}={value}', self._one_evaluation(prompts, keywords)) for value, keywords in each]

    def _evaluation(self, trainer: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for suffix, evaluation in self._evaluations:
            found |= {f'{name}{suffix}': value for name, value in evaluation(trainer).items()}
        return found

    def _one_evaluation(self, prompts: PromptSet, gen: Mapping[str, Any]) -> Any:
        separator, reward = settings.separator(self.config), None
        if self.evaluates_reward:
            reward = RewardFunction(self.reward, self.tokenizer, with_end=False, separator=separator)
        return PromptEvaluation(
            prompts,
            self.tokenizer,
            reward,
            metric_fn=metric_function(self.metric_fn, separator),
            engine=engine_for(gen, self.config),
            **settings.sampling_keywords(gen, self.stop_sequences),
        )

    # ------------------------------------------------------------------ generation

    @torch.no_grad()
    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Returns padded prompts and responses (B, S + A), sampled as in rollouts; for an encoder-decoder the start
        token and responses (B, 1 + A).

        Args:
            input_ids: (B, S) int64, padded on either side.
            attention_mask: (B, S), 1 = a token that counts; None counts all but pad tokens.
            **kwargs: generation keywords that replace the config's. With `return_dict_in_generate` the result is that
                of the policy's own `generate`, with `output_scores` the scores; tokens come from torch's generator.
        """
        return self._generate(input_ids, attention_mask, settings.generation(self.config, experience=True) | kwargs)

    @torch.no_grad()
    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Returns as `generate`, with the keywords of evaluations."""
        return self._generate(input_ids, attention_mask, self.generate_kwargs | kwargs)

    def _generate(self, input_ids: Any, attention_mask: Any, gen: Mapping[str, Any]) -> Any:
        pad = self.tokenizer.pad_token_id
        ids = torch.as_tensor(input_ids, dtype=torch.int64).cpu()
        mask = ids != pad if attention_mask is None else torch.as_tensor(attention_mask).cpu().bool()
        prompts = [Prompt(ids=row[real]) for row, real in zip(ids, mask, strict=True)]
        plain = {name: value[0] if isinstance(value, list) and value else value for name, value in gen.items()}
        actor = next(iter(self.trainer.models().values()))
        unwrapped = self.strategy.unwrap(actor)
        if plain.pop('return_dict_in_generate', False):
            with self.policy(actor, plain) as full:
                device = next(full.parameters()).device
                known = {'attention_mask': mask.long().to(device), 'pad_token_id': pad, 'return_dict_in_generate': True}
                return full.model.generate(ids.to(device), **known | plain)
        for name in ('output_scores', 'output_logits'):  # of a dict
            plain.pop(name, None)
        sampling, stops = sampling_for(unwrapped, self.tokenizer, settings.sampling_keywords(plain, ()))
        collector = Collector(
            self.strategy,
            engine_for(plain, self.config),
            sampling,
            policy=partial(self.policy, actor, plain),
            tokenizer=self.tokenizer,
            stop_strings=stops,
        )
        first = 2 * EVAL_INDEX + self._draws
        self._draws += len(prompts)
        samples = collector.generate(prompts, indices=list(range(first, first + len(prompts))))
        if settings.is_seq2seq(self.config):
            ids = torch.full((len(samples), 1), start_token(unwrapped.config))
        width = max(sample.num_actions for sample in samples)
        responses = torch.full((len(samples), width), pad)
        for row, sample in enumerate(samples):
            responses[row, : sample.num_actions] = sample.response_ids
        return torch.cat([ids, responses], dim=1)

    def policy(self, actor: Any, gen: Mapping[str, Any], **needs: Any) -> Any:
        """Returns a context with the whole model for generation; `needs` are arguments of `Strategy.full_model`."""
        return self.strategy.full_model(actor, **needs)

    # ------------------------------------------------------------------ files

    # The default directories are hf_model and checkpoint in `checkpoint_dir`.

    def save_pretrained(self, directory: str | Path | None = None, **_: Any) -> None:
        """Writes a Hugging Face folder of the trained model and its tokenizer; keywords have no effect."""
        self.trainer.save_pretrained(directory or Path(self.config.train.checkpoint_dir, 'hf_model'))

    def save(self, directory: str | Path | None = None) -> None:
        """Writes a training checkpoint for `load` and `resume_from_checkpoint`."""
        self.trainer.save_checkpoint(directory or Path(self.config.train.checkpoint_dir, 'checkpoint'))

    def load(self, directory: str | Path | None = None) -> None:
        """Resumes from a folder that `save` wrote."""
        self.trainer.load_checkpoint(directory or Path(self.config.train.checkpoint_dir, 'checkpoint'))

    # ------------------------------------------------------------------ building

    def load_model(self, *, freeze: bool = True) -> Any:
        """Loads the initial transformers model, frozen below its top `num_layers_unfrozen` blocks."""
        model = self.config.model
        source, options = model.model_path, dict(model.model_extra_configs)
        is_name, is_model = isinstance(source, (str, Path)), isinstance(source, torch.nn.Module)
        if is_name:
            known = load_config(source, **{k: v for k, v in options.items() if k != 'attn_implementation'})
        else:
            known = source.config if is_model else source
        kind = 'seq2seq' if getattr(known, 'is_encoder_decoder', False) else 'causal'
        if kind != model.model_arch_type:
            raise ValueError(
                f'trlx: model_arch_type={model.model_arch_type!r}, and the model ({known.model_type}) is {kind!r}: '
                'give that, or another model'
            )
        found = source if is_model else load_causal_lm(*((source,) if is_name else (None, source)), **options)
        if freeze and model.num_layers_unfrozen > 0 and model.peft_config is None:
            freeze_below(found, model.num_layers_unfrozen)
        return found

    def with_optimizer(self, model: Any) -> tuple[Any, Any]:
        """Returns a model and an optimizer of its trainable parameters."""
        name, options = settings.optimizer_of(self.config)
        parameters = [p for p in model.parameters() if p.requires_grad]
        make = torch.optim.SGD if name == 'sgd' else self.strategy.make_optimizer
        return model, make(parameters, **options)

    def common(self, total_steps: int) -> dict[str, Any]:
        """Returns arguments that every trainer of this library takes."""
        return {
            'tokenizer': self.tokenizer,
            'callbacks': self.callbacks(total_steps),
            'run_dir': self.config.train.checkpoint_dir,
        }


def engine_for(gen: Mapping[str, Any], config: TRLConfig) -> Any:
    """Returns the local engine, or for an encoder-decoder or a keyword that it lacks the one with `model.generate`."""
    if settings.is_seq2seq(config):
        return HFEngine()
    known = {k: v for k, v in gen.items() if k not in ('beta', 'stop_strings') and not isinstance(v, list)}
    return HFEngine() if from_generation_kwargs(**({'max_new_tokens': 1} | known)).extra else LocalEngine()


@register_trainer
class AcceleratePPOTrainer(AccelerateRLTrainer):
    """PPO by `chatgpt.trainer.PPOTrainer`."""

    evaluates_reward, needs = True, ('ppo_epochs', 'PPOConfig')
    prompt_pipeline: Any = None
    critic: Any = None
    """the critic if it is a separate model; made with the actor"""
    initial: Any = None
    """the reference if it is a separate model; made with the actor"""

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Sets the prompts of rollouts."""
        self.prompt_pipeline = pipeline

    def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        """Does nothing: `learn` samples `method.num_rollouts` rollouts in each phase. Warns of another number."""
        if num_rollouts != self.config.method.num_rollouts:
            settings.warn(
                f'make_experience({num_rollouts}): every phase collects method.num_rollouts='
                f'{self.config.method.num_rollouts}, the first one too'
            )

    def callbacks(self, total_steps: int) -> list[Any]:
        if self.eval_pipeline is None and self.prompt_pipeline is not None:
            self.eval_pipeline = First(self.prompt_pipeline, self.config.train.batch_size)
        return super().callbacks(total_steps)

    def make_actor(self) -> Any:
        """Makes an actor with a value head on the trunk, and sets `critic` and `initial`."""
        config, model = self.config, self.load_model(freeze=False)
        lora = self.lora(model)
        unfrozen = None if lora or config.model.num_layers_unfrozen < 0 else config.model.num_layers_unfrozen
        layers = config.method.num_value_layers_unfrozen
        if layers > 0:
            settings.warn(
                f'num_value_layers_unfrozen={layers}: the values come from a critic of its own, a whole model that '
                'starts from the policy'
            )
            self.critic = nn.Critic(deepcopy(model))
        head = None if layers > 0 else mlp_head(hidden_size(model))
        actor = nn.Actor(model, value_head=head, num_layers_unfrozen=unfrozen, **lora)
        if not (unfrozen or (lora and lora['lora_train_bias'] == 'none')):
            self.initial = deepcopy(actor)
        return actor

    @property
    def store(self) -> list[Any]:
        """The experience of the last phase on this process, as in trlX."""
        return [e for e in self.trainer.last_experiences if is_here(e)]

    def build(self) -> PPOTrainer:
        config, strategy, method = self.config, self.strategy, self.config.method
        ppo, length = settings.ppo_settings(config), settings.ppo_length(config)
        actor, critic, initial = self.actor, self.critic, self.initial
        actor_pair, critic_pair, initial = strategy.prepare(
            self.with_optimizer(actor), None if critic is None else self.with_optimizer(critic), initial
        )
        critic, critic_optim = critic_pair or (None, None)
        gen = settings.generation(config, experience=True)
        reward = RewardFunction(
            self.reward,
            self.tokenizer,
            clip=method.cliprange_reward or None,
            divisor=settings.score_scaling(config)[1],
            separator=settings.separator(config),
        )
        common = self.common(length.phases * length.steps_per_phase)
        if config.train.rollout_logging_dir is not None:
            common['callbacks'].append(RolloutFiles(config.train.rollout_logging_dir, config.to_dict()))
        return PPOTrainer(
            strategy,
            actor_pair[0],
            critic,
            reward,
            initial,
            actor_pair[1],
            critic_optim,
            config=ppo,
            engine=engine_for(gen, config),
            **settings.sampling_keywords(gen, self.stop_sequences),
            **common,
        )

    def fit(self, trainer: Any) -> None:
        if self.prompt_pipeline is None:
            raise ValueError('PPO needs prompts: give prompts, or add_prompt_pipeline')
        length = settings.ppo_length(self.config)
        prompts = PromptSet(prompts_of(self.prompt_pipeline, self.tokenizer))
        trainer.fit(prompts, max_timesteps=length.phases * length.chunks, update_timesteps=length.chunks)


class _OfflineTrainer(AccelerateRLTrainer):
    """Base of the trainers that learn from given samples."""

    data: Any = None

    def build_over(self, trainer_class: Any, config: Any) -> Any:
        """Builds this library's trainer with the given samples."""
        if self.data is None:
            raise ValueError(
                f'{type(self).__name__} has nothing to learn from yet: make_experience(samples, ...) first'
            )
        train = self.config.train
        per_epoch = -(-len(self.data) // (train.batch_size * settings.processes()))
        common = self.common(int(min(train.epochs * per_epoch, train.total_steps)))
        model, optim = self.strategy.prepare(self.with_optimizer(self.actor))
        return trainer_class(self.strategy, model, optim, self.data, config=config, **common)


@register_trainer
class AccelerateILQLTrainer(_OfflineTrainer):
    """ILQL by `chatgpt.trainer.ILQLTrainer`."""

    needs = ('two_qs', 'ILQLConfig')

    def make_experience(self, samples: Any, rewards: Any, max_length: int | None = None) -> None:
        """Stores samples with one reward each, standardised over all samples, on the last token of the last output.

        Raises:
            ValueError: lists of different lengths, or a sample without an output.
        """
        given = [float(r) for r in (rewards.tolist() if hasattr(rewards, 'tolist') else rewards)]
        if len(samples) != len(given):
            raise ValueError(f'trlx: {len(samples)} samples but {len(given)} rewards')
        limit = max_length or settings.longest(self.config)
        make = tokenize_pair if settings.is_seq2seq(self.config) else tokenize_dialogue
        self.data = rewarded([make(s, self.tokenizer, limit) for s in samples], given)

    def make_actor(self) -> Any:
        return nn.ILQLModel(self.load_model(), two_qs=self.config.method.two_qs)

    def build(self) -> ILQLTrainer:
        return self.build_over(ILQLTrainer, settings.ilql_settings(self.config))

    def _one_evaluation(self, prompts: PromptSet, gen: Mapping[str, Any]) -> Any:
        evaluation, beta = super()._one_evaluation(prompts, gen), float(gen['beta'])
        return lambda trainer: evaluation(trainer, lambda model: model.decoding(beta))

    @contextmanager
    def policy(self, actor: Any, gen: Mapping[str, Any], **needs: Any) -> Iterator[Any]:
        with self.strategy.full_model(actor, **needs) as full, full.decoding(float(gen['beta'])):
            yield full


@register_trainer
class AccelerateSFTTrainer(_OfflineTrainer):
    """SFT by `chatgpt.trainer.SFTTrainer`."""

    def make_experience(self, samples: Any, max_length: int | None = None) -> None:
        """Stores texts, in which every token is learned, or dialogues, in which the outputs are."""
        limit = max_length or settings.longest(self.config)
        make: Callable[..., Any] = text_sequence if isinstance(samples[0], str) else tokenize_dialogue
        if settings.is_seq2seq(self.config):
            make = tokenize_pair
        self.data = [make(sample, self.tokenizer, limit) for sample in samples]

    def build(self) -> SFTTrainer:
        return self.build_over(SFTTrainer, SFTConfig(**settings.offline_settings(self.config)))


class OutputWithValue(NamedTuple):
    logits: Tensor
    """(B, S, V)"""
    past_key_values: Any
    value: Tensor | None
    """(B, S) fp32; None without a value head"""


class ModelView(torch.nn.Module):
    """The modules of an `Actor` or `ILQLModel` under trlX's names, for `trainer.model`; other attributes are those of
    the transformers model."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._actor = (actor,)  # in a tuple, so that it is not registered as a submodule
        self.base_model = actor.model
        self.v_head = getattr(actor, 'v_head', None) or getattr(actor, 'value_head', None)
        if hasattr(actor, 'q_heads'):
            self.q_heads, self.target_q_heads = actor.q_heads, actor.target_q_heads
        self.training = actor.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == 'base_model':
                raise
            return getattr(self.base_model, name)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True, **kwargs: Any
    ) -> OutputWithValue:
        """Returns logits and values of every position of `input_ids` (B, S) int64, for an encoder-decoder of
        `decoder_input_ids`."""
        out = self.base_model(input_ids, attention_mask=attention_mask, output_hidden_states=True, **kwargs)
        states = out.decoder_hidden_states if nn.is_encoder_decoder(self.base_model) else out.hidden_states
        values = None if self.v_head is None else self.v_head(states[-1]).squeeze(-1)
        return OutputWithValue(out.logits, out.get(nn.cache_keyword(self.base_model)), values)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls transformers' `generate` of the policy."""
        return self.base_model.generate(*args, **kwargs)

    def save_pretrained(self, directory: str | Path, **_: Any) -> None:
        """Writes a Hugging Face folder with adapters merged."""
        self._actor[0].save_pretrained(directory)
