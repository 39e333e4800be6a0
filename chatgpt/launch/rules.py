"""Tables (`chatgpt.rules`) of settings of a run that exclude each other, beside those of `strategies.rules` and
`trainer.rules`. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatgpt.nn.kinds import MODELS
from chatgpt.rules import Rule, changed, is_changed
from chatgpt.strategies.registry import STRATEGIES
from chatgpt.trainer.policy import POLICIES


def _only_16_bits(s: Any) -> bool:
    return STRATEGIES.find(s.strategy).only_16_bits


def same_file(a: str, b: str) -> bool:
    return Path(a).resolve() == Path(b).resolve()


RUN_RULES = [
    Rule(
        lambda s: s.optimizer == 'sgd' and s.lr is None and s.base,
        'optimizer=sgd has no default learning rate: give lr',
    ),
    Rule(
        lambda s: s.model != 'auto' and MODELS.find(s.model).actor is None and s.trained != 'reward_model',
        'model={s.model!r} is a family of reward models; it cannot write',
    ),
    Rule(
        lambda s: s.logprob_kernel != 'auto' and s.trained != 'actor',
        'logprob_kernel is about log-probs, and a {s.trained} has none; leave it out',
    ),
    Rule(
        lambda s: s.logprob_kernel not in ('auto', 'plain') and _only_16_bits(s),
        'strategy={s.strategy} shards the output layer, which logprob_kernel={s.logprob_kernel!r} reads whole; choose '
        "'plain' or 'auto'",
    ),
    Rule(
        lambda s: s.compile_blocks and s.reproducible is not None,
        "reproducible='exact' promises bits, which compiled graphs do not repeat under another layout: leave "
        'compile_blocks out',
    ),
    Rule(
        lambda s: s.compile_blocks and _only_16_bits(s),
        'strategy={s.strategy} acts on every use of a weight, which compiled graphs do not show: use naive, ddp or '
        'fsdp, or leave compile_blocks out',
    ),
    *changed(('atoms',), lambda s: s.reproducible is None, "{name}={value} is of reproducible='exact': give it too"),
    Rule(
        lambda s: s.hub_private and not s.push_to_hub,
        'hub_private is about a repository of the hub: give push_to_hub too',
    ),
    Rule(
        lambda s: s.validation_file and s.validation_percentage,
        'validation_file and validation_percentage are both given; give one',
    ),
    Rule(
        lambda s: 0 < s.validation_percentage < 1,
        lambda s: (
            f'validation_percentage={s.validation_percentage:g} may mean {100 * s.validation_percentage:g} % or '
            f'{s.validation_percentage:g} %: give {100 * s.validation_percentage:g} for the first; for the second keep '
            'records back yourself, with --validation_file'
        ),
    ),
    Rule(
        lambda s: s.data_source() and s.validation_file and same_file(s.data_source(), s.validation_file),
        'validation_file={s.validation_file} is the training data: give another, or --validation_percentage',
    ),
]
"""rules of every run"""

NO_DROPOUT = '{name}={value} does nothing in {s.method}, which learns without dropout: leave it out'

DATA_RULES = [
    Rule(lambda s: s.dataset and not s.pretrain, 'data of your own needs a model: give --pretrain NAME_OR_FOLDER'),
    Rule(lambda s: s.method == 'ilql' and s.lora_rank, 'lora_rank: ILQL trains all weights; leave it out'),
    *changed(('lora_dropout',), lambda s: s.method in ('dpo', 'orpo', 'simpo', 'kto'), NO_DROPOUT),
]
"""rules of runs that do not collect"""

ENVIRONMENT_SETTINGS = (
    *('environment_options', 'max_turns', 'max_turn_tokens', 'step_timeout_s', 'environment_workers'),
    *('num_environment_workers', 'reward_weights', 'eval_episodes'),
)


def own_policy(s: Any) -> str | None:
    """Returns the setting that selects a policy of `POLICIES`, which needs a copy of the actor; None if none does."""
    return next((name for name in POLICIES if getattr(s, name, None) is not None), None)


def _elsewhere(s: Any, *here: str) -> str:
    """Returns the setting that generates responses outside the training process or the engines `here`, else ''."""
    if s.engine not in here:
        return f'engine={s.engine!r}'
    return f'rollout_workers={s.rollout_workers}' if s.rollout_workers else ''


def _liger_temperature(s: Any) -> str | None:
    """Returns why liger refuses the temperature, or None. precision='auto' counts as fp32: the device decides later."""
    from chatgpt.nn.head_kernels import check_liger_temperature

    try:
        check_liger_temperature(s.temperature, s.precision in ('fp32', 'auto'))
    except ValueError as error:
        return str(error)
    return None


PPO_RUN_RULES = [
    Rule(
        lambda s: (
            s.optimizer == 'sgd' and s.base and s.critic_lr is None and s.critic == 'own' and s.estimator.needs_values
        ),
        'optimizer=sgd has no default learning rate: give critic_lr too',
    ),
    *changed(('lora_dropout',), lambda _: True, NO_DROPOUT),
    Rule(
        lambda s: s.num_layers_unfrozen == 0,
        'num_layers_unfrozen=0 leaves no block to train: give how many top blocks, or -1 for all',
    ),
    Rule(
        lambda s: s.environment and not s.prompt_path and s.validation_percentage,
        'validation_percentage splits prompts, and tasks of an environment are drawn: give eval_episodes',
    ),
    Rule(
        lambda s: s.overlong_buffer and s.max_new_tokens and s.overlong_buffer > s.max_new_tokens,
        'overlong_buffer={s.overlong_buffer} is a part of max_new_tokens={s.max_new_tokens}; it must not be larger',
    ),
    *changed(
        ('critic_epochs', 'critic_train_batch_size'),
        lambda s: s.critic == 'shared',
        "{name}={value} is of a critic with an optimizer of its own; with critic='shared' leave it out",
    ),
    Rule(
        lambda s: s.critic == 'own' and s.estimator.needs_values and is_changed(s, 'value_coef'),
        'value_coef={s.value_coef} weighs the value loss where actor and critic share a trunk, and this critic is of '
        "its own: leave it out, or give critic='shared'",
    ),
    Rule(
        lambda s: s.reproducible is not None and _elsewhere(s, 'auto', 'local'),
        lambda s: (
            "reproducible='exact' draws again what rounding could change, which only the local engine in the training "
            f'process can: {_elsewhere(s, "auto", "local")} does not fit it'
        ),
    ),
    Rule(
        lambda s: own_policy(s) and (s.lora_rank or s.num_layers_unfrozen > 0),
        lambda s: f'{own_policy(s)} copies the actor as a whole: leave lora_rank and num_layers_unfrozen out',
    ),
    Rule(
        lambda s: own_policy(s) and _elsewhere(s, 'auto', 'local'),
        lambda s: (
            f'{own_policy(s)} draws from two models at once, which only the local engine in the training process does: '
            'leave engine and rollout_workers out'
        ),
    ),
    Rule(
        lambda s: s.logprob_kernel == 'liger' and s.entropy_coef,
        "entropy_coef={s.entropy_coef:g}: logprob_kernel='liger' has no gradient of the entropy; choose 'fused'",
    ),
    Rule(lambda s: s.logprob_kernel == 'liger' and _liger_temperature(s), lambda s: str(_liger_temperature(s))),
    Rule(
        lambda s: s.shared_trunk and (s.rollout_workers or s.engine == 'vllm'),
        lambda s: (
            f'shared_trunk: {_elsewhere(s, "auto", "local", "hf")} generates with weights of its own, and the base is '
            'one, in this process; leave it out, or take engine local or hf'
        ),
    ),
    Rule(
        lambda s: s.temperature == 0,
        'temperature=0 draws nothing, and a policy learns from what it draws: give a number above 0',
    ),
    *changed(
        ENVIRONMENT_SETTINGS,
        lambda s: s.environment is None,
        '{name}={value!r} is about an environment, and there is none: give environment',
    ),
    Rule(
        lambda s: s.eval_episodes and (s.validation_file or s.validation_percentage),
        'eval_episodes are of tasks without prompts: with eval prompts leave it out',
    ),
    Rule(
        lambda s: ':' in (s.environment or '') and not s.environment.startswith('games:') and not s.pretrain,
        'an environment of your own needs a model: give --pretrain NAME_OR_FOLDER',
    ),
    *changed(
        ('prompt_column',), lambda s: not s.prompt_path, '{name}={value!r} is of a file of prompts: give prompt_path'
    ),
    Rule(lambda s: s.reward_model and s.reward_fn, 'give --reward_model or --reward_fn, not both'),
    Rule(
        lambda s: s.prompt_path and not (s.reward_model or s.reward_fn or s.environment),
        'nothing to learn from: give --reward_model FOLDER or --reward_fn module:function',
    ),
    Rule(
        lambda s: s.prompt_path and not s.pretrain, 'prompts of your own need a model: give --pretrain NAME_OR_FOLDER'
    ),
    Rule(
        lambda s: bool(s.ptx_coef) != bool(s.ptx_data),
        'PPO-ptx needs both: --ptx_data FILE with text, and --ptx_coef above 0',
    ),
    *changed(
        ('max_staleness', 'rollout_chunk_size', 'rollout_slice_tokens', 'rollout_resources'),
        lambda s: not s.rollout_workers,
        '{name}={value} is about rollout workers, and there are none: give --rollout_workers',
    ),
    Rule(
        lambda s: s.rollout_slice_tokens and not (s.max_staleness and s.rollout_chunk_size),
        'rollout_slice_tokens={s.rollout_slice_tokens} needs max_staleness of at least 1, and rollout_chunk_size: how '
        'many responses a worker generates at a time',
    ),
    Rule(
        lambda s: s.rollout_slice_tokens and s.environment,
        'rollout_slice_tokens={s.rollout_slice_tokens} cuts responses into parts, and an environment plays whole '
        'episodes: leave it out',
    ),
    Rule(
        lambda s: s.vllm_tensor_parallel > 1 and (s.engine != 'vllm' or s.rollout_workers),
        'vllm_tensor_parallel={s.vllm_tensor_parallel} is about engine vllm in the training processes: give it, and no '
        'rollout_workers, whose rollout_resources say how many GPUs each has',
    ),
    Rule(
        lambda s: s.vllm_tensor_parallel > 1 and s.environment,
        'vllm_tensor_parallel: ranks generate together, and episodes take a different number of turns on each: leave '
        'it out, or use rollout_workers',
    ),
    Rule(
        lambda s: s.vllm_tensor_parallel > 1 and (s.tensor_parallel > 1 or s.sequence_parallel > 1),
        'vllm_tensor_parallel: the processes of a rank generate its prompts apart; leave tensor_parallel and '
        'sequence_parallel out, or use rollout_workers',
    ),
    Rule(
        lambda s: s.rollout_workers and s.engine not in ('auto', 'local', 'vllm'),
        'rollout workers generate with the local engine or vLLM: --engine {s.engine} does not fit --rollout_workers',
    ),
]
"""rules of a PPO run"""

ENCODER_DECODER_RULES = [
    Rule(lambda s: s.on_trunk, 'shares no trunk: leave shared_trunk and quantize out'),
    Rule(
        lambda s: getattr(s, 'pack_examples', False),
        'has examples with a prompt each, and pack_examples joins texts: leave it out',
    ),
    *(
        Rule(lambda s, name=name: getattr(s, name, None), f'{why}: leave {name} out')  # type: ignore[misc]
        for name, why in {
            'rollout_workers': 'generates in the training process',
            'reproducible': 'generates without the local engine, which alone draws exactly',
        }.items()
    ),
    Rule(
        own_policy,
        lambda s: f'generates without the local engine, which alone draws from two models: leave {own_policy(s)} out',
    ),
    Rule(
        lambda s: getattr(s, 'engine', 'auto') in ('local', 'vllm'),
        'generates with model.generate alone: give engine hf, or leave it out',
    ),
]
"""rules of a run that trains an encoder-decoder (T5, BART)"""
