"""The run to plan: models, strategy, sizes, and the available memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from chatgpt.functional.choices import LogprobKernel
from chatgpt.rules import check
from chatgpt.strategies.memory import Layout, MemoryModel
from chatgpt.strategies.registry import STRATEGIES, StrategyEntry
from chatgpt.strategies.rules import MODEL_RULES, PRECISION_RULES

Task = Literal['ppo', 'sft', 'reward_model', 'critic']
PROCESS_BYTES = 460 << 20
"""resident memory of a process that has trained a tiny model: Python, torch, transformers, oneDNN's compiled kernels,
and memory that malloc retains (`benchmarks/process_memory.py`)"""
_UNITS = {'': 2**30, 'B': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12}
_UNITS |= {'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30, 'TIB': 2**40}


def parse_bytes(text: str | int | float) -> int:
    """Parses '24GiB' (2^30), '24GB' (10^9) or '512B'; a bare number is GiB. Raises ValueError for anything else."""
    match = re.fullmatch(r'\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*', str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f'{text!r} is not an amount of memory; write it like 24GiB or 80GB; a bare number is GiB')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def show_bytes(size: float) -> str:
    """Formats bytes with three digits: 1.50 GiB, 512 MiB, 0."""
    for unit, name in ((2**30, 'GiB'), (2**20, 'MiB'), (2**10, 'KiB')):
        if abs(size) >= unit:
            value = size / unit
            return f'{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}'
    return f'{size:.0f} B' if size else '0'


@dataclass(frozen=True, kw_only=True)
class Setup(Layout):
    """A run to plan. Batch sizes are global, as in `PPOConfig`; lengths are in tokens.

    With task 'sft', 'reward_model' or 'critic' one model learns and nothing is collected; the fields of PPO's other
    models and of collecting have no effect.

    `config`, `critic_config` and `reward_config` are transformers configs, config.json files, folders or hub names.
    """

    config: Any
    """config.json of the policy, its folder, or a hub name"""
    precision: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto'
    """dtype of the computation; auto: bf16 on a GPU, fp32 on a CPU, as in a run"""
    task: Task = 'ppo'
    """what is trained"""
    reward_config: Any = None
    """config of the reward model; none: a reward function, which takes no memory"""
    strategy: str = field(default='naive', metadata={'choices': STRATEGIES})
    """strategy of the run: a name of `STRATEGIES`, or module:Class"""
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    """options of the strategy that differ from those of its name"""
    memory: int | None = None
    """memory of one device in bytes, or as a flag such as 24GiB; none: the plan does not say whether the run fits"""
    host_memory: int | None = None
    """memory of one machine, in the same units; none: not checked"""
    critic: Literal['own', 'shared', 'none'] = 'own'
    """own: a separate model; shared: a head on the actor's trunk; none: no critic"""
    critic_config: Any = None
    """config of a separate critic; none: that of the policy"""
    critic_support: Mapping[str, float] = field(default_factory=dict)
    """bins of the critic's head (`CategoricalHead.support`); {}: one output"""
    critic_apart: bool = False
    """True if a separate critic learns in passes of its own, after the actor's"""
    critic_train_batch_size: int | None = None
    """sequences of one optimizer step of such a critic; none: train_batch_size"""
    lora_rank: int = 0
    """rank of the LoRA adapters; 0: all weights are trained"""
    lora_target_modules: list[str] | None = None
    """expressions for the names of the adapted layers; none: all linear ones"""
    shared_trunk: bool = False
    """actor, critic, reward model and reference are adapters on one frozen base (`SharedTrunk`)"""
    quantize: Literal['none', 'nf4'] = 'none'
    """nf4: the weights of that base are stored in 4 bits"""
    num_layers_unfrozen: int = -1
    """number of top blocks that a hydra trains; -1: all"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    logprob_kernel: LogprobKernel = 'auto'
    """how log-probs are computed, as `Actor.logprob_kernel`; liger is planned as fused"""
    kl: bool = True
    """True if there is a reference"""
    own_reference: bool | None = None
    """True if the reference is a separate copy; None: unless LoRA or hydra keep it in the actor"""
    experience_batch_size: int = 8
    """prompts of one timestep"""
    num_samples_per_prompt: int = 1
    """responses to each prompt"""
    update_timesteps: int = 10
    """timesteps collected before each learning phase"""
    num_phases: int = 2
    """phases of collecting and learning; 1: collects and scores before any optimizer state exists"""
    train_batch_size: int = 8
    """sequences of one optimizer step"""
    sequences_per_record: int = 0
    """largest number of answers to a prompt in the data of a reward model, whose train batches count prompts; 0: two, a
    pair. Others have one"""
    max_tokens_per_batch: int | None = None
    """maximum number of tokens, padding included, of one forward on one rank; none: 16,384 for a
    reward model, no limit for others"""
    max_prompt_tokens: int = 64
    """tokens of the longest prompt"""
    shared_prompt_tokens: int = 0
    """number of tokens with which all prompts begin, such as those of a system prompt"""
    max_new_tokens: int = 64
    """maximum number of tokens of a response"""
    keep: bool = False
    """count what the local engine keeps for the next phase (`LocalEngine(keep=...)`); it does so only on a GPU that has
    memory left, so it is no part of what a run needs"""
    max_rows: int = 256
    """most sequences decoded at once"""
    rollouts_elsewhere: bool = False
    """responses are generated by workers (`--rollout_workers`), which receive whole weights"""
    offload: Literal['none', 'idle'] = 'none'
    """idle: the reward and initial models are on the device only while they score"""
    process: int = PROCESS_BYTES
    """resident bytes of a process beside its tensors, counted where devices are host memory; 0: they are not"""
    margin: float = 0.05
    """share of the device's memory kept free for its context and fragmentation"""

    @classmethod
    def of(cls, settings: Any, **others: Any) -> Setup:
        """Returns a setup from settings with the names of these fields, such as a run of the command; `others` override
        them."""
        names = [f.name for f in fields(cls) if f.name not in others and hasattr(settings, f.name)]
        return cls(**{name: getattr(settings, name) for name in names}, **others)

    def __post_init__(self) -> None:
        for config in (self.config, self.critic_config, self.reward_config):
            check_planned(config)
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f'{name}={getattr(self, name)!r} is not one of {", ".join(get_args(hint))}')
        for f in fields(self):
            value = getattr(self, f.name)
            zero = dict.fromkeys(('lora_rank', 'process', 'sequences_per_record', 'shared_prompt_tokens'), 0)
            least = (zero | {'num_layers_unfrozen': -1}).get(f.name, 1)
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f'{f.name}={value} must be at least {least}')
        if self.memory is not None and not self.on_cuda:
            raise ValueError('memory is of a GPU, and without one devices are host memory: give host_memory')
        if not 0 <= self.margin < 1:
            raise ValueError(f'margin={self.margin} must lie in [0, 1)')
        if self.entry.one_process and self.num_processes > 1:
            others = [name for name, entry in STRATEGIES.items() if not entry.one_process]
            raise ValueError(
                f'strategy={self.strategy!r} is one process, not {self.num_processes}; use one of {", ".join(others)}'
            )
        check(self, MODEL_RULES)
        from chatgpt.strategies.ranks import check_world_size

        check_world_size(self.num_processes, self.sequence_parallel, 'sequence_parallel')
        if self.tensor_parallel > 1:
            check_world_size(self.num_processes, self.tensor_parallel)
            if not self.memory_model.can_be_cut or self.stream_blocks:
                raise ValueError(
                    f'tensor_parallel={self.tensor_parallel} does not go with cpu_offload, reproducible or '
                    'stream_blocks: leave one out'
                )
        import torch

        from chatgpt.strategies.precision import resolve_precision

        device = torch.device('cuda' if self.on_cuda else 'cpu')
        resolved = resolve_precision(self.precision, device, only_16_bits=self.entry.only_16_bits, planned=True)
        object.__setattr__(self, 'precision', resolved)
        check(self, PRECISION_RULES)
        for name in ('experience_batch_size', 'train_batch_size') if self.task == 'ppo' else ():
            if getattr(self, name) % self.ranks:
                raise ValueError(f'{name}={getattr(self, name)} cannot be split over {self.ranks} ranks')

    @property
    def record_size(self) -> int:
        """The largest number of sequences that a record of a train batch has."""
        return (self.sequences_per_record or 2) if self.task == 'reward_model' else 1

    @property
    def tensor_parallel(self) -> int:
        """The number of processes that share a model and its data: one rank."""
        return int(self.strategy_options.get('tensor_parallel', 1))

    @property
    def sequence_parallel(self) -> int:
        """The number of processes that share each sequence: one rank."""
        return int(self.strategy_options.get('sequence_parallel', 1))

    @property
    def ranks(self) -> int:
        """The number of ranks that batches are split over."""
        return self.num_processes // self.tensor_parallel // self.sequence_parallel

    @property
    def entry(self) -> StrategyEntry:
        return STRATEGIES.find(self.strategy)

    @cached_property
    def memory_model(self) -> MemoryModel:
        """The strategy's memory model."""
        return self.entry.memory_model(**self.strategy_options)

    @property
    def has_initial_model(self) -> bool:
        """True if the reference is a separate copy."""
        in_actor = self.lora_rank > 0 or self.num_layers_unfrozen > 0
        return self.kl and (not in_actor if self.own_reference is None else self.own_reference)


def check_planned(config: Any) -> None:
    """Raises ValueError for an encoder-decoder."""
    from chatgpt.nn.layouts import check_causal

    check_causal(config, 'a plan tells the memory of')


def read_config(source: Any) -> Any:
    """Returns a transformers config: `source` itself, or read from a config.json, a folder, or a hub name. Raises
    ValueError for a file that is not a model config.
    """
    if not isinstance(source, (str, Path)):
        return source
    import json

    from transformers import AutoConfig

    from chatgpt.nn.loading import load_config, make_config_dense

    path = Path(source)
    if path.suffix == '.json' and not path.exists():
        raise ValueError(f'{path}: there is no such file')
    if not path.is_file():
        found = load_config(str(source))
        check_planned(found)
        return found
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or 'model_type' not in content:
            raise ValueError('it has no model_type')
        found = AutoConfig.from_pretrained(str(path))
    except Exception as error:  # transformers validates configs by exceptions of its own
        raise ValueError(f'{path}: not the config.json of a transformers model ({error})') from None
    make_config_dense(found, str(path))
    check_planned(found)
    return found
