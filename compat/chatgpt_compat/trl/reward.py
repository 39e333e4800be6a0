"""`RewardConfig` and `RewardTrainer` as TRL 0.12 to 1.12 have them, over our `RewardModelTrainer`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from chatgpt.data import load_preferences, note_model
from chatgpt.nn import AutoRM, RewardModel
from chatgpt.trainer import RewardModelConfig as OurConfig
from chatgpt.trainer import RewardModelTrainer as OurTrainer
from chatgpt_compat.peft import HEADS, adapted
from chatgpt_compat.trl.arguments import refused
from chatgpt_compat.trl.offline import FATES, OfflineArguments, OfflineLaterTrainer
from chatgpt_compat.trl.training import loading_options, max_length_of, trainable, warn_of_options


@dataclass(kw_only=True)
class RewardConfig(OfflineArguments):
    """Arguments of `RewardTrainer`; docs/coming_from/trl.md says what each does."""

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
    FATES = FATES | {'chat_template_path': refused("set the tokenizer's chat_template")}

    def __init__(
        self,
        model: Any = None,
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
            OurTrainer,
            OurConfig,
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
