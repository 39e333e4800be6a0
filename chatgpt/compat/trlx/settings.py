"""What each field of trlX's config comes to here. `FIELDS` says it of every one; the functions do it.

A field that cannot be followed is a ValueError or a warning that names it. Left out: the config objects (`config`), and
building trainers (`trainers`).
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from chatgpt.compat.trlx.config import TRLConfig, unknown
from chatgpt.names import hint
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.objectives.ilql import ILQLConfig
from chatgpt.trainer.rft import RFTConfig

AS_IS, OLD = 'the same', 'of 2022: '
_LR = OLD + 'the learning rate'
FIELDS: dict[str, str] = {
    'model.model_path': 'the same; also a transformers config (new weights) or a transformers model',
    'model.model_arch_type': "the same: 'causal', or 'seq2seq' for an encoder-decoder; also for SFT and RFT",
    'model.num_layers_unfrozen': 'the same; 0 is an error, and with peft_config it is ignored, with a warning',
    'model.peft_config': 'LoRA, a dict or peft.LoraConfig: r, lora_alpha, lora_dropout, target_modules, bias; where '
    'target_modules is not given, every linear layer of the blocks. Other methods, and ILQL with adapters, are errors',
    'model.model_extra_configs': 'trust_remote_code, attn_implementation, revision, ...: options of loading; another '
    'is an error',
    'model.tokenizer_path': OLD + 'tokenizer.tokenizer_path',
    'model.model_type': OLD + 'train.trainer',
    'model.device': OLD + 'ignored: placement is the strategy’s',
    'tokenizer.tokenizer_path': 'the same; also a tokenizer',
    'tokenizer.padding_side': 'ignored: sequences travel unpadded, so no number depends on it',
    'tokenizer.truncation_side': AS_IS,
    'tokenizer.tokenizer_extra_configs': 'the same, for AutoTokenizer',
    'optimizer.name': 'adamw, adam (with weight decay: decoupled, and a warning), sgd; the 8-bit ones are errors',
    'optimizer.kwargs': 'lr, betas, eps, weight_decay; of sgd lr, weight_decay, momentum',
    'scheduler.name': 'cosine_annealing, linear',
    'scheduler.kwargs': 'T_max and eta_min; of linear start_factor, end_factor and total_iters. Past its end the last '
    'rate holds, where torch’s cosine would rise again',
    'train.total_steps': 'the same; PPO and RFT end with the learning phase in which it is reached',
    'train.seq_length': 'the same: longest sample; prompts are cut to it less max_new_tokens',
    'train.epochs': 'the same; of PPO learning phases, of RFT passes over what was kept',
    'train.batch_size': 'the same: per process, so times the number of processes',
    'train.checkpoint_interval': 'the same, in optimizer steps; written after the phase in which it falls',
    'train.eval_interval': 'the same, in optimizer steps; done after the phase in which it falls',
    'train.pipeline': 'PromptPipeline, or one registered with @register_datapipeline',
    'train.trainer': 'AcceleratePPOTrainer, AccelerateILQLTrainer, AccelerateSFTTrainer, AccelerateRFTTrainer; NeMo is '
    'an error',
    'train.trainer_kwargs': 'further arguments of the trainer',
    'train.project_name': 'the same, of the tracker',
    'train.run_name': 'the same, of the tracker',
    'train.entity_name': 'the same, of the tracker',
    'train.group_name': 'the same, of the tracker',
    'train.checkpoint_dir': 'the same; also metrics.jsonl and eval samples',
    'train.rollout_logging_dir': AS_IS,
    'train.save_best': AS_IS,
    'train.save_optimizer': 'the same; a checkpoint also holds step, KL coefficient and running moments, which trlX '
    'forgets',
    'train.resume_from_checkpoint': 'the same: a folder that `save` wrote',
    'train.tracker': 'wandb (without a login: offline, with a warning), tensorboard, None; also trackio, mlflow or '
    'another of TRACKERS, of which project_name alone is followed',
    'train.logging_dir': 'the same, of TensorBoard',
    'train.tags': 'the same, of the tracker',
    'train.seed': 'the same; decides every draw, whatever the number of processes',
    'train.minibatch_size': 'micro-batches of at most minibatch_size · seq_length tokens; no number depends on it',
    'train.orchestrator': OLD + 'for get_orchestrator',
    'train.n_ctx': OLD + 'train.seq_length',
    'train.lr_init': _LR,
    'train.learning_rate_init': _LR,
    'train.lr_target': OLD + 'the rate at the end of the cosine',
    'train.learning_rate_target': OLD + 'the rate at the end of the cosine',
    'train.lr_ramp_steps': OLD + 'warm-up steps',
    'train.lr_decay_steps': OLD + 'steps of the cosine; total_steps without it',
    'train.opt_betas': OLD + 'optimizer.kwargs.betas',
    'train.opt_eps': OLD + 'optimizer.kwargs.eps',
    'train.weight_decay': OLD + 'optimizer.kwargs.weight_decay',
    'train.grad_clip': OLD + 'the gradient norm is clipped to it',
    'train.log_interval': OLD + 'ignored: every learning phase is logged',
    'train.input_size': OLD + 'longest prompt, in tokens',
    'train.gen_size': OLD + 'longest sequence of an evaluation, where gen_kwargs says nothing',
    'train.accelerate': OLD + 'ignored: torchrun or accelerate launch decide',
    'train.accelerate_config_path': OLD + 'ignored: torchrun or accelerate launch decide',
    'method.name': 'the method config',
    'method.ppo_epochs': AS_IS,
    'method.num_rollouts': 'the same: per process, rounded up to whole chunks as in trlX',
    'method.chunk_size': 'the same: per process, and full also where there are fewer prompts',
    'method.init_kl_coef': AS_IS,
    'method.target': 'the same; compared with the mean of log π − log π_ref per response, where trlX takes k3',
    'method.horizon': 'converted: one update after a phase of n rollouts in place of one per pass of batch_size',
    'method.gamma': AS_IS,
    'method.lam': AS_IS,
    'method.cliprange': AS_IS,
    'method.cliprange_value': AS_IS,
    'method.vf_coef': AS_IS,
    'method.scale_reward': "'running', 'ref'; 'ignored', False and None are off; another value is an error",
    'method.ref_mean': 'ignored, as in trlX, which only asks whether it is given',
    'method.ref_std': "the same, with scale_reward='ref'",
    'method.cliprange_reward': 'the same, before the scaling',
    'method.gen_kwargs': 'the same; a list is a sweep of the evaluation. What the local engine cannot do (num_beams, '
    'repetition_penalty, ...) goes to model.generate',
    'method.gen_experience_kwargs': AS_IS,
    'method.num_value_layers_unfrozen': 'converted, with a warning: above 0 the critic is a model of its own',
    'method.tau': AS_IS,
    'method.cql_scale': AS_IS,
    'method.awac_scale': AS_IS,
    'method.alpha': AS_IS,
    'method.beta': AS_IS,
    'method.betas': OLD + 'gen_kwargs.beta, a list',
    'method.steps_for_target_q_sync': 'the same; trlX asks only at the end of an epoch',
    'method.two_qs': AS_IS,
    'method.start_percentile': AS_IS,
    'method.end_percentile': 'converted: the percentile rises over the whole run, where trlX begins anew after '
    'n_improve_steps',
    'method.n_improve_steps': 'passes over what one round of generation kept',
    'method.n_generations_per_prompt': AS_IS,
}
"""of every field of trlX's config: what becomes of it"""


def warn(text: str) -> None:
    warnings.warn(f'trlx: {text}', stacklevel=3)


def check(config: TRLConfig) -> None:
    """What is not served, and values without meaning, before anything is loaded."""
    from chatgpt.trainer.callbacks import TRACKERS

    model, train = config.model, config.train
    if model.model_arch_type not in ('causal', 'seq2seq'):
        raise ValueError(
            f"trlx: model_arch_type={model.model_arch_type!r} is not known; give 'causal', or 'seq2seq' for an "
            'encoder-decoder'
        )
    if model.num_layers_unfrozen == 0:
        raise ValueError(
            'trlx: num_layers_unfrozen=0 leaves no block to train; give -1 (all), how many top blocks, or peft_config'
        )
    if train.minibatch_size and train.batch_size % train.minibatch_size:
        raise ValueError(
            f'trlx: minibatch_size={train.minibatch_size} must divide batch_size={train.batch_size}; give a divisor'
        )
    for name in ('total_steps', 'epochs', 'batch_size', 'checkpoint_interval', 'eval_interval'):
        if not getattr(train, name) >= 1:
            raise ValueError(f'trlx: train.{name}={getattr(train, name)!r} must be at least 1')
    if train.tracker is not None and train.tracker not in TRACKERS:
        raise ValueError(
            f'trlx: train.tracker={train.tracker!r} is not known; choose one of {", ".join(TRACKERS)}, or None'
            f'{hint(train.tracker, TRACKERS)}'
        )
    tokenizer_path(config)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # what is converted is said when it is used
        lora_keywords(config)
        learning(config)
        if hasattr(config.method, 'gen_kwargs'):
            sweep_of(generation(config))
            longest_prompt(config)
        if hasattr(config.method, 'ppo_epochs'):
            score_scaling(config)
            ppo_settings(config)


def is_seq2seq(config: TRLConfig) -> bool:
    """Whether the model is an encoder-decoder."""
    return bool(config.model.model_arch_type == 'seq2seq')


def check_arch(config: TRLConfig, model_config: Any) -> None:
    """Raises ValueError where the model is not what `model_arch_type` says."""
    found = 'seq2seq' if getattr(model_config, 'is_encoder_decoder', False) else 'causal'
    if found != config.model.model_arch_type:
        raise ValueError(
            f'trlx: model_arch_type={config.model.model_arch_type!r}, and the model ({model_config.model_type}) is '
            f'{found!r}: give that, or another model'
        )


def separator(config: TRLConfig) -> str:
    """What stands between prompt and output in the `samples` of reward and metric functions."""
    return '<sep>' if is_seq2seq(config) else ''


def processes() -> int:
    """How many processes `torchrun` or `accelerate launch` started."""
    return int(os.environ.get('WORLD_SIZE', '1'))


def strategy_name() -> str:
    """What the environment of the launcher asks for."""
    if processes() == 1:
        return 'naive'
    if os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE') in ('2', '3') or os.environ.get('ACCELERATE_USE_FSDP'):
        return 'fsdp'
    return 'ddp'


def precision() -> str:
    """Of `accelerate launch`; fp32 without it."""
    given = os.environ.get('ACCELERATE_MIXED_PRECISION', 'no')
    return given if given in ('bf16', 'fp16') else 'fp32'


# ---------------------------------------------------------------------- tokenizer, model


def tokenizer_path(config: TRLConfig) -> Any:
    path = config.tokenizer.tokenizer_path if config.tokenizer is not None else config.model.tokenizer_path
    if path is None or path == '':
        raise ValueError(
            'trlx: there is no tokenizer_path; token ids without a tokenizer are not served: give a hub name, a '
            'folder or a tokenizer'
        )
    return path


LORA = {'r': 8, 'lora_alpha': 8, 'lora_dropout': 0.0, 'target_modules': None, 'bias': 'none'}
"""fields of peft.LoraConfig that are followed, with its defaults"""
SAID_ELSEWHERE = ('peft_type', 'task_type', 'inference_mode', 'base_model_name_or_path', 'revision', 'auto_mapping')


def lora_keywords(config: TRLConfig) -> dict[str, Any]:
    """`lora_rank`, `lora_train_bias` and `lora_options` of the model classes; {} without a peft_config.

    Raises:
        ValueError: another method than LoRA, or a field of it that is not followed.
    """
    given = config.model.peft_config
    if given is None:
        return {}
    if config.model.num_layers_unfrozen > 0:
        warn(f'num_layers_unfrozen={config.model.num_layers_unfrozen} is ignored with a peft_config, as in trlX')
    if isinstance(given, Mapping):
        values, plain = dict(given), {}
    else:
        values = given.to_dict()
        plain = type(given)().to_dict()
    kind = getattr(values.get('peft_type', 'LORA'), 'value', values.get('peft_type', 'LORA'))
    if kind != 'LORA':
        raise ValueError(f'trlx: peft_config of type {kind} is not served; of PEFT there is LORA')
    for name, value in values.items():
        if name not in LORA and name not in SAID_ELSEWHERE and value and value != plain.get(name):
            raise ValueError(f'trlx: peft_config.{name}={value!r} is not followed; there are {", ".join(LORA)}')
    values = LORA | {name: values[name] for name in LORA if values.get(name) is not None}
    targets = values['target_modules']
    if targets is None:
        warn('peft_config names no target_modules: every linear layer of the blocks gets an adapter, PEFT has fewer')
    elif not isinstance(targets, str):
        targets = sorted(targets)
    return {
        'lora_rank': values['r'],
        'lora_train_bias': values['bias'],
        'lora_options': {'alpha': values['lora_alpha'], 'dropout': values['lora_dropout'], 'targets': targets},
    }


# ---------------------------------------------------------------------- optimizer, learning rate

OPTIMIZERS = {'adamw': ('lr', 'betas', 'eps', 'weight_decay'), 'sgd': ('lr', 'weight_decay', 'momentum')}
OPTIMIZERS['adam'] = OPTIMIZERS['adamw']


def optimizer_of(config: TRLConfig) -> tuple[str, dict[str, Any]]:
    """'adamw' or 'sgd', and its keywords, `lr` among them."""
    if config.optimizer is None:
        t = config.train
        given = {
            'lr': t.learning_rate_init if t.lr_init is None else t.lr_init,
            'betas': t.opt_betas,
            'eps': t.opt_eps,
            'weight_decay': t.weight_decay,
        }
        name, kwargs = 'adamw', {key: value for key, value in given.items() if value is not None}
    else:
        name, kwargs = (
            str(getattr(config.optimizer.name, 'value', config.optimizer.name)),
            dict(config.optimizer.kwargs),
        )
    if name not in OPTIMIZERS:
        raise ValueError(f'trlx: optimizer {name!r} is not served; choose one of {", ".join(OPTIMIZERS)}')
    for key in kwargs:
        if key not in OPTIMIZERS[name]:
            raise unknown(f'trlx: optimizer {name}', key, OPTIMIZERS[name])
    if name == 'adam' and kwargs.get('weight_decay', 0):
        warn(f'optimizer adam: weight_decay={kwargs["weight_decay"]} is decoupled here, as in adamw')
    if 'betas' in kwargs:
        kwargs['betas'] = tuple(kwargs['betas'])
    return ('sgd' if name == 'sgd' else 'adamw'), {'lr': 1e-3} | kwargs


def schedule_of(config: TRLConfig) -> dict[str, Any]:
    """Settings of `LearningSettings` for the learning rate over the run."""
    lr = optimizer_of(config)[1]['lr']
    if config.scheduler is None:
        t = config.train
        target = t.learning_rate_target if t.lr_target is None else t.lr_target
        warmup = {'warmup_steps': t.lr_ramp_steps} if t.lr_ramp_steps else {}
        return warmup | _cosine(lr, lr if target is None else target, t.lr_decay_steps or t.total_steps)
    name = str(getattr(config.scheduler.name, 'value', config.scheduler.name))
    given = dict(config.scheduler.kwargs)
    known: dict[str, dict[str, Any]] = {'cosine_annealing': {'T_max': None, 'eta_min': 0.0}}
    known['linear'] = {'start_factor': 1 / 3, 'end_factor': 1.0, 'total_iters': 5}
    if name not in known:
        raise ValueError(f'trlx: scheduler {name!r} is not served; choose one of {", ".join(known)}')
    for key in given:
        if key not in known[name]:
            raise unknown(f'trlx: scheduler {name}', key, known[name])
    values = known[name] | given
    if name == 'cosine_annealing':
        if values['T_max'] is None:
            raise ValueError('trlx: scheduler cosine_annealing needs kwargs.T_max, its length in optimizer steps')
        return _cosine(lr, float(values['eta_min']), values['T_max'])
    start, end, length = float(values['start_factor']), float(values['end_factor']), int(values['total_iters'])
    if start == end == 1.0:
        return {'lr_schedule': 'constant'}
    if start == 1.0 and end < 1.0:
        return {'lr_schedule': 'linear', 'lr_end_factor': end, 'lr_decay_steps': length}
    if end == 1.0:
        warn(f'scheduler linear: the rate rises over {length} steps from 1/{length} of it, not from {start:g}')
        return {'lr_schedule': 'constant', 'warmup_steps': length}
    raise ValueError(f'trlx: scheduler linear from {start:g} to {end:g} is not served; let one of them be 1')


def _cosine(lr: float, end: float, length: float) -> dict[str, Any]:
    """From `lr` to `end` in `length` steps; one so long that no run reaches it is no decay."""
    if end == lr or length >= 1e9:
        return {'lr_schedule': 'constant'}
    return {'lr_schedule': 'cosine', 'lr_end_factor': end / lr, 'lr_decay_steps': int(length)}


def learning(config: TRLConfig) -> dict[str, Any]:
    """The fields of `LearningSettings`."""
    train = config.train
    bound = {'max_tokens_per_batch': train.minibatch_size * longest(config)} if train.minibatch_size else {}
    return {'max_grad_norm': train.grad_clip} | bound | schedule_of(config)


def longest(config: TRLConfig) -> int:
    """Tokens of the longest sample."""
    return int(config.train.seq_length or config.train.n_ctx or 1024)


def longest_prompt(config: TRLConfig) -> int:
    """Tokens that a prompt may have, so that a response fits behind it."""
    train, gen = config.train, generation(config)
    room = longest(config) - gen['max_new_tokens'] if 'max_new_tokens' in gen else gen.get('max_length', 2) - 1
    if room < 1:
        raise ValueError(
            f'trlx: seq_length={longest(config)} leaves no token for a prompt with '
            f'max_new_tokens={gen.get("max_new_tokens")}; give a longer one'
        )
    return int(min(room, train.input_size or room))


# ---------------------------------------------------------------------- generation


class Sweep(NamedTuple):
    """An evaluation for each of several values of a generation keyword."""

    name: str
    values: list[Any]


def generation(config: TRLConfig, *, experience: bool = False) -> dict[str, Any]:
    """Generation keywords of an evaluation, or of the rollouts, which take the first value of a list."""
    method = config.method
    given = getattr(method, 'gen_experience_kwargs', None) if experience else None
    gen = dict(method.gen_kwargs if given is None else given)
    is_ilql, is_ppo = hasattr(method, 'two_qs'), hasattr(method, 'ppo_epochs')
    if is_ilql:
        if method.betas is not None and 'beta' not in gen:
            gen['beta'] = list(method.betas)
        gen = {'beta': 1, 'top_k': 20, 'temperature': 1.0} | gen
    if 'max_new_tokens' not in gen and 'max_length' not in gen:
        gen |= {'max_length': int(config.train.gen_size)} if config.train.gen_size else {'max_new_tokens': 32}
    if is_ilql or is_ppo:
        gen.setdefault('do_sample', True)
    if experience:
        for name, value in gen.items():
            if isinstance(value, list):
                warn(f'gen_kwargs.{name}={value} is a sweep of the evaluation; rollouts take {value[0]}')
                gen[name] = value[0]
    if is_seq2seq(config) and (length := gen.pop('max_length', None)):  # of the decoder, its start token among them
        gen.setdefault('max_new_tokens', int(length) - 1)
    return _lengths(gen)


def sweep_of(gen: Mapping[str, Any]) -> Sweep | None:
    """The one list among the generation keywords.

    Raises:
        ValueError: there are two.
    """
    lists = [Sweep(name, list(value)) for name, value in gen.items() if isinstance(value, list)]
    if len(lists) > 1:
        raise ValueError(
            f'trlx: gen_kwargs has several lists, {" and ".join(s.name for s in lists)}; an evaluation sweeps one'
        )
    return lists[0] if lists else None


def _lengths(gen: dict[str, Any]) -> dict[str, Any]:
    """`min_length`, which counts the prompt as well, where it bars the end token altogether; a temperature of 0 is
    greedy."""
    if gen.get('min_length') and gen['min_length'] >= gen.get('max_length', math.inf):
        gen |= {'eos_token_id': [], 'min_length': None}
    if gen.get('temperature') == 0:
        gen |= {'do_sample': False, 'temperature': None}
    return gen


def sampling_keywords(gen: Mapping[str, Any], stop_sequences: Any) -> dict[str, Any]:
    """Keywords for this library's engines: without β, which is ILQL's, and with the stop strings."""
    stop = {'stop_strings': list(stop_sequences)} if stop_sequences else {}
    return {name: value for name, value in gen.items() if name != 'beta'} | stop


# ---------------------------------------------------------------------- methods


class PPOLength(NamedTuple):
    """How long a PPO run is."""

    chunks: int
    """timesteps of one learning phase"""
    phases: int
    steps_per_phase: int


def ppo_length(config: TRLConfig) -> PPOLength:
    m, train = config.method, config.train
    chunks = -(-m.num_rollouts // m.chunk_size)
    steps = m.ppo_epochs * -(-chunks * m.chunk_size // train.batch_size)
    total = min(train.epochs * steps, train.total_steps)
    return PPOLength(chunks, -(-total // steps), steps)


SCALING = {'running': 'running', 'ref': 'ref', 'ignored': 'none', 'none': 'none', 'false': 'none'}


def score_scaling(config: TRLConfig) -> tuple[Any, float]:
    """`PPOConfig.score_scaling`, and a number that scores are divided by."""
    given = str(config.method.scale_reward or 'none').lower()
    if given not in SCALING:
        raise ValueError(
            f"trlx: method.scale_reward={config.method.scale_reward!r} is not known; choose 'running', 'ref' or None"
        )
    if SCALING[given] == 'ref' and config.method.ref_std is not None:
        if not config.method.ref_std > 0:
            raise ValueError(f'trlx: method.ref_std={config.method.ref_std!r} must be positive')
        return 'none', float(config.method.ref_std)
    return SCALING[given], 1.0


def ppo_settings(config: TRLConfig) -> PPOConfig:
    m, world = config.method, processes()
    length = ppo_length(config)
    rollouts = length.chunks * m.chunk_size
    return PPOConfig(
        experience_batch_size=m.chunk_size * world,
        train_batch_size=config.train.batch_size * world,
        max_epochs=m.ppo_epochs,
        kl_coef=float(m.init_kl_coef),
        kl_target=m.target,
        # trlX updates after each pass, by batch_size / horizon
        kl_horizon=float(m.horizon) * rollouts * world / (config.train.batch_size * m.ppo_epochs),
        score_scaling=score_scaling(config)[0],
        gamma=m.gamma,
        lam=m.lam,
        eps_clip=m.cliprange,
        value_clip=m.cliprange_value,
        value_coef=m.vf_coef,
        ratio_threshold=None,
        **learning(config),
    )


def _records(config: TRLConfig) -> dict[str, Any]:
    """The fields of `SupervisedConfig`. A logged phase is a part of an evaluation's interval."""
    interval = config.train.eval_interval
    return learning(config) | {
        'train_batch_size': config.train.batch_size * processes(),
        'log_interval': max(n for n in range(1, min(interval, 10) + 1) if interval % n == 0),
    }


def ilql_settings(config: TRLConfig) -> ILQLConfig:
    m = config.method
    return ILQLConfig(
        tau=m.tau,
        gamma=m.gamma,
        cql_scale=m.cql_scale,
        awac_scale=m.awac_scale,
        beta=m.beta,
        alpha=m.alpha,
        target_sync_interval=m.steps_for_target_q_sync,
        max_epochs=config.train.epochs,
        max_steps=config.train.total_steps,
        **_records(config),
    )


def sft_settings(config: TRLConfig) -> dict[str, Any]:
    """The fields of `SFTConfig`."""
    return _records(config) | {'max_epochs': config.train.epochs, 'max_steps': config.train.total_steps}


def rft_settings(config: TRLConfig) -> RFTConfig:
    m = config.method
    passes = min(m.n_improve_steps, config.train.epochs)
    return RFTConfig(
        num_rounds=-(-config.train.epochs // passes),
        max_epochs=passes,
        num_samples_per_prompt=m.n_generations_per_prompt,
        start_quantile=m.start_percentile,
        end_quantile=m.end_percentile if passes > 1 else m.start_percentile,
        **_records(config),
    )


# ---------------------------------------------------------------------- trackers


def tracker(config: TRLConfig) -> list[Any]:
    """The callbacks of `train.tracker`."""
    from chatgpt.trainer.callbacks import TRACKERS, MLflow, TensorBoard, Trackio, WandB

    t = config.train
    if t.tracker == 'tensorboard':
        return [TensorBoard(t.logging_dir)]
    if t.tracker is None:
        return []
    init = {'name': t.run_name, 'entity': t.entity_name, 'group': t.group_name, 'tags': t.tags or None}
    try:
        if t.tracker != 'wandb':
            if vain := [
                f'train.{name}' for name in ('run_name', 'entity_name', 'group_name', 'tags') if getattr(t, name)
            ]:
                warn(f'{", ".join(vain)} have no effect with tracker={t.tracker!r}')
            made: Any = TRACKERS.find(t.tracker)
            return [made(t.project_name) if made in (MLflow, Trackio) else made()]
        return [WandB(t.project_name, mode=_wandb_mode(), **{k: v for k, v in init.items() if v is not None})]
    except ImportError as error:
        warn(f'tracker {t.tracker!r}: {error}; metrics are in {t.checkpoint_dir}/metrics.jsonl')
        return []


def _wandb_mode() -> str | None:
    """None leaves it to WANDB_MODE; offline where nobody is logged in, since asking would stop the run."""
    if os.environ.get('debug'):
        return 'disabled'
    if os.environ.get('WANDB_MODE') or os.environ.get('WANDB_API_KEY'):
        return None
    import netrc

    try:
        logged_in = any('wandb' in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        logged_in = False
    if logged_in:
        return None
    warn("tracker 'wandb': nobody is logged in, so the run is written offline; `wandb login`, or tracker=None")
    return 'offline'


def takes(function: Any) -> set[str] | None:
    """Names of a function's arguments; None where any keyword goes, or nobody can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}


def all_arguments(made: type) -> set[str] | None:
    """Names of a class's arguments, with those of its bases to which `**kwargs` go; None where any keyword goes."""
    found: set[str] = set()
    for base in made.__mro__:
        if (init := vars(base).get('__init__')) is None:
            continue
        parameters = inspect.signature(init).parameters.values()
        found |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != 'self'}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return found
    return None
