"""What a run of examples/train_preference.py is made of, and the trainer of its method. Left out: reading data and building models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from chatgpt.dataset.examples import Labelled, Preference
from chatgpt.dataset.reading import BadRecords, read_records
from chatgpt.launch.runs import DataRun
from chatgpt.trainer.objectives.kto import KTOConfig, KTOTrainer
from chatgpt.trainer.objectives.pairs import (
    DPOConfig,
    DPOLoss,
    DPOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PreferenceConfig,
    ReferenceConfig,
    SimPOConfig,
    SimPOTrainer,
)
from chatgpt.trainer.objectives.reward_model import is_success
from chatgpt.trainer.offline import OfflineTrainer

Method = Literal['dpo', 'kto', 'orpo', 'simpo']
METHODS: dict[str, tuple[type[OfflineTrainer], type[PreferenceConfig]]] = {
    'dpo': (DPOTrainer, DPOConfig), 'kto': (KTOTrainer, KTOConfig), 'orpo': (ORPOTrainer, ORPOConfig), 'simpo': (SimPOTrainer, SimPOConfig),
}  # fmt: skip
OPTIONS = {
    'loss': 'loss_type', 'beta': 'beta', 'label_smoothing': 'label_smoothing', 'precompute_ref_logprobs': 'precompute_ref_logprobs',
    'desirable_weight': 'desirable_weight', 'undesirable_weight': 'undesirable_weight', 'positive_label': 'positive_label',
    'weight': 'weight', 'gamma': 'gamma',
}  # fmt: skip
"""settings that only some methods have, and what their configs call them"""


LR = {'dpo': 1e-6, 'simpo': 1e-6, 'kto': 5e-6, 'orpo': 5e-6}


@dataclass(kw_only=True)
class PreferenceRun(DataRun):
    """A run of examples/train_preference.py: preferences (prompt, chosen, rejected, or ranked answers); for KTO also text and label.

    A setting of some methods only is None until it is given: then the method's own default holds.
    """

    save_path: str = 'outputs/train_preference'
    method: Method = 'dpo'
    """dpo, kto, orpo or simpo"""
    max_epochs: int = 1
    loss: DPOLoss | None = None
    """dpo: sigmoid, ipo, cdpo, robust or hinge; none: sigmoid"""
    beta: float | None = None
    """dpo, kto: how strongly the policy is held to the reference, none: 0.1; simpo: of the mean log-prob, none: 2"""
    label_smoothing: float | None = None
    """dpo with cdpo or robust: share of labels assumed to be flipped; none: 0.1"""
    precompute_ref_logprobs: bool | None = None
    """dpo, kto: the reference's log-probs once, before the first step; none: true"""
    desirable_weight: float | None = None
    """kto: weight of good answers; none: 1"""
    undesirable_weight: float | None = None
    """kto: weight of bad answers; none: 1"""
    positive_label: str | None = None
    """kto: which label is a success; none: true, 1, good, positive are"""
    weight: float | None = None
    """orpo: of the odds-ratio term; none: 0.1"""
    gamma: float | None = None
    """simpo: target margin; none: 1"""

    embedded_defaults: ClassVar[Mapping[str, Any]] = {'lr': 1e-4}

    @property
    def own_defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {'lr': LR.get(self.method, LR['dpo'])}

    @classmethod
    def shown_default(cls, name: str, default: Any) -> str:
        if name == 'lr':
            return f'{", ".join(f"{lr} for {method}" for method, lr in LR.items())}; {cls.embedded_defaults["lr"]} without --pretrain'
        return 'none' if default is None else str(default)

    @property
    def trainer_class(self) -> type[OfflineTrainer]:
        return METHODS[self.method][0]

    @property
    def needs_initial_model(self) -> bool:
        """Whether a frozen copy of the start is kept: under LoRA the actor with its adapter off is the reference."""
        return issubclass(METHODS[self.method][1], ReferenceConfig) and not self.lora_rank

    def validate(self, world_size: int = 1) -> None:
        self._one_of('method', get_args(Method))
        own = METHODS[self.method][1].field_names()
        for name, field in OPTIONS.items():
            if getattr(self, name) is not None and field not in own:
                who = ' or '.join(m for m, (_, config) in METHODS.items() if field in config.field_names())
                raise ValueError(f'{name}={getattr(self, name)} is a setting of {who}, not of {self.method}; leave it out')
        super().validate(world_size)
        self.method_config().validate(world_size)

    def method_config(self) -> PreferenceConfig:
        """The settings of this run's trainer."""
        cls = METHODS[self.method][1]
        shared = {f.name for f in fields(PreferenceConfig)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        for name, field in OPTIONS.items():
            if getattr(self, name) is not None:
                values[field] = getattr(self, name)
        return cls(**values)


def check_judged(source: Any, example: Any) -> None:
    """Raises ValueError for a record that KTO cannot learn from, which is neither a judged answer nor a preference."""
    if not isinstance(example, (Labelled, Preference)):
        raise ValueError(_what_kto_needs(source, 'no label'))


def check_judgements(source: Any, labels: Iterable[Any], positive_label: str | None) -> None:
    """Raises ValueError for a label that is no judgement: rewards, or names of classes without `positive_label`."""
    for label in labels:
        try:
            is_success(label, positive_label)
        except ValueError:
            raise ValueError(_what_kto_needs(source, f'{label!r} where a judgement is needed')) from None


def _what_kto_needs(source: Any, fault: str) -> str:
    columns = ', '.join(next(read_records(source, BadRecords(skip=True))).data)
    return (
        f'{source}: KTO needs the columns prompt, response and label (or text and label), where label is true or false, 1 or 0, good or '
        f'bad, or a name with --positive_label NAME; or prompt, chosen and rejected. Found the columns {columns}, and {fault}'
    )
