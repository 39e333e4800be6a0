"""TRL's classic `PPOTrainer` (0.4 to 0.11): a model with a value head, and a loop of `generate` and `step` in the
script.

It has TRL's arguments and shapes of input and output on a `chatgpt.trainer.PPOTrainer`.
"""

from __future__ import annotations

import atexit
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from chatgpt.functional.ppo import gae
from chatgpt.nn import Actor, dropout_off, is_encoder_decoder, start_token
from chatgpt.nn.records import fetched
from chatgpt.nn.trunk import recompute_activations
from chatgpt.rollout import Abilities, Call, HFEngine, LocalEngine, RolloutEngine
from chatgpt.strategies import strategy_by_name
from chatgpt.trainer import PPOConfig as OurConfig
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.algorithms import Estimates, Estimator
from chatgpt.trainer.callbacks import TRACKERS, ProgressBar, TensorBoard, WandB
from chatgpt.types import Experience, Sample
from chatgpt_compat.accelerator import Accelerator
from chatgpt_compat.statistics import Measured, Recorder, of_step, std
from chatgpt_compat.trl.config import PPOConfig
from chatgpt_compat.trl.core import generate_to_end, masked_whiten, set_seed
from chatgpt_compat.trl.models import PreTrainedModelWrapper, create_reference_model, upload
from chatgpt_compat.trl.training import launched

KL_KINDS = {'kl': 'k1', 'abs': 'abs', 'mse': 'k2', 'full': 'full'}
_UPDATED = {
    *('experience_batch_size', 'train_batch_size', 'max_epochs', 'max_tokens_per_batch', 'max_grad_norm', 'gamma'),
    *('lam', 'eps_clip', 'value_clip', 'value_coef', 'ratio_threshold', 'target_kl'),
}
"""settings of our trainer that are updated in every step"""
_POSITIONS = 1024
"""tokens of a row for planning micro-batches, unless the model's context is shorter"""


_WITHOUT_EFFECT = (
    *('remove_padding', 'pad_to_multiple_of', 'synced_gpus'),
    *('output_scores', 'return_dict_in_generate', 'output_logits'),
)
_OBJECTS = ('stopping_criteria', 'logits_processor', 'prefix_allowed_tokens_fn', 'streamer')
"""arguments of `generate` with which transformers' own generates"""
_OWN = 'of your own is {} of chatgpt.trainer.PPOTrainer (docs/extend/algorithm.md)'
_INNER = {
    'compute_rewards': 'give step the scores that you want paid, one per response or one per token',
    '_kl_penalty': 'kl_penalty has the choices',
    'compute_advantages': f'an estimator {_OWN.format("advantage_estimator")}',
    **dict.fromkeys(('loss', 'train_minibatch'), f'a loss {_OWN.format("policy_loss")}'),
    **dict.fromkeys(('batched_forward_pass', 'prepare_model_inputs'), "forwards are the library's, without padding"),
    'record_step_stats': 'change what step returns',
    '_generate_batched': 'override generate',
}
"""method of TRL's trainer that subclasses override → what to do here"""


# ------------------------------------------------------------------ the trainer of this library, with TRL's measures


def _whitened_gae(experiences: list[Experience], settings: Any) -> Estimates:
    """GAE on rewards whitened as in TRL, which adds the mean back unscaled; this library scales it with the rest."""
    masks = [e.response_mask for e in experiences]
    flat = masked_whiten(torch.cat([e.rewards for e in experiences]), torch.cat(masks).float(), shift_mean=False)
    rewards = flat.split([e.num_actions for e in experiences])
    return gae(list(rewards), [e.values for e in experiences], masks, gamma=settings.gamma, lam=settings.lam)


WHITENED_GAE = Estimator(fn=_whitened_gae, needs_values=True)
"""advantage_estimator of `whiten_rewards`"""


class _Engine(RolloutEngine):
    """The local engine, or `model.generate` for an encoder-decoder and for settings that only transformers has (beams,
    penalties)."""

    abilities = Abilities(copies_weights=False, reproducible=True)

    def __init__(self) -> None:
        self.local, self.other = LocalEngine(), HFEngine()
        self._actor: Any = None

    def begin(self, actor: Any) -> None:
        self._actor = actor
        if not is_encoder_decoder(actor.model):
            self.local.begin(actor)

    def end(self) -> None:
        self.local.end()
        self._actor = None

    def generate(self, call: Call) -> list[Sample]:
        if not call.sampling.extra and not is_encoder_decoder(self._actor.model):
            return self.local.generate(call)
        self.other.begin(self._actor)
        try:
            return self.other.generate(call)
        finally:
            self.other.end()


class _Trainer(PPOTrainer):
    """`PPOTrainer` with the measures that TRL's statistics need."""

    recorder = Recorder()

    def work(self, records: list[Experience], learners: Any) -> Any:
        self.recorder.note(fetched(self.strategy, records))
        measure = partial(self.recorder.measure, self.config)
        return super().work(records, [replace(x, loss=Measured(x.loss, measure)) for x in learners])


def our_config(config: PPOConfig, world_size: int, max_positions: int) -> OurConfig:
    """Returns our settings for a classic config."""
    assert config.mini_batch_size is not None and config.backward_batch_size is not None
    assert config.batch_size is not None
    kind: Any = KL_KINDS[config.kl_penalty]
    if config.kl_estimator != 'k1' and config.kl_penalty == 'kl':
        kind = config.kl_estimator
    return OurConfig(
        experience_batch_size=config.batch_size * world_size,
        train_batch_size=config.backward_batch_size * world_size,
        max_tokens_per_batch=config.mini_batch_size * min(max_positions, _POSITIONS),
        max_grad_norm=config.max_grad_norm,
        kl_kind=kind,
        advantage_estimator=f'{__name__}:WHITENED_GAE' if config.whiten_rewards else 'gae',
        value_coef=config.vf_coef,
        ratio_threshold=config.ratio_threshold,
        target_kl=config.target_kl if config.early_stopping else None,
        recompute_logprobs=True,
        **config.settings(),
    )


# ------------------------------------------------------------------ TRL's


class ClassicPPOTrainer:
    """TRL's trainer of 0.4 to 0.11. Raises ValueError for arguments of a wrong type.

    Args:
        model: a model with a value head, trained in place.
        ref_model: the frozen reference. None takes a copy of the model that shares `num_shared_layers` blocks; the
            reference of a model with an adapter is the model without it.
        dataset, data_collator: rows for `dataloader`, and a function from rows to a batch.
        optimizer: an optimizer of the model's parameters; Adam with config.learning_rate by default.
        lr_scheduler: stepped once per `step`.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
        training_data_collator: Any = None,
    ) -> None:
        for name in _INNER if type(self) is not ClassicPPOTrainer else ():
            if any(name in vars(c) for c in type(self).__mro__):
                warnings.warn(f'{type(self).__name__}.{name} is never called here: {_INNER[name]}', stacklevel=3)
        config = PPOConfig() if config is None else config
        _check(config, model, ref_model, tokenizer)
        if training_data_collator is not None:
            warnings.warn('training_data_collator has no effect here: batches are made by the library', stacklevel=3)
        config.resolve('classic')
        config.check('classic')
        set_seed(config.seed)  # type: ignore[arg-type]
        self.config, self.model, self.tokenizer, self.lr_scheduler = config, model, tokenizer, lr_scheduler
        if config.gradient_checkpointing:
            hf = model.pretrained_model
            recompute_activations(hf)
        self.is_peft_model = bool(model.is_peft_model)
        if ref_model is None and not self.is_peft_model:
            ref_model = create_reference_model(model, num_shared_layers)
        elif num_shared_layers is not None:
            warnings.warn(
                'num_shared_layers has no effect here: the reference is given or the model itself', stacklevel=3
            )
        self.ref_model = ref_model
        self.optimizer = optimizer or Adam([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate)  # type: ignore[arg-type]
        self._strategy = strategy_by_name(launched(), seed=config.seed, precision=model.precision)  # type: ignore[arg-type]
        atexit.register(self._strategy.close)
        self.inner = self._make_trainer()
        self.is_distributed = self._strategy.world_size > 1
        self.is_encoder_decoder = config.is_encoder_decoder = is_encoder_decoder(model.pretrained_model)
        self.current_device = self._strategy.device
        self.current_step = 0
        self._trackers = _trackers(config)
        self._tracking = False
        atexit.register(self._end_tracking)
        self.accelerator = Accelerator(self._strategy, self._track, self._end_tracking)
        self.dataset, self.data_collator = dataset, data_collator
        self.dataloader = None if dataset is None else self.prepare_dataloader(dataset, data_collator)

    def _make_trainer(self) -> _Trainer:
        strategy, c = self._strategy, self.config
        assert c.backward_batch_size is not None and c.batch_size is not None
        c.world_size, c.is_peft_model = strategy.world_size, self.is_peft_model  # for scripts to read
        c.global_backward_batch_size = c.backward_batch_size * strategy.world_size
        c.global_batch_size = c.batch_size * strategy.world_size
        actor = Actor(self.model.pretrained_model, value_head=self.model.v_head)
        initial = None
        if self.ref_model is not None:
            initial = Actor(getattr(self.ref_model, 'pretrained_model', self.ref_model))
        (actor, optimizer), initial = strategy.prepare((actor, self.optimizer), initial)
        self._positions: int = getattr(self.model.config, 'max_position_embeddings', None) or _POSITIONS
        self._told: set[str] = set()
        return _Trainer(
            strategy,
            actor,
            None,
            None,
            initial,
            optimizer,
            config=our_config(c, strategy.world_size, self._positions),
            tokenizer=self.tokenizer,
            callbacks=[ProgressBar(enabled=False)],
            engine=_Engine(),
        )

    @property
    def kl_ctl(self) -> Any:
        """The KL controller; `.value` is the coefficient."""
        return self.inner.kl_controller

    # ------------------------------------------------------------------ data

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None) -> DataLoader:
        """Returns a loader of shuffled batches of config.batch_size rows on the device, without the last short one.
        With remove_unused_columns, columns of a `datasets` dataset that neither a model nor `log_stats` uses are
        dropped."""
        kept = {'input_ids', 'attention_mask', 'past_key_values', 'label', 'query', 'response'}
        names = getattr(dataset, 'column_names', None)
        if self.config.remove_unused_columns and isinstance(names, list) and hasattr(dataset, 'remove_columns'):
            dataset = dataset.remove_columns([name for name in names if name not in kept])
        sampler: DistributedSampler | None = None
        if self.is_distributed:
            n, rank = self._strategy.world_size, self._strategy.rank
            sampler = DistributedSampler(dataset, n, rank, seed=self.config.seed or 0, drop_last=True)
        return _OnDevice(
            self.current_device,
            dataset,
            batch_size=self.config.batch_size,
            collate_fn=data_collator,
            shuffle=sampler is None,
            sampler=sampler,
            drop_last=True,
        )

    # ------------------------------------------------------------------ generate

    def generate(
        self,
        query_tensor: Tensor | SequenceOf[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Generates responses, int64 on the device: (1, L) for one query (P,), a list of (L,) for a list of queries.

        Defaults are those of transformers: greedy, 20 new tokens, and top_k=50 when sampling. `model.generate` runs
        calls with settings or objects that only it has (beams, penalties, `stopping_criteria`, `logits_processor`).

        Args:
            length_sampler: returns the number of new tokens; called once per `batch_size` queries, as in TRL.
            return_prompt: the response follows the prompt's tokens; for an encoder-decoder always the start token.
            generate_ref_response: return (responses, responses of the reference), the latter by transformers.
            **generation_kwargs: those of `model.generate`. `attention_mask` is that of a query, (P,) or (1, P), or a
                list of them; padding is dropped from the query, but not from the prompt that is returned.
        """
        if isinstance(query_tensor, Tensor) and query_tensor.dim() != 1:
            raise ValueError(f'generate: query_tensor is {tuple(query_tensor.shape)}; give (P,), or a list of (P,)')
        single = isinstance(query_tensor, Tensor)
        given = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        queries = _unpadded(given, generation_kwargs.pop('attention_mask', None), single)
        settings = self._settings(generation_kwargs, bool(length_sampler))

        sampler, drawn = None, list[int]()
        if length_sampler is not None:
            drawn = [int(length_sampler()) for _ in range(0, len(queries), batch_size)]
            sampler = partial(next, iter([drawn[i // batch_size] for i in range(len(queries))]))
        by_transformers = partial(self._by_transformers, queries, batch_size, drawn, generation_kwargs)
        if any(generation_kwargs.get(name) is not None for name in _OBJECTS):
            found = by_transformers(self.model.pretrained_model)
        else:
            answers: Any = self.inner.generate(queries, length_sampler=sampler, **settings)
            found = [answer.to(self.current_device) for answer in answers]
            if self.is_encoder_decoder:
                start = torch.tensor([start_token(self.model.config)], device=self.current_device)
                found = [torch.cat([start, r]) for r in found]
        if return_prompt and not self.is_encoder_decoder:
            found = [torch.cat([q.to(r), r]) for q, r in zip(given, found, strict=True)]
        result = found[0][None] if single else found
        if not generate_ref_response:
            return result
        if self.ref_model is None:
            raise ValueError(
                'generate_ref_response needs a ref_model: the reference of a model with adapters is not one'
            )
        reference = by_transformers(getattr(self.ref_model, 'pretrained_model', self.ref_model))
        if return_prompt and not self.is_encoder_decoder:
            reference = [torch.cat([q.to(r), r]) for q, r in zip(given, reference, strict=True)]
        return result, reference[0][None] if single else reference

    def _by_transformers(
        self, queries: list[Tensor], batch_size: int, drawn: list[int], settings: dict[str, Any], model: Any
    ) -> list[Tensor]:
        """Returns responses by a model's own `generate`; `drawn`: new tokens of each batch."""
        settings = {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}
        found: list[Tensor] = []
        for i in range(0, len(queries), batch_size):
            more = settings | ({'max_new_tokens': drawn[i // batch_size]} if drawn else {})
            batch = [q.to(self.current_device) for q in queries[i : i + batch_size]]
            found += generate_to_end(model, batch, more)
        return found

    def _settings(self, given: dict[str, Any], has_lengths: bool) -> dict[str, Any]:
        """Converts transformers' generation keywords to ours."""
        given = {name: value for name, value in given.items() if name not in _OBJECTS}
        for name in _WITHOUT_EFFECT[:3]:
            if given.pop(name, None) not in (None, True):
                warnings.warn(f'generate: {name} has no effect here: responses are never padded', stacklevel=3)
        for name in _WITHOUT_EFFECT[3:]:
            if given.pop(name, None):
                warnings.warn(f'generate: {name} has no effect here: responses are tensors of ids', stacklevel=3)
        own = self.model.pretrained_model.generation_config
        if (config := given.pop('generation_config', None)) is not None:
            given = {k: v for k, v in config.to_diff_dict().items() if v is not None} | given
        settings: dict[str, Any] = {
            'do_sample': own.do_sample or False,
            'temperature': own.temperature or 1.0,
            'top_k': 50 if own.top_k is None else own.top_k,
            'top_p': own.top_p or 1.0,
            'eos_token_id': own.eos_token_id,
        } | {k: v for k, v in given.items() if v is not None}
        if has_lengths or settings.get('max_new_tokens') is not None:
            settings.pop('max_length', None)
        elif settings.get('max_length') is None:
            limits = {'max_new_tokens': own.max_new_tokens, 'max_length': own.max_length}
            settings |= {name: limit for name, limit in limits.items() if limit} or {'max_new_tokens': 20}
        if self.is_encoder_decoder and (length := settings.pop('max_length', None)):  # of the decoder, with its start
            settings.setdefault('max_new_tokens', length - 1)
        if not settings['do_sample']:  # transformers filters only when sampling
            settings |= {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}
        if (end := settings['eos_token_id']) is not None:
            # TRL's scripts write -1, or a number beyond the vocabulary, for no end at all
            size, ends = self.model.config.vocab_size, [end] if isinstance(end, int) else list(end)
            settings['eos_token_id'] = [t for t in ends if 0 <= t < size]
        return settings

    # ------------------------------------------------------------------ step

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Learns from `batch_size` scored responses of this process and returns TRL's statistics, listed in
        docs/coming_from/trl/statistics.md. Raises ValueError for arguments that are not lists of that many tensors.

        Args:
            queries, responses: int64 tensors, (P,) and (A,); responses of an encoder-decoder may begin with its start
                token, as returned by `generate`, which A does not count.
            scores: a tensor per response, with one element or one per token.
            response_masks: (A,), 1 = a token that the model generated.
        """
        start = time.perf_counter()
        self._check_lists(queries=queries, responses=responses, scores=scores)
        inner, kl_coef = self.inner, self.kl_ctl.value
        self._follow_config()
        inner.take_learning_rates()  # set by a scheduler or by the script
        dropout_off(self._strategy.unwrap(inner.actor))  # the script may have called model.train()
        inner.recorder = Recorder()
        metrics = inner.step(
            [q.detach().cpu().flatten() for q in queries],
            [self._without_start(r.detach().cpu().flatten()) for r in responses],
            [s.detach().float().cpu() for s in scores],
            None if response_masks is None else [m.detach().cpu() for m in response_masks],
        )
        begin = time.perf_counter()
        experiences = fetched(self._strategy, inner.last_experiences)
        stats = of_step(experiences, metrics, inner.recorder, inner.config.value_coef)
        stats['ppo/learning_rate'] = float(self.optimizer.param_groups[0]['lr'])
        if self.config.adap_kl_ctrl and inner.config.kl_kind != 'k1':
            # Our controller follows log π − log π_ref, TRL's the penalty in the reward.
            self.kl_ctl.load_state_dict(self.kl_ctl.state_dict() | {'value': kl_coef})
            self.kl_ctl.update(stats['objective/kl'], len(experiences))
        if stats['objective/kl'] < -1.0:
            warnings.warn(
                f'the KL to the reference is {stats["objective/kl"]:.2f}: responses must be drawn as the model is '
                'scored, without top_k, min_length or an altered temperature',
                stacklevel=2,
            )
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        now = time.perf_counter()
        return stats | {
            'time/ppo/forward_pass': metrics['perf/score_s'],
            'time/ppo/optimize_step': metrics['perf/learn_s'],
            'time/ppo/calc_stats': now - begin,
            'time/ppo/total': now - start,
        }

    def _without_start(self, response: Tensor) -> Tensor:
        starts = self.is_encoder_decoder and len(response) > 1 and response[0] == start_token(self.model.config)
        return response[1:] if starts else response

    def _follow_config(self) -> None:
        """Applies later changes of `config` from this step on, as TRL does; warns of those that cannot be applied."""
        wanted = our_config(self.config, self._strategy.world_size, self._positions)
        for name, value in vars(wanted).items():
            if value == getattr(self.inner.config, name) or name in self._told:
                continue
            if name in _UPDATED:
                setattr(self.inner.config, name, value)
            else:
                self._told.add(name)
                warnings.warn(
                    f'config: {name}={value!r} has no effect now: it is read when the trainer is made', stacklevel=3
                )

    def _check_lists(self, **lists: Any) -> None:
        for name, given in lists.items():
            if not isinstance(given, (list, tuple)) or not all(isinstance(t, Tensor) for t in given):
                raise ValueError(f'step: {name} must be a list of tensors; got {_kind(given)}')
            if len(given) != self.config.batch_size:
                raise ValueError(f'step: {len(given)} {name} given, but batch_size={self.config.batch_size}')

    # ------------------------------------------------------------------ logging

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: Any,
        rewards: SequenceOf[Any] | Tensor,
        columns_to_log: SequenceOf[str] = ('query', 'response'),
    ) -> None:
        """Logs statistics and the spread of the rewards to the trackers of `log_with`, and to W&B a table of texts."""
        given = rewards if isinstance(rewards, Tensor) else torch.tensor([float(r) for r in rewards])
        scores = self.accelerator.gather(given.detach().float().to(self.current_device)).flatten().cpu()
        rows: dict[str, list[Any]] = {}
        if self.config.log_with == 'wandb':
            missing = [name for name in columns_to_log if name not in batch]
            if missing:
                raise ValueError(f'log_stats: the batch has no {missing[0]!r}; give it, or other columns_to_log')
            for name in columns_to_log:
                rows[name] = [text for part in self._strategy.all_gather_object(list(batch[name])) for text in part]
        spread = {'mean': float(scores.mean()), 'std': std(scores), 'dist': scores.numpy()}
        logs = stats | {f'env/reward_{name}': value for name, value in spread.items()}
        self.current_step += 1
        self.accelerator.log(logs, step=self.inner.phase)
        for tracker in self._trackers if rows and self.accelerator.is_main_process else ():
            tracker.on_log(self.inner, {}, rows, scores.tolist(), list(columns_to_log))

    def _track(self, values: dict[str, Any], step: int | None) -> None:
        """Logs numbers to every tracker and arrays to W&B."""
        if self._trackers and not self._tracking:
            self._tracking = True
            for tracker in self._trackers:
                tracker.on_fit_start(self.inner)
        step = self.inner.phase if step is None else step
        numbers = {k: float(v) for k, v in values.items() if np.ndim(v) == 0 and not isinstance(v, str)}
        for tracker in self._trackers:
            tracker.on_phase_end(self.inner, step, numbers if isinstance(tracker, TensorBoard) else values)

    def _end_tracking(self) -> None:
        for tracker in self._trackers if self._tracking else ():
            tracker.on_fit_end(self.inner)
        self._tracking = False

    # ------------------------------------------------------------------ files

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes a folder of the model with its value head and the tokenizer; see the model's `save_pretrained`."""
        if self._strategy.is_rank_0:
            self.model.save_pretrained(save_directory, **kwargs)
            self.tokenizer.save_pretrained(save_directory)
        self._strategy.barrier()

    _save_pretrained = save_pretrained

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str | None:
        """Uploads the result of `save_pretrained` from the main process and returns its address."""
        if not self._strategy.is_rank_0:
            return None

        def save(folder: Path) -> None:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

        return upload(save, repo_id, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'PPOTrainer.{name} is not served here; docs/coming_from/trl/names.md lists what is, and `trainer.inner` '
            'is the PPOTrainer of this library behind it'
        )


class _OnDevice(DataLoader):
    """A `DataLoader` with batches on a device."""

    def __init__(self, device: torch.device, dataset: Any, **options: Any) -> None:
        self._device = device
        super().__init__(dataset, **options)

    def __iter__(self) -> Any:
        return (_to(batch, self._device) for batch in super().__iter__())


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _to(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
        return type(value)(_to(part, device) for part in value)
    return value


def _unpadded(queries: SequenceOf[Tensor], mask: Any, single: bool) -> list[Tensor]:
    """Returns the queries on the CPU, without tokens that have a 0 in the mask."""
    queries = [q.detach().cpu() for q in queries]
    if mask is None:
        return queries
    masks = [torch.as_tensor(m).detach().cpu().bool() for m in ([mask] if single else mask)]
    masks = [m[0] if m.dim() == 2 and len(m) == 1 else m for m in masks]
    shapes, wanted = [tuple(m.shape) for m in masks], [tuple(q.shape) for q in queries]
    if shapes != wanted:
        raise ValueError(f'generate: attention_mask is {shapes}, of queries {wanted}; give one of the shape of each')
    return [q[m] for q, m in zip(queries, masks, strict=True)]


def _check(config: Any, model: Any, ref_model: Any, tokenizer: Any) -> None:
    head = 'AutoModelForCausalLMWithValueHead'
    for name, value, is_right, wanted in (
        ('config', config, isinstance(config, PPOConfig), 'a PPOConfig'),
        (
            'model',
            model,
            isinstance(model, PreTrainedModelWrapper),
            f'a model with a head, {head}.from_pretrained(model)',
        ),
        ('ref_model', ref_model, ref_model is None or isinstance(ref_model, nn.Module), 'a model or None'),
        ('tokenizer', tokenizer, hasattr(tokenizer, 'decode'), 'a transformers tokenizer'),
    ):
        if not is_right:
            raise ValueError(f'PPOTrainer: {name} must be {wanted}; got {_kind(value)}')


def _kind(value: Any) -> str:
    return 'None' if value is None else f'a {type(value).__name__}'


def _trackers(config: PPOConfig) -> list[Any]:
    """Returns our callbacks for `log_with`."""
    names = config.log_with or config.report_to or []
    names = [names] if isinstance(names, str) else list(names)
    made: list[Any] = []
    for name in names:
        if name == 'tensorboard':
            folder = config.project_kwargs.get('logging_dir') or config.logging_dir
            folder = folder or config.accelerator_kwargs.get('logging_dir')  # up to 0.4
            if folder is None:
                raise ValueError("log_with='tensorboard' needs project_kwargs={'logging_dir': FOLDER}")
            made.append(TensorBoard(Path(folder, config.tracker_project_name), num_rows=0))
        elif name == 'wandb':
            init: Any = {'project': config.tracker_project_name} | dict(config.tracker_kwargs.get('wandb', {}))
            made.append(WandB(**init, num_rows=0))
        elif name not in ('none', None):
            made.append(TRACKERS.find(name)())
    for name in config.tracker_kwargs:
        if name != 'wandb':
            warnings.warn(f'tracker_kwargs[{name!r}] has no effect here', stacklevel=4)
    return made
