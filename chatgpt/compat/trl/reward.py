"""`RewardConfig` and `RewardTrainer` as TRL 0.12 to 1.12 have them, over our `RewardModelTrainer`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from chatgpt.compat.trl import later
from chatgpt.compat.trl.arguments import Entry, TrainingArguments, converted, label, ours, refused, warned
from chatgpt.compat.trl.peft import HEADS, adapted
from chatgpt.compat.trl.training import (
    OfflineLaterTrainer,
    loading_options,
    max_length_of,
    refuse,
    resolved,
    strategy_of,
    tokenizer_of,
    trainable,
    warn_of_options,
    with_older,
)
from chatgpt.dataset import load_preferences
from chatgpt.nn import AutoRM, RewardModel
from chatgpt.trainer.objectives import reward_model

FIELDS: dict[str, Entry] = later.ARGUMENTS | {
    'max_length': ours('max_length of load_preferences; no more than the context'),
    'center_rewards_coefficient': ours('center_rewards_coefficient'),
    'disable_dropout': converted('dropout layers are set to 0, as in TRL'),
    'model_init_kwargs': converted(
        'options of loading a named model; dtype and device_map warn, quantization_config is an error'
    ),
    'trust_remote_code': converted('an option of loading'),
    'dataset_num_proc': label('records are tokenized in this process'),
    'pad_to_multiple_of': label('forwards leave padding out anyway'),
    'pad_token': label('records carry a mask'),
    'eos_token': converted('the end token of the tokenizer is set to it'),
    'chat_template_path': refused("set the tokenizer's chat_template"),
    'activation_offloading': warned('a matter of memory, without influence on numbers'),
}
"""argument: what becomes of it"""


@dataclass(kw_only=True)
class RewardConfig(TrainingArguments):
    """Arguments of `RewardTrainer`. `FIELDS` says what each one does here."""

    output_dir: str | None = field(default=None, kw_only=False)
    learning_rate: float = 1e-4
    max_length: int | None = 1024
    center_rewards_coefficient: float | None = None
    disable_dropout: bool = True
    model_init_kwargs: dict | str | None = None
    dataset_num_proc: int | None = None
    pad_to_multiple_of: int | None = None
    pad_token: str | None = None
    eos_token: str | None = None
    chat_template_path: str | None = None
    activation_offloading: bool = False
    trust_remote_code: InitVar[bool] = False  # no flag of a command line, where it is ModelConfig's

    def __post_init__(self, trust_remote_code: bool) -> None:  # type: ignore[override]
        super().__post_init__()
        self.trust_remote_code = trust_remote_code  # type: ignore[attr-defined]


class RewardTrainer(OfflineLaterTrainer):
    """A reward model from pairs. Data: rows with chosen and rejected, with or without prompt, as text or turns; a
    column margin is subtracted from the difference.

    Args:
        model: a sequence classifier of transformers with one label, trained in place; or a name or folder of one.

    Raises:
        ValueError: what cannot be honoured, by name.
    """

    NAMES: ClassVar = {'loss': 'loss', 'accuracy': 'accuracy', 'margin': 'margin', 'mean_reward': 'score_mean'}
    saves_adapters = False

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: SequenceOf[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
        model_init: Any = None,
        **older: Any,
    ) -> None:
        refuse(
            'RewardTrainer',
            {
                'data_collator': (data_collator, 'give rows of text; records are batched here'),
                'compute_metrics': (compute_metrics, 'evaluation measures loss, accuracy and margin'),
                'preprocess_logits_for_metrics': (preprocess_logits_for_metrics, 'see compute_metrics'),
                'optimizer_cls_and_kwargs': (optimizer_cls_and_kwargs, 'give optimizers=(optimizer, None)'),
                'quantization_config': (quantization_config, 'models are trained in whole weights'),
                'model_init': (model_init, 'give the model'),
            },
        )
        if model is None or train_dataset is None:
            raise ValueError(f'RewardTrainer: {"model" if model is None else "train_dataset"} is needed')
        args = with_older('RewardTrainer', args, RewardConfig, older)
        args = resolved(args, RewardConfig, 'trainer_output', FIELDS)
        words = tokenizer_of(processing_class, tokenizer, model)
        if args.eos_token is not None:
            words.eos_token = args.eos_token
        super().__init__(args, words, callbacks, strategy_of(args))
        if isinstance(model, (str, Path)):
            scorer: RewardModel = AutoRM(pretrained=model, **loading_options(args, 'model_init_kwargs'))
        else:
            warn_of_options(args, 'model_init_kwargs')
            model = adapted(model, None, heads=HEADS)  # of a PEFT model its adapters
            scorer = RewardModel.from_classifier(model)
        adapted(trainable(scorer.model, args), peft_config, heads=HEADS)
        if args.disable_dropout:
            for module in scorer.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        self.model = model if not isinstance(model, (str, Path)) else scorer.model
        self.train_dataset = train_dataset
        records = self.records(train_dataset)
        self.start(
            reward_model.RewardModelTrainer,
            reward_model.RewardModelConfig,
            scorer,
            optimizers,
            records,
            eval_dataset,
            {
                'center_rewards_coefficient': args.center_rewards_coefficient or 0.0,
                'use_margins': _has_margins(train_dataset),
                'calibrate': False,
            },
        )

    def records(self, dataset: Any) -> list[Any]:
        limit = max_length_of(self.args, 'max_length', self.model)
        return load_preferences(dataset, self.processing_class, max_length=limit)[0]


def _has_margins(dataset: Any) -> bool:
    columns = getattr(dataset, 'column_names', None) or (dataset[0] if isinstance(dataset, (list, tuple)) else ())
    return 'margin' in columns
