"""`PPOTrainer` of both of TRL's eras: which of the two a call means, by the names and positions of its arguments."""

from __future__ import annotations

from typing import Any

_CLASSIC = {'dataset', 'optimizer', 'num_shared_layers', 'lr_scheduler', 'training_data_collator'}
_SECOND = {
    *('args', 'processing_class', 'policy', 'ref_policy', 'reward_model', 'value_model', 'train_dataset'),
    *('eval_dataset', 'callbacks', 'optimizers', 'peft_config'),
}


class _PPOTrainer:
    """TRL's `PPOTrainer`: the classic one, or that of 0.12 to 1.12, as the call says.

    Classic is (config, model, ref_model, tokenizer, dataset, optimizer, data_collator, num_shared_layers,
    lr_scheduler), the second (args, processing_class, model, ref_model, reward_model, train_dataset, value_model, ...).
    A class that has it as a base has the classic one.

    Raises:
        ValueError: a call that fits neither.
    """

    __name__ = 'PPOTrainer'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (_second() if is_second(args, kwargs) else _classic())(*args, **kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_classic(),)

    def __instancecheck__(self, trainer: Any) -> bool:
        return isinstance(trainer, (_classic(), _second()))


PPOTrainer = _PPOTrainer()


def is_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call means the second era's trainer.

    Raises:
        ValueError: arguments of both, or of neither.
    """
    classic, second = sorted(_CLASSIC & kwargs.keys()), sorted(_SECOND & kwargs.keys())
    if len(args) > 1:  # the model, or the tokenizer
        if hasattr(args[1], 'parameters') or hasattr(args[1], 'pretrained_model'):
            classic.append('a model in the second place')
        elif hasattr(args[1], 'decode'):
            second.append('a tokenizer in the second place')
    if classic and second:
        raise ValueError(
            f'PPOTrainer: {classic[0]} is an argument of 0.4 to 0.11, {second[0]} of 0.12 to 1.12; give the arguments '
            'of one of them'
        )
    if not classic and not second and not {'model', 'tokenizer'} & kwargs.keys():
        raise ValueError(
            'PPOTrainer: give (config, model, ref_model, tokenizer, ...) as up to 0.11, or (args, processing_class, '
            'model, ref_model, reward_model, train_dataset, value_model, ...) as from 0.12 on'
        )
    return bool(second)


def _classic() -> Any:
    from chatgpt_compat.trl.ppo_step import ClassicPPOTrainer

    return ClassicPPOTrainer


def _second() -> Any:
    from importlib import import_module

    return import_module('chatgpt_compat.trl.ppo_train').PPOTrainer
