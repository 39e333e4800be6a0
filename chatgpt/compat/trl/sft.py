"""`SFTConfig` and `SFTTrainer` as TRL 0.12 to 1.12 have them, over our `SFTTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from chatgpt.compat.trl.arguments import Entry, converted, label, ours, refused, warned
from chatgpt.compat.trl.offline import ARGUMENTS, OfflineArguments, OfflineLaterTrainer
from chatgpt.compat.trl.peft import adapted
from chatgpt.compat.trl.training import causal_lm, max_length_of
from chatgpt.dataset import load_demonstrations, pack
from chatgpt.dataset.formats import is_for_encoder_decoder, note_model
from chatgpt.nn import Actor
from chatgpt.trainer.config import SFTConfig as OurConfig
from chatgpt.trainer.objectives import sft
from chatgpt.types import Sequence

FIELDS: dict[str, Entry] = ARGUMENTS | {
    'max_length': ours('max_length of load_demonstrations; no more than the context'),
    'max_seq_length': converted('the older name of max_length'),
    'packing': converted('records are put into blocks of max_length, as `chatgpt.dataset.pack` does'),
    'packing_strategy': warned('records are packed in the order given, and never see each other'),
    'eval_packing': warned('what is evaluated is packed as what is trained'),
    'dataset_text_field': converted('the column that is read as text'),
    'completion_only_loss': converted('of prompt and completion: None and True count the completion alone'),
    'assistant_only_loss': converted('of messages: True counts the turns of the assistant alone, False every token'),
    'loss_type': converted("'nll' and None are the loss here; another is an error"),
    'truncation_mode': warned('the prompt loses its beginning, then the response its end'),
    'shuffle_dataset': label('the order is a new one in every epoch'),
    'dataset_kwargs': converted('skip_prepare_dataset and add_special_tokens have no effect; others are an error'),
    'dataset_batch_size': label('records are tokenized in this process'),
    'num_of_sequences': label('of a way of packing that is gone'),
    'chars_per_token': label('of a way of packing that is gone'),
    'padding_free': label('forwards leave padding out anyway'),
    'eos_token': converted('the end token of the tokenizer is set to it'),
    'chat_template_path': refused("set the tokenizer's chat_template"),
    'use_liger': warned('a matter of memory or speed, without influence on numbers'),
    'router_aux_loss_coef': warned('the loss is that of the tokens alone'),
}
"""argument: what becomes of it"""


@dataclass(kw_only=True)
class SFTConfig(OfflineArguments):
    """Arguments of `SFTTrainer`. `FIELDS` says what each one does here."""

    learning_rate: float = 2e-5
    max_seq_length: int | None = None
    packing: bool = False
    packing_strategy: str | None = None
    eval_packing: bool | None = None
    dataset_text_field: str = 'text'
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str | None = None
    truncation_mode: str | None = None
    shuffle_dataset: bool = False
    dataset_kwargs: dict | str | None = None
    dataset_batch_size: int = 1000
    num_of_sequences: int = 1024
    chars_per_token: float = 3.6
    padding_free: bool = False
    eos_token: str | None = None
    chat_template_path: str | None = None
    use_liger: bool = False
    router_aux_loss_coef: float = 0.0


class SFTTrainer(OfflineLaterTrainer):
    """Supervised fine-tuning. Data: rows with text, messages, prompt and completion, or input_ids (and labels,
    completion_mask or assistant_masks).

    Args:
        model: a transformers causal LM, trained in place; a PEFT model; or a name or folder.
        formatting_func: row → text; or, as before 0.16, columns → list of texts.
        data_collator: cannot be honoured. Completions alone count where rows have a prompt and a completion.
        **older: arguments of `SFTConfig` that the trainer itself took before 0.13, such as max_seq_length.

    Raises:
        ValueError: what cannot be honoured, by name.
    """

    NAMES: ClassVar = {'loss': 'loss'}
    CONFIG = SFTConfig
    FIELDS = FIELDS

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: SequenceOf[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
        *,
        tokenizer: Any = None,
        model_init: Any = None,
        infinite: Any = None,
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
                'compute_loss_func': compute_loss_func,
                'compute_metrics': compute_metrics,
                'preprocess_logits_for_metrics': preprocess_logits_for_metrics,
                'optimizer_cls_and_kwargs': optimizer_cls_and_kwargs,
                'quantization_config': quantization_config,
                'model_init': model_init,
                'infinite': infinite,
            },
            reasons={
                'data_collator': 'records are batched here; rows of prompt and completion count the completion alone, '
                'assistant_only_loss=True the answers of messages'
            },
        )
        args = self.args
        model = causal_lm(model, args, 'model_init_kwargs')
        note_model(self.processing_class, model.config)
        self.model = adapted(model, peft_config)
        self.formatting_func = formatting_func
        records = self.records(train_dataset)
        self.start(sft.SFTTrainer, OurConfig, Actor(self.model), optimizers, records, eval_dataset, {})

    def check_arguments(self, args: Any) -> None:
        if args.max_seq_length is not None:
            args.max_length = args.max_seq_length
        if args.loss_type not in (None, 'nll'):
            raise ValueError(f"SFTConfig: loss_type={args.loss_type!r} is not served here; use 'nll'")
        known = {'skip_prepare_dataset', 'add_special_tokens', 'append_concat_token'}
        if unknown := set(args.dataset_kwargs or ()) - known:
            raise ValueError(
                f'SFTConfig: dataset_kwargs has {", ".join(sorted(unknown))}, which cannot be honoured here'
            )

    def records(self, dataset: Any) -> list[Sequence]:
        limit = max_length_of(self.args, 'max_length', self.model)
        found = sequences_of(dataset, self.processing_class, self.args, limit, self.formatting_func)
        if self.args.packing:
            if limit is None:
                raise ValueError('SFTConfig: packing=True needs max_length')
            return pack(found, limit)
        return found


def sequences_of(
    dataset: Any, tokenizer: Any, args: Any, limit: int | None, formatting_func: Callable[..., Any] | None = None
) -> list[Sequence]:
    """Records of rows; which tokens count is decided by the kind of row and `args`. Raises ValueError."""
    rows = dataset if hasattr(dataset, '__len__') and not isinstance(dataset, (str, bytes)) else None
    if rows is None or not len(rows):
        raise ValueError('SFTTrainer: the dataset must be a list of rows or a datasets.Dataset that is not empty')
    if formatting_func is not None:
        rows = [{'text': text} for row in rows for text in _formatted(formatting_func, row)]
    if is_for_encoder_decoder(tokenizer):
        if args.completion_only_loss is False or args.packing:
            raise ValueError(
                'SFTConfig: completion_only_loss=False and packing cannot be honoured for an encoder-decoder, which '
                'reads a prompt and learns to write its completion; leave them out'
            )
        return list(load_demonstrations(rows, tokenizer, max_length=limit)[0])
    first: Mapping[str, Any] = rows[0]
    if 'input_ids' in first:
        return [_of_ids(row, limit) for row in rows]
    if 'messages' in first and not args.assistant_only_loss and getattr(tokenizer, 'chat_template', None):
        return [_whole_dialogue(row['messages'], tokenizer, limit) for row in rows]
    if {'prompt', 'completion'} <= set(first):
        found = load_demonstrations(rows, tokenizer, max_length=limit)[0]
        return [every_token(s) for s in found] if args.completion_only_loss is False else list(found)
    column = args.dataset_text_field if args.dataset_text_field in first else 'text'
    if column in first:
        return [_of_text(row[column], tokenizer, limit) for row in rows]
    found = load_demonstrations(rows, tokenizer, max_length=limit)[0]
    return list(found)


def _formatted(formatting_func: Callable[..., Any], row: Mapping[str, Any]) -> Iterable[str]:
    """A function of one row gives a text; one that does not is of the older kind, takes columns and gives a list."""
    error: Exception | None = None
    try:
        given = formatting_func(row)
    except Exception as raised:  # such as for a text where it would go over a list of them
        given, error = None, raised
    if isinstance(given, str):
        return [given]
    try:
        texts = formatting_func({name: [value] for name, value in row.items()})
    except Exception as raised:
        raise error or raised from None
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'formatting_func gave a {type(texts).__name__}; it must give a text, or a list of texts')
    return texts


def every_token(sequence: Sequence) -> Sequence:
    """The same tokens, all of them learned but the first."""
    ids = torch.cat([sequence.prompt_ids, sequence.response_ids])
    return _counted(ids, torch.ones(len(ids), dtype=torch.bool))


def _of_ids(row: Mapping[str, Any], limit: int | None) -> Sequence:
    """A row that the script tokenized. Without a mask every token counts."""
    ids = torch.as_tensor(row['input_ids'])[:limit]
    mask = torch.ones(len(ids), dtype=torch.bool)
    if row.get('labels') is not None:
        mask = torch.as_tensor(row['labels'])[:limit] != -100
    for name in ('completion_mask', 'assistant_masks'):
        if row.get(name) is not None:
            mask &= torch.as_tensor(row[name])[:limit].bool()
    return _counted(ids, mask)


def _of_text(text: str, tokenizer: Any, limit: int | None) -> Sequence:
    """Every token of a text, and the end token."""
    ids, end = list(tokenizer(text)['input_ids']), tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids.append(end)
    return _counted(torch.tensor(ids[:limit]), torch.ones(len(ids[:limit]), dtype=torch.bool))


def _whole_dialogue(messages: Any, tokenizer: Any, limit: int | None) -> Sequence:
    """Every token of a rendered dialogue, as TRL counts them without assistant_only_loss."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return _counted(torch.tensor(ids[:limit]), torch.ones(len(ids[:limit]), dtype=torch.bool))


def _counted(ids: torch.Tensor, mask: torch.Tensor) -> Sequence:
    if len(ids) < 2:
        raise ValueError(f'SFTTrainer: a row of {len(ids)} tokens has nothing to learn; leave it out')
    return Sequence(prompt_ids=ids[:1], response_ids=ids[1:], response_mask=mask[1:].clone())
