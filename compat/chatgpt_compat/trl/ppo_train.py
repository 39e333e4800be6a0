"""`PPOTrainer` of TRL 0.12 to 1.12, with its own loop (`train()`), on this library's `PPOTrainer`. Policy, reference,
reward and value model are four transformers models."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from chatgpt.data import PromptSet, as_prompts, note_model
from chatgpt.nn import Actor, Critic, RewardModel, has_lora, is_encoder_decoder, load_config, position_limit
from chatgpt.nn.records import fetched
from chatgpt.trainer import PPOConfig as OurConfig
from chatgpt.trainer import PPOTrainer as OurPPOTrainer
from chatgpt.trainer import PromptEvaluation
from chatgpt.trainer.experience import Scorer, as_scorer
from chatgpt.types import Batch, Prompt, Sample
from chatgpt_compat.peft import HEADS, adapted
from chatgpt_compat.statistics import TRL, Measured, named, of_policy, of_values
from chatgpt_compat.trl import arguments
from chatgpt_compat.trl.arguments import Entry, given, text_of
from chatgpt_compat.trl.config import UNSUPPORTED, PPOConfig
from chatgpt_compat.trl.training import (
    LaterTrainer,
    causal_lm,
    clipping,
    refuse,
    resolved,
    strategy_of,
    tokenizer_of,
    trainable,
)

COMPLETION_TEMPERATURE = 0.01
"""temperature of `generate_completions`"""


class Models(NamedTuple):
    """The two trained models, which are TRL's `model`."""

    policy: Any
    value_model: Any

    @property
    def config(self) -> Any:
        return self.policy.config


class PolicyAndValueWrapper(nn.Module):
    """Policy and value model as one module, accepted by `PPOTrainer` as `model`.

    `forward` returns the policy's output and the values (B, S, 1).
    """

    def __init__(self, policy: nn.Module, value_model: Any) -> None:
        super().__init__()
        self.policy, self.value_model = policy, value_model
        self.critic_backbone = getattr(value_model, value_model.base_model_prefix)

    @property
    def config(self) -> Any:
        return self.policy.config

    def forward(self, **kwargs: Any) -> tuple[Any, Tensor]:
        hidden = self.critic_backbone(**(kwargs | {'output_hidden_states': True, 'return_dict': True})).hidden_states
        return self.policy(**kwargs), self.value_model.score(hidden[-1])


class MeasuredPPOTrainer(OurPPOTrainer):
    """Our trainer with TRL's additional measures, and the value loss times `vf_coef`."""

    vf_coef = 1.0

    def learners(self) -> Any:
        actor, *critics = super().learners()

        def of_actor(out: Any, batch: Batch) -> dict[str, Tensor]:
            return of_policy(self.config, out.logprobs, batch)

        return [
            replace(actor, loss=Measured(actor.loss, of_actor)),
            *(replace(c, loss=Measured(c.loss, partial(of_values, self.config), self.vf_coef)) for c in critics),
        ]


class EndPenalty:
    """A scorer that subtracts `penalty` from the score of a response without the tokenizer's end token."""

    def __init__(self, scorer: Scorer, penalty: float, end_id: int) -> None:
        self.scorer, self.penalty, self.end_id = scorer, penalty, end_id

    def score(self, samples: list[Sample], strategy: Any) -> list[Any]:
        return [
            score if bool((sample.response_ids == self.end_id).any()) else self._penalized(score)
            for score, sample in zip(self.scorer.score(samples, strategy), samples, strict=True)
        ]

    def _penalized(self, score: Any) -> Any:
        if not isinstance(score, Tensor):
            return score - self.penalty
        lowered = score.clone()
        lowered[-1] -= self.penalty
        return lowered


# ---------------------------------------------------------------------- arguments


class Sizes(NamedTuple):
    """Numbers of samples per update and per optimizer step on all processes, and the number of updates."""

    batch: int
    mini_batch: int
    updates: int


def sizes_of(args: Any, num_prompts: int, world_size: int) -> Sizes:
    """Returns the sizes of a run. Raises ValueError for batch sizes that do not divide."""
    local = args.per_device_train_batch_size * args.gradient_accumulation_steps
    local = args.batch_size if args.batch_size is not None else local
    mini = args.mini_batch_size if args.mini_batch_size is not None else local // args.num_mini_batches
    of = f'num_mini_batches={args.num_mini_batches}' if args.mini_batch_size is None else f'mini_batch_size={mini}'
    if mini < 1 or local % mini or (args.mini_batch_size is None and local % args.num_mini_batches):
        raise ValueError(
            f'{type(args).__name__}: a batch of {local} on each process (batch_size, else '
            f'per_device_train_batch_size x gradient_accumulation_steps) must be a multiple of {of}'
        )
    batch = local * world_size
    episodes = args.total_episodes
    if episodes is None:
        episodes = int(args.num_train_epochs * num_prompts)
    if episodes < 1:
        raise ValueError(f'{type(args).__name__}: total_episodes={episodes} must be at least 1')
    return Sizes(batch, mini * world_size, math.ceil(episodes / batch))


def stop_id_of(args: Any, tokenizer: Any) -> int | None:
    """Returns the token that ends a response; None lets responses run to response_length. Raises ValueError."""
    if args.stop_token is not None and args.stop_token_id is not None:
        raise ValueError(f'{type(args).__name__}: stop_token and stop_token_id are given; give one of them')
    if args.stop_token is None:
        return args.stop_token_id
    if args.stop_token != 'eos':
        raise ValueError(
            f"{type(args).__name__}: stop_token={args.stop_token!r} is not known; use 'eos', or stop_token_id"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(args).__name__}: stop_token='eos', but the tokenizer has no end token; give stop_token_id"
        )
    return tokenizer.eos_token_id


def ppo_settings(args: Any, sizes: Sizes, longest: int) -> OurConfig:
    """Returns our settings for these arguments. `longest`: tokens of the longest sequence."""
    if args.kl_estimator not in ('k1', 'k3'):
        raise ValueError(f'PPOConfig: kl_estimator={args.kl_estimator!r} is not known; use k1 or k3')
    steps = sizes.batch // sizes.mini_batch * args.num_ppo_epochs
    schedule = arguments.schedule(args, sizes.updates)
    return OurConfig(
        experience_batch_size=sizes.batch,
        train_batch_size=sizes.mini_batch,
        max_tokens_per_batch=args.per_device_train_batch_size * longest,
        max_grad_norm=clipping(args),
        lr_schedule=schedule['lr_schedule'],
        warmup_steps=schedule['warmup_steps'] * steps,  # TRL's schedule counts updates, ours optimizer steps
        dataloader_pin_memory=args.dataloader_pin_memory,
        kl_kind=args.kl_estimator,
        whiten_rewards=args.whiten_rewards,
        ratio_threshold=args.ratio_threshold if given(args, 'ratio_threshold') else None,
        **args.settings(),
    )


def prompts_of(dataset: Any, tokenizer: Any) -> PromptSet:
    """Returns prompts of rows with input_ids, as in TRL's scripts, or with a column prompt (text or turns).

    Tokens with an attention_mask of 0 are dropped; other columns are passed to reward functions by name.
    """
    rows = list(dataset)
    if not rows or 'input_ids' not in rows[0]:
        return as_prompts(rows, tokenizer)
    prompts = []
    for row in rows:
        ids = torch.as_tensor(row['input_ids'], dtype=torch.int64)
        if row.get('attention_mask') is not None:
            ids = ids[torch.as_tensor(row['attention_mask']).bool()]
        columns = {k: v for k, v in row.items() if k not in ('input_ids', 'attention_mask', 'lengths')}
        prompts.append(Prompt(ids=ids, text=tokenizer.decode(ids, skip_special_tokens=True), columns=columns))
    return as_prompts(prompts)


def check_context(model: Any, longest_prompt: int, response_length: int) -> None:
    """Raises ValueError if the policy has too few positions for the longest prompt and a response."""
    limit, needed = position_limit(model.config), longest_prompt + response_length
    if is_encoder_decoder(model):  # it has positions on each side; a start token precedes the response
        needed = max(longest_prompt, response_length + 1)
    if limit is not None and needed > limit:
        raise ValueError(
            f'PPOConfig: the longest prompt has {longest_prompt} tokens; with response_length={response_length} it '
            f"passes the policy's context of {limit}: lower it, or shorten the prompts"
        )


class BackboneScore(nn.Module):
    """Scores of a module in TRL's protocol: the backbone in `base_model_prefix` returns hidden states, `score` maps
    them to logits, and the logit at the last token is the score."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """Returns the scores, (B,) fp32."""
        mask = batch.attention_mask
        model: Any = self.model
        out = getattr(model, model.base_model_prefix)(
            input_ids=batch.input_ids.masked_fill(~mask, 0),
            attention_mask=mask,
            position_ids=mask.cumsum(1) - mask.long(),
            return_dict=True,
            output_hidden_states=True,
            use_cache=False,
        )
        return model.score(out.hidden_states[-1]).flatten(0, 1)[batch.last_index].float().reshape(-1)


def reward_of(reward_model: Any) -> Any:
    """Returns a `RewardModel` of a classifier or its folder, a scorer of a module with TRL's protocol of backbone and
    score, or a function unchanged, in one of our conventions. Raises ValueError for another module."""
    if isinstance(reward_model, (str, Path)):
        return RewardModel.from_pretrained(reward_model)
    if isinstance(reward_model, RewardModel) or not isinstance(reward_model, nn.Module):
        return reward_model
    reward_model = adapted(reward_model, None, heads=HEADS)
    if type(reward_model).__name__.endswith('ForSequenceClassification'):
        return RewardModel.from_classifier(reward_model)
    if hasattr(reward_model, 'base_model_prefix') and hasattr(reward_model, 'score'):
        return BackboneScore(reward_model)
    raise ValueError(
        f'PPOTrainer: reward_model is a {type(reward_model).__name__}; give a sequence classifier with one label, a '
        'module with base_model_prefix and score, or a function of prompts and responses'
    )


def policy_of(model: Any, args: Any) -> Any:
    """Returns the causal LM; the head of a model with a value head is not used."""
    return causal_lm(getattr(model, 'pretrained_model', model), args)


def critic_of(value_model: Any, reward: Any, policy: Any, args: Any) -> Critic:
    """Returns the value model with its head; without one, a copy of the reward model, else of the policy with a new
    head."""
    if isinstance(value_model, Critic):
        return value_model
    if value_model is None:
        if isinstance(reward, RewardModel) and reward.value_head is not None:
            return Critic.from_reward_model(reward)
        return Critic(deepcopy(policy))
    if isinstance(value_model, nn.Module):
        theirs = {id(p) for p in policy.parameters()}
        if any(id(p) in theirs for p in value_model.parameters()):
            warnings.warn(
                'PPOTrainer: value_model shares weights with the policy; it is copied here, for each is trained by its '
                'own optimizer',
                stacklevel=3,
            )
            value_model = deepcopy(value_model)
        if hasattr(value_model, 'pretrained_model') and hasattr(value_model, 'v_head'):
            head = getattr(value_model.v_head, 'summary', value_model.v_head)  # without TRL's dropout
            return Critic(trainable(value_model.pretrained_model, args), head)
        value_model = adapted(value_model, None, heads=HEADS)
    if isinstance(value_model, (str, Path)):
        parts = RewardModel.from_pretrained(value_model)
    elif type(value_model).__name__.endswith('ForSequenceClassification'):
        parts = RewardModel.from_classifier(value_model)
    else:
        return Critic(trainable(value_model, args))
    if parts.value_head is None:
        raise ValueError(f'value_model: {type(parts.model).__name__} has no head of its own; use a causal classifier')
    return Critic(trainable(parts.model, args), parts.value_head.float())


# ---------------------------------------------------------------------- the trainer


class PPOTrainer(LaterTrainer):
    """PPO with its own loop. Raises ValueError for arguments that are not supported.

    Args:
        model: the policy, a transformers causal LM, trained in place; `peft_config` is its LoraConfig.
        ref_model: the frozen reference; None takes a copy, or with adapters the policy without them.
        reward_model: a sequence classifier with one label, its folder, or a function of prompts and responses.
        value_model: a sequence classifier with one label, trained in place; None starts from the reward model.
        train_dataset, eval_dataset: rows with input_ids, or with a prompt.
        config, tokenizer, policy, ref_policy: older names of args, processing_class, model, ref_model.
    """

    has_batch_events = False
    CONFIG: ClassVar[type] = PPOConfig
    UNSUPPORTED: ClassVar[Mapping[str, Entry]] = UNSUPPORTED['second']

    def __init__(
        self,
        args: Any = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: SequenceOf[Any] | None = None,
        peft_config: Any = None,
        *,
        config: Any = None,
        tokenizer: Any = None,
        policy: Any = None,
        ref_policy: Any = None,
    ) -> None:
        owner = type(self).__name__
        args = _either('args', args, 'config', config)
        model = _either('model', model, 'policy', policy)
        ref_model = _either('ref_model', ref_model, 'ref_policy', ref_policy)
        if isinstance(model, PolicyAndValueWrapper):
            model, value_model = model.policy, model.value_model if value_model is None else value_model
        if type(data_collator).__name__ == 'DataCollatorWithPadding':  # it only pads
            data_collator = None
        optimizer = next((x for x in optimizers if x is not None), None)
        one_each = 'policy and value model have one each; give optim, learning_rate and lr_scheduler_type'
        refuse(
            owner,
            {
                'data_collator': (data_collator, 'prompts are batched here, without padding; leave it out'),
                'optimizers': (optimizer, one_each),
            },
        )
        needed = {'args': args, 'model': model, 'reward_model': reward_model, 'train_dataset': train_dataset}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(f'{owner}: {missing[0]} is needed')
        if ref_model is not None and ref_model is model:
            raise ValueError(f'{owner}: ref_model is the model itself; give a copy of it, or None')
        if isinstance(args, PPOConfig):
            args.resolve('second')
        args = resolved(args, self.CONFIG, 'trainer_output', self.UNSUPPORTED)
        words = tokenizer_of(processing_class, tokenizer, model)
        stop_id = stop_id_of(args, words)
        if args.missing_eos_penalty is not None and not args.missing_eos_penalty > 0:
            raise ValueError(f'{type(args).__name__}: missing_eos_penalty={args.missing_eos_penalty} must be positive')
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        note_model(words, load_config(model) if isinstance(model, (str, Path)) else model.config)
        self.prompts = prompts_of(train_dataset, words)
        super().__init__(args, words, callbacks, strategy_of(args))
        self.sizes = self.sizes_for(len(self.prompts))
        self._note_sizes()

        model = policy_of(model, args)
        longest_prompt = max(len(p.ids) for p in self.prompts)
        check_context(model, longest_prompt, args.response_length)
        reward = reward_of(reward_model)
        if value_model is not None and value_model is reward_model:
            value_model = deepcopy(value_model)  # one is trained, the other is not
        critic = self.make_critic(value_model, reward, model)
        model = adapted(model, peft_config)
        self.is_peft_model = has_lora(model)
        if ref_model is None and not self.is_peft_model:
            ref_model = deepcopy(model)
        actor, initial = Actor(model), None if ref_model is None else Actor(policy_of(ref_model, args))
        self.policy_model, self.ref_model = model, ref_model
        self.reward_model = reward_model
        self.value_model = value_model if value_model is not None or critic is None else critic.model

        strategy = self.strategy
        pairs = [m and (m, arguments.make_optimizer(args, strategy, m)) for m in (actor, critic)]
        (actor, actor_optim), prepared, initial = strategy.prepare(*pairs, initial)
        critic, critic_optim = prepared or (None, None)
        config = self.settings_for(longest_prompt + args.response_length)
        self._plain_scorer = as_scorer(
            strategy.prepare(reward) if isinstance(reward, nn.Module) else reward,
            max_tokens_per_batch=config.max_tokens_per_batch,
        )
        scorer: Any = self._plain_scorer
        if args.missing_eos_penalty is not None:
            if words.eos_token_id is None:
                raise ValueError(f'{type(args).__name__}: missing_eos_penalty needs a tokenizer with an end token')
            scorer = EndPenalty(scorer, args.missing_eos_penalty, words.eos_token_id)
        pad = words.pad_token_id
        self.generation = {
            'max_new_tokens': args.response_length,
            'do_sample': True,
            'temperature': args.temperature,
            'top_k': 0,
            'top_p': 1.0,
            'eos_token_id': [] if stop_id is None else stop_id,
            # Scripts add a padding token without an embedding; no forward here reads it.
            'pad_token_id': pad if pad is not None and pad < model.get_input_embeddings().num_embeddings else 0,
        }
        self.inner = MeasuredPPOTrainer(
            strategy,
            actor,
            critic,
            scorer,
            initial,
            actor_optim,
            critic_optim,
            config=config,
            tokenizer=words,
            callbacks=self.our_callbacks(self._save_interval()),
            run_dir=args.output_dir,
            **self.generation,
        )
        self.inner.vf_coef = args.vf_coef
        self.state.max_steps = self.sizes.updates
        self.state.num_train_epochs = math.ceil(self.sizes.updates * self.sizes.batch / len(self.prompts))
        self._ratios: list[float] = []
        self._losses: list[float] = []
        self._started = time.perf_counter()
        self.bridge.notify('on_init_end')

    def sizes_for(self, num_prompts: int) -> Sizes:
        """Returns the sizes of a run over a number of prompts."""
        return sizes_of(self.args, num_prompts, self.strategy.world_size)

    def settings_for(self, longest: int) -> OurConfig:
        """Returns our settings. `longest`: tokens of the longest sequence."""
        return ppo_settings(self.args, self.sizes, longest)

    def make_critic(self, value_model: Any, reward: Any, policy: Any) -> Critic | None:
        """Returns the critic; None for a method without one."""
        return critic_of(value_model, reward, policy, self.args)

    def _note_sizes(self) -> None:
        """Writes the sizes to the config, where scripts read them."""
        args, world_size = self.args, self.strategy.world_size
        args.world_size, args.num_total_batches = world_size, self.sizes.updates
        args.batch_size, args.mini_batch_size = self.sizes.batch, self.sizes.mini_batch
        args.local_batch_size = args.batch_size // world_size
        args.local_mini_batch_size = args.mini_batch_size // world_size
        args.micro_batch_size = args.per_device_train_batch_size * world_size
        if args.total_episodes is None:
            args.total_episodes = int(args.num_train_epochs * len(self.prompts))

    def _save_interval(self) -> int | None:
        if text_of(self.args, 'save_strategy') == 'epoch':
            return max(math.ceil(len(self.prompts) / self.sizes.batch), 1)
        return arguments.every(self.args.save_steps, 500, self.sizes.updates)

    @property
    def model(self) -> Models:  # type: ignore[override]
        """Policy and value model, as in TRL's wrapper."""
        return Models(self.policy_model, self.value_model)

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains for `total_episodes` and returns (global_step, training_loss, metrics); TRL returns None."""
        self.resume(resume_from_checkpoint)
        self._started = time.perf_counter()
        self.inner.fit(self.prompts, num_episodes=1, max_timesteps=self.sizes.updates, update_timesteps=1)
        seconds = time.perf_counter() - self._started
        loss = statistics.fmean(self._losses) if self._losses else 0.0
        metrics = {'train_runtime': seconds, 'train_loss': loss, 'epoch': float(self.state.epoch or 0.0)}
        return TrainOutput(self.state.global_step, loss, metrics)

    def after_batch(self, metrics: Mapping[str, float]) -> None:
        self._ratios.append(metrics['ratio_mean'])

    def after_phase(self, metrics: dict[str, float]) -> None:
        """Logs the update under TRL's names, and prints completions at their interval."""
        self.state.global_step = self.inner.phase
        self.state.episode = self.inner.phase * self.sizes.batch
        self.state.epoch = self.state.episode / len(self.prompts)
        logs = self._trl_metrics(metrics)
        self._ratios.clear()
        self._losses.append(logs['loss/policy_avg'] + self.args.vf_coef * logs.get('loss/value_avg', 0.0))
        self.log({**logs, 'epoch': self.state.epoch})
        metrics.update(logs)
        self.bridge.notify('on_step_end')
        samples = self.args.num_sample_generations
        if samples > 0 and (self.state.global_step - 1) % max(1, self.sizes.updates // samples) == 0:
            self.generate_completions(sampling=True)

    def _trl_metrics(self, ours: Mapping[str, float]) -> dict[str, float]:
        """Returns the update's metrics by TRL's names and formulas, but with means over tokens without padding."""
        experiences = fetched(self.inner.strategy, self.inner.last_experiences)
        end = self.processing_class.eos_token_id
        surprisal = -sum(float((e.old_logprobs * e.response_mask).double().sum()) for e in experiences)
        return named(TRL, ours, self.inner.config) | {
            'eps': int(self.state.episode / max(time.perf_counter() - self._started, 1e-9)),
            'objective/entropy': surprisal / len(experiences),
            'val/ratio_var': statistics.variance(self._ratios) if len(self._ratios) > 1 else 0.0,
            'val/num_eos_tokens': sum(int((e.response_ids == end).sum()) for e in experiences),
            'episode': self.state.episode,
        }

    # ------------------------------------------------------------------ completions

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]] | None:
        """Generates from `eval_dataset` at a temperature of 0.01, prints five rows and returns all (query, model
        response, score). Returns None without an `eval_dataset`.

        Args:
            sampling: use only the first `per_device_eval_batch_size` prompts.
        """
        if self.eval_dataset is None:
            return None
        prompts = prompts_of(self.eval_dataset, self.processing_class)
        chosen = [prompts[i] for i in range(len(prompts))]
        if sampling:
            chosen = chosen[: self.args.per_device_eval_batch_size]
        evaluation = PromptEvaluation(
            chosen,
            self.processing_class,
            self._plain_scorer,
            num_rows=5,
            **self.generation | {'temperature': COMPLETION_TEMPERATURE},
        )
        evaluation(self.inner)
        names = {'prompt': 'query', 'response': 'model response'}
        return [{names.get(k, k): v for k, v in row.items()} for row in evaluation.last]


def _either(name: str, value: Any, other: str, older: Any) -> Any:
    if value is not None and older is not None and value is not older:
        raise ValueError(f'PPOTrainer: {name} and {other} are two names of one argument; give one of them')
    return value if value is not None else older
