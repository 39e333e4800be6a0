"""`RewardConfig` and `RewardTrainer` as TRL 0.12 to 1.12 have them, over our `RewardModelTrainer`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from chatgpt.compat.trl.arguments import Entry, converted, ours, refused
from chatgpt.compat.trl.offline import ARGUMENTS, OfflineArguments, OfflineLaterTrainer
from chatgpt.compat.trl.peft import HEADS, adapted
from chatgpt.compat.trl.training import loading_options, max_length_of, trainable, warn_of_options
from chatgpt.dataset import load_preferences
from chatgpt.dataset.formats import note_model
from chatgpt.nn import AutoRM, RewardModel
from chatgpt.trainer.objectives import reward_model

FIELDS: dict[str, Entry] = ARGUMENTS | {
    'max_length': ours('max_length of load_preferences; no more than the context'),
    'center_rewards_coefficient': ours('center_rewards_coefficient'),
    'disable_dropout': converted('dropout layers are set to 0, as in TRL'),
    'eos_token': converted('the end token of the tokenizer is set to it'),
    'chat_template_path': refused("set the tokenizer's chat_template"),
}
"""argument: what becomes of it"""


@dataclass(kw_only=True)
class RewardConfig(OfflineArguments):
    """Arguments of `RewardTrainer`. `FIELDS` says what each one does here."""

    learning_rate: float = 1e-4
    center_rewards_coefficient: float | None = None
    disable_dropout: bool = True
    eos_token: str | None = None
    chat_template_path: str | None = None


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
    CONFIG = RewardConfig
    FIELDS = FIELDS

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
        super().__init__(
            args,
            callbacks,
            model=model,
            train_dataset=train_dataset,
            processing_class=processing_class,
            tokenizer=tokenizer,
            older=older,
            unserved={
                'data_collator': data_collator,
                'compute_metrics': compute_metrics,
                'preprocess_logits_for_metrics': preprocess_logits_for_metrics,
                'optimizer_cls_and_kwargs': optimizer_cls_and_kwargs,
                'quantization_config': quantization_config,
                'model_init': model_init,
            },
        )
        args = self.args
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
        note_model(self.processing_class, scorer.model.config)
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
