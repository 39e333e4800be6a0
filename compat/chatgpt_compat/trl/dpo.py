"""`DPOConfig` and `DPOTrainer` as TRL 0.12 to 1.12 have them, over our `DPOTrainer`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from chatgpt.data import load_preferences, note_model
from chatgpt.nn import Actor, has_lora
from chatgpt.trainer import DPOConfig as OurConfig
from chatgpt.trainer import DPOTrainer as OurTrainer
from chatgpt_compat.peft import adapted
from chatgpt_compat.trl.arguments import each, refused, warned
from chatgpt_compat.trl.offline import FATES, OfflineArguments, OfflineLaterTrainer
from chatgpt_compat.trl.training import causal_lm, max_length_of, warn_of_options

LOSSES = ('sigmoid', 'hinge', 'robust')
"""values of loss_type"""
OWN_FATES = {
    **each(
        warned('a record is cut to max_length as a whole: the prompt loses its beginning, then the answer its end'),
        'max_prompt_length max_completion_length max_target_length truncation_mode',
    ),
    **each(
        refused('a model has one adapter here; its reference is the model without it'),
        'model_adapter_name ref_adapter_name',
    ),
    **each(
        refused(f'the losses of this trainer are {", ".join(LOSSES)} alone (docs/algorithms/dpo.md)'),
        'use_weighting loss_weights ld_alpha f_divergence_type',
    ),
    'generate_during_eval': warned('evaluation measures the loss; chatgpt.trainer.PromptEvaluation shows texts'),
    'reference_free': refused('use chatgpt.trainer.SimPOTrainer or ORPOTrainer, which have no reference'),
    'sync_ref_model': refused('the reference stays what it is'),
    'rpo_alpha': refused('there is no SFT term here; chatgpt.trainer.ORPOTrainer has one'),
    'router_aux_loss_coef': warned('the loss is that of the answers alone'),
    'tools': refused('chat templates get no tools here: render them into the prompts'),
}


@dataclass(kw_only=True)
class DPOConfig(OfflineArguments):
    """Arguments of `DPOTrainer`; docs/coming_from/trl.md says what each does."""

    learning_rate: float = 1e-6
    beta: float = 0.1
    loss_type: str | list[str] = field(default_factory=lambda: ['sigmoid'])  # a flag takes one or more
    label_smoothing: float = 0.0
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    max_target_length: int | None = None
    truncation_mode: str | None = None
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    ref_model_init_kwargs: dict | str | None = None
    disable_dropout: bool = True
    padding_free: bool = False
    label_pad_token_id: int = -100
    padding_value: int | None = None
    is_encoder_decoder: bool | None = None
    generate_during_eval: bool = False
    force_use_ref_model: bool = False
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None
    reference_free: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.9
    ref_model_sync_steps: int = 64
    use_weighting: bool = False
    loss_weights: list[float] | None = None
    ld_alpha: float | None = None
    f_divergence_type: str = 'reverse_kl'
    f_alpha_divergence_coef: float = 1.0
    discopop_tau: float = 0.05
    rpo_alpha: float | None = None
    router_aux_loss_coef: float = 0.0
    tools: str | None = None


def _loss(args: Any) -> dict[str, Any]:
    """`loss_type` and `label_smoothing` of our config."""
    names = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    if len(names) != 1:
        raise ValueError(f'DPOConfig: loss_type={args.loss_type!r}; a sum of losses is not served here: give one')
    (name,) = names
    if name == 'ipo':
        raise ValueError(
            "DPOConfig: loss_type='ipo' is the mean over tokens in TRL and the paper's sum here; use "
            "chatgpt.trainer.DPOTrainer(loss_type='ipo') for the latter"
        )
    if name not in LOSSES:
        raise ValueError(f'DPOConfig: loss_type={name!r} is not served here; use one of {", ".join(LOSSES)}')
    if not args.label_smoothing:
        return {'loss_type': name} | ({'label_smoothing': 0.0} if name == 'robust' else {})
    return {'loss_type': 'cdpo' if name == 'sigmoid' else name, 'label_smoothing': args.label_smoothing}


class DPOTrainer(OfflineLaterTrainer):
    """Direct preference optimisation. Data: rows with prompt, chosen, rejected, as text or turns; or whole dialogues.

    Args:
        model: a transformers causal LM, trained in place; a PEFT model; or a name or folder.
        ref_model: the frozen reference; None is a copy, or with adapters the model without them.
        processing_class: the tokenizer; None is the model's own.
        optimizers: (an optimizer over the model's parameters, None).
        **older: arguments of `DPOConfig` that the trainer itself took before 0.12, such as beta.

    Raises:
        ValueError: what cannot be honoured, by name.
    """

    NAMES: ClassVar = {
        'loss': 'loss',
        'rewards/chosen': 'reward_chosen',
        'rewards/rejected': 'reward_rejected',
        'rewards/accuracies': 'accuracy',
        'logps/chosen': 'logp_chosen',
        'logps/rejected': 'logp_rejected',
    }
    CONFIG = DPOConfig
    FATES = FATES | OWN_FATES

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: SequenceOf[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tokenizer: Any = None,
        **older: Any,
    ) -> None:
        if ref_model is model and model is not None and not isinstance(model, (str, Path)):
            raise ValueError('DPOTrainer: ref_model is the model itself; give a copy of it, or None')
        super().__init__(
            args,
            callbacks,
            model=model,
            train_dataset=train_dataset,
            processing_class=processing_class,
            tokenizer=tokenizer,
            older=older | {'data_collator': data_collator},
        )
        args = self.args
        model = causal_lm(model, args, 'model_init_kwargs')
        note_model(self.processing_class, model.config)
        model = adapted(model, peft_config)
        if ref_model is not None:
            ref_model = causal_lm(ref_model, args, 'ref_model_init_kwargs')
        else:
            warn_of_options(args, 'ref_model_init_kwargs')
            ref_model = None if has_lora(model) else deepcopy(model)
        self.model, self.ref_model = model, ref_model
        self.start(
            OurTrainer,
            OurConfig,
            Actor(model),
            optimizers,
            self.records(train_dataset),
            eval_dataset,
            {'beta': args.beta, **_loss(args)},
            initial_model=None if ref_model is None else Actor(ref_model),
        )

    def check_arguments(self, args: Any) -> None:
        if not args.disable_dropout:
            raise ValueError('DPOConfig: disable_dropout=False cannot be honoured here: two models are compared')
        _loss(args)

    def records(self, dataset: Any) -> list[Any]:
        limit = max_length_of(self.args, 'max_length', self.model)
        return load_preferences(dataset, self.processing_class, max_length=limit)[0]

    def _theirs(self, ours: Any, prefix: str = '') -> dict[str, float]:
        found = super()._theirs(ours, prefix)
        return found | {'rewards/margins': found['rewards/chosen'] - found['rewards/rejected']}
