"""`DPOConfig`, `DPOTrainer`, `RewardConfig` and `RewardTrainer` of TRL 0.12 to 1.12, which learn from pairs of
responses, on this library's trainers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import chatgpt.trainer as ours
from chatgpt.data import TokenizedPreference, load_preferences
from chatgpt.nn import Actor, AutoRM, RewardModel, has_lora, is_encoder_decoder
from chatgpt_compat.peft import HEADS, adapted, with_methods
from chatgpt_compat.trl.arguments import each, refused, warned
from chatgpt_compat.trl.offline import UNSUPPORTED, OfflineArguments, OfflineLaterTrainer, is_real
from chatgpt_compat.trl.training import causal_lm, loading_options, max_length_of, trainable, warn_of_options

LOSSES = ('sigmoid', 'hinge', 'robust')
"""supported values of loss_type"""
OF_DPO = {
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
    """Arguments of `DPOTrainer`, described in docs/coming_from/trl/offline_arguments.md."""

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


def loss_of(args: Any) -> dict[str, Any]:
    """Returns `loss_type` and `label_smoothing` of our config."""
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


def merged(model: Any) -> Any:
    """Returns a model with adapters with these merged; any other model unchanged."""
    return model.merge_and_unload() if hasattr(model, 'merge_and_unload') else model


class DPOTrainer(OfflineLaterTrainer):
    """Direct preference optimisation. Data: rows with prompt, chosen, rejected, as text or turns; or whole dialogues.

    Arguments are (model, ref_model, args, ...), see `OfflineLaterTrainer`. `ref_model` is the frozen reference; None
    takes a copy of the model, or with adapters the model without them. A PEFT model is merged if it is
    `ref_model` or `peft_config` is given.
    """

    CONFIG = DPOConfig
    OURS = (ours.DPOTrainer, ours.DPOConfig)
    UNSUPPORTED = UNSUPPORTED | OF_DPO
    NAMES: ClassVar = {
        'loss': 'loss',
        'rewards/chosen': 'reward_chosen',
        'rewards/rejected': 'reward_rejected',
        'rewards/accuracies': 'accuracy',
        'logps/chosen': 'logp_chosen',
        'logps/rejected': 'logp_rejected',
    }

    def __init__(self, model: Any = None, ref_model: Any = None, *positional: Any, **keywords: Any) -> None:
        if ref_model is model and model is not None and not isinstance(model, (str, Path)):
            raise ValueError('DPOTrainer: ref_model is the model itself; give a copy of it, or None')
        self.ref_model = ref_model
        super().__init__(model, *positional, **keywords)

    def check_arguments(self, args: Any) -> None:
        if not args.disable_dropout:
            raise ValueError('DPOConfig: disable_dropout=False cannot be honoured here: two models are compared')
        loss_of(args)

    def make_models(self, model: Any, peft_config: Any) -> tuple[Any, dict[str, Any]]:
        model = causal_lm(model, self.args, 'model_init_kwargs')
        self.model = adapted(model if peft_config is None else merged(model), peft_config)
        if self.ref_model is not None:
            self.ref_model = merged(causal_lm(self.ref_model, self.args, 'ref_model_init_kwargs'))
        else:
            warn_of_options(self.args, 'ref_model_init_kwargs')
            self.ref_model = None if has_lora(self.model) else deepcopy(self.model)
        return Actor(self.model), {} if self.ref_model is None else {'initial_model': Actor(self.ref_model)}

    def records(self, dataset: Any) -> list[Any]:
        """Returns preferences; before 0.12 a prompt begins with the tokenizer's begin token."""
        begin, limit = self.processing_class.bos_token_id, max_length_of(self.args, 'max_length', self.model)
        if not self.before_0_12 or begin is None or is_encoder_decoder(self.model):
            return super().records(dataset)
        found = load_preferences(dataset, self.processing_class, max_length=limit and limit - 1)[0]
        first = torch.tensor([begin])
        return [
            pair if pair.prompt_ids[0] == begin else replace(pair, prompt_ids=torch.cat([first, pair.prompt_ids]))
            for pair in found
        ]

    def settings(self) -> dict[str, Any]:
        return {'beta': self.args.beta, **loss_of(self.args)}

    def _trl_metrics(self, metrics: Any, prefix: str = '') -> dict[str, float]:
        found = super()._trl_metrics(metrics, prefix)
        return found | {'rewards/margins': found['rewards/chosen'] - found['rewards/rejected']}


def pair_of(chosen: Tensor, rejected: Tensor, scores: tuple[float, float] | None = None) -> TokenizedPreference:
    """Returns the preference of two tokenized texts, (S,) each, which begin with the same token. Raises ValueError."""
    if min(len(chosen), len(rejected)) < 2 or chosen[0] != rejected[0]:
        raise ValueError(
            'RewardTrainer: input_ids_chosen and input_ids_rejected must begin with the same token and have two or more'
        )
    responses = [chosen[1:], rejected[1:]]
    masks = [torch.ones(len(ids), dtype=torch.bool) for ids in responses]
    return TokenizedPreference(prompt_ids=chosen[:1], responses=responses, response_masks=masks, scores=scores)


@dataclass(kw_only=True)
class RewardConfig(OfflineArguments):
    """Arguments of `RewardTrainer`, described in docs/coming_from/trl/offline_arguments.md."""

    learning_rate: float = 1e-4
    center_rewards_coefficient: float | None = None
    disable_dropout: bool = True
    eos_token: str | None = None
    chat_template_path: str | None = None


class RewardTrainer(OfflineLaterTrainer):
    """Training of a reward model, a sequence classifier with one label, by `RewardModelTrainer`. Data: rows with chosen
    and rejected, with or without prompt, as text or turns; a column margin is subtracted from the difference."""

    CONFIG = RewardConfig
    OURS = (ours.RewardModelTrainer, ours.RewardModelConfig)
    UNSUPPORTED = UNSUPPORTED | {'chat_template_path': refused("set the tokenizer's chat_template")}
    NAMES: ClassVar = {'loss': 'loss', 'accuracy': 'accuracy', 'margin': 'margin', 'mean_reward': 'score_mean'}
    saves_adapters = False

    def make_models(self, model: Any, peft_config: Any) -> tuple[Any, dict[str, Any]]:
        args = self.args
        if isinstance(model, (str, Path)):
            scorer: RewardModel = AutoRM(pretrained=model, **loading_options(args, 'model_init_kwargs'))
            model = scorer.model
        else:
            warn_of_options(args, 'model_init_kwargs')
            model = adapted(model, None, heads=HEADS)  # a PEFT model keeps its adapters
            scorer = RewardModel.from_classifier(model)
        adapted(trainable(scorer.model, args), peft_config, heads=HEADS)
        if args.disable_dropout:
            for module in scorer.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        self.model = with_methods(model, model) if has_lora(model) else model
        return scorer, {}

    def records(self, dataset: Any) -> list[Any]:
        """Returns preferences; of rows that a script has tokenized, as those before 0.16 do, with its tokens, without
        padding."""
        if not {'input_ids_chosen', 'input_ids_rejected'} <= set(dataset[0]):
            return super().records(dataset)
        found = []
        for row in dataset:
            chosen, rejected = (
                torch.as_tensor(row[f'input_ids_{side}'])[is_real(row, f'_{side}')] for side in ('chosen', 'rejected')
            )
            scores = (float(row['margin']), 0.0) if 'margin' in row else None
            found.append(pair_of(chosen, rejected, scores))
        return found

    def settings(self) -> dict[str, Any]:
        rows = self.train_dataset
        columns = getattr(rows, 'column_names', None) or (rows[0] if isinstance(rows, (list, tuple)) else ())
        return {
            'center_rewards_coefficient': self.args.center_rewards_coefficient or 0.0,
            'use_margins': 'margin' in columns,
            'calibrate': False,
        }
