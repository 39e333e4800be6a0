"""`SFTConfig` and `SFTTrainer` of TRL 0.12 to 1.12, on this library's `SFTTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import chatgpt.trainer as ours
from chatgpt.data import load_demonstrations, pack
from chatgpt.nn import Actor, is_encoder_decoder
from chatgpt.types import Sequence
from chatgpt_compat.peft import adapted
from chatgpt_compat.records import all_but_first
from chatgpt_compat.trl.arguments import refused, warned
from chatgpt_compat.trl.offline import UNSUPPORTED, OfflineArguments, OfflineLaterTrainer, is_real
from chatgpt_compat.trl.training import causal_lm, max_length_of

OF_SFT = {
    'packing_strategy': warned('records are packed in the order given'),
    'eval_packing': warned('what is evaluated is packed as what is trained'),
    'truncation_mode': warned('the prompt loses its beginning, then the response its end'),
    'chat_template_path': refused("set the tokenizer's chat_template"),
    'use_liger': warned('a matter of memory or speed, without influence on numbers'),
    'router_aux_loss_coef': warned('the loss is that of the tokens alone'),
}


@dataclass(kw_only=True)
class SFTConfig(OfflineArguments):
    """Arguments of `SFTTrainer`, described in docs/coming_from/trl/offline_arguments.md."""

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
    completion_mask or assistant_masks). `formatting_func` maps a row to a text, or, before 0.16, columns to texts."""

    CONFIG = SFTConfig
    OURS = (ours.SFTTrainer, ours.SFTConfig)
    UNSUPPORTED = UNSUPPORTED | OF_SFT
    NAMES: ClassVar = {'loss': 'loss'}

    def __init__(self, *positional: Any, formatting_func: Callable[..., Any] | None = None, **keywords: Any) -> None:
        self.formatting_func = formatting_func
        super().__init__(*positional, **keywords)

    def make_models(self, model: Any, peft_config: Any) -> tuple[Any, dict[str, Any]]:
        self.model = adapted(causal_lm(model, self.args, 'model_init_kwargs'), peft_config)
        return Actor(self.model), {}

    def check_arguments(self, args: Any) -> None:
        if args.max_seq_length is not None:
            args.max_length = args.max_seq_length
        if args.loss_type not in (None, 'nll'):
            raise ValueError(f"SFTConfig: loss_type={args.loss_type!r} is not served here; use 'nll'")
        known = {'skip_prepare_dataset', 'add_special_tokens', 'append_concat_token'}
        if unknown := sorted(set(args.dataset_kwargs or ()) - known):
            raise ValueError(f'SFTConfig: dataset_kwargs has {", ".join(unknown)}, which cannot be honoured here')

    def records(self, dataset: Any) -> list[Sequence]:
        limit = max_length_of(self.args, 'max_length', self.model)
        streams = self.args.packing and self.before_0_12
        found = sequences_of(
            dataset,
            self.processing_class,
            self.args,
            None if streams else limit,
            self.formatting_func,
            apart=is_encoder_decoder(self.model),
            ends=self.args.packing or not self.before_0_12,
        )
        if self.args.packing:
            if limit is None:
                raise ValueError('SFTConfig: packing=True needs max_length')
            return stream_of(found, limit) if streams else pack(found, limit)
        return found


def stream_of(records: Iterable[Sequence], length: int) -> list[Sequence]:
    """Returns the joined records in pieces of `length` tokens, which all count; a rest is left out, as before 0.12.
    Raises ValueError for fewer tokens."""
    ids = torch.cat([part for record in records for part in (record.prompt_ids, record.response_ids)])
    if len(ids) < length:
        raise ValueError(f'SFTConfig: packing=True, and all texts have {len(ids)} tokens, fewer than {length}')
    return [_counted(piece) for piece in ids.split(length) if len(piece) == length]


def sequences_of(
    dataset: Any,
    tokenizer: Any,
    args: Any,
    limit: int | None,
    formatting_func: Callable[..., Any] | None = None,
    *,
    apart: bool = False,
    ends: bool = True,
) -> list[Sequence]:
    """Returns records of rows; the kind of row and `args` decide which tokens count. `apart`: for an encoder-decoder.
    `ends`: the end token follows a text, as from 0.16 on and between packed texts. Raises ValueError."""
    rows = dataset if hasattr(dataset, '__len__') and not isinstance(dataset, (str, bytes)) else None
    if rows is None or not len(rows):
        raise ValueError('SFTTrainer: the dataset must be a list of rows or a datasets.Dataset that is not empty')
    if formatting_func is not None:
        rows = [{'text': text} for row in rows for text in _formatted(formatting_func, row)]
    if apart:
        if args.completion_only_loss is False or args.packing:
            raise ValueError(
                'SFTConfig: completion_only_loss=False and packing cannot be honoured for an encoder-decoder, which '
                'reads a prompt and learns to write its completion; leave them out'
            )
        return list(load_demonstrations(rows, tokenizer, max_length=limit)[0])
    unread = ('system', 'system_prompt')  # by TRL
    rows = [{name: value for name, value in row.items() if name not in unread} for row in rows]
    first: Mapping[str, Any] = rows[0]
    if 'input_ids' in first:
        return [_of_ids(row, limit) for row in rows]
    if 'messages' in first and not args.assistant_only_loss and getattr(tokenizer, 'chat_template', None):
        return [_whole_dialogue(row['messages'], tokenizer, limit) for row in rows]
    if {'prompt', 'completion'} <= set(first):
        found = load_demonstrations(rows, tokenizer, max_length=limit)[0]
        if args.completion_only_loss is False:
            return [_counted(torch.cat([s.prompt_ids, s.response_ids])) for s in found]
        return list(found)
    column = args.dataset_text_field if args.dataset_text_field in first else 'text'
    if column in first:
        return [_of_text(row[column], tokenizer, limit, ends) for row in rows]
    return list(load_demonstrations(rows, tokenizer, max_length=limit)[0])


def _formatted(formatting_func: Callable[..., Any], row: Mapping[str, Any]) -> Iterable[str]:
    """Returns the texts of a row; a function that does not map a row to a text is called with columns."""
    error: Exception | None = None
    try:
        given = formatting_func(row)
    except Exception as raised:  # such as for a text instead of a list of texts
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


def _of_ids(row: Mapping[str, Any], limit: int | None) -> Sequence:
    """Returns the record of a tokenized row without its padding. Without a mask every token counts."""
    real = is_real(row)
    ids = torch.as_tensor(row['input_ids'])[real][:limit]
    mask = torch.ones(len(ids), dtype=torch.bool)
    if row.get('labels') is not None:
        mask = torch.as_tensor(row['labels'])[real][:limit] != -100
    for name in ('completion_mask', 'assistant_masks'):
        if row.get(name) is not None:
            mask &= torch.as_tensor(row[name])[real][:limit].bool()
    return _counted(ids, mask)


def _of_text(text: str, tokenizer: Any, limit: int | None, ends: bool) -> Sequence:
    """Returns a record in which every token of a text counts, and with `ends` the end token after them."""
    ids, end = list(tokenizer(text)['input_ids']), tokenizer.eos_token_id
    if ends and end is not None and ids[-1:] != [end]:
        ids.append(end)
    return _counted(torch.tensor(ids[:limit]))


def _whole_dialogue(messages: Any, tokenizer: Any, limit: int | None) -> Sequence:
    """Returns a record in which every token of a rendered dialogue counts, as in TRL without assistant_only_loss."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return _counted(torch.tensor(ids[:limit]))


def _counted(ids: torch.Tensor, mask: torch.Tensor | None = None) -> Sequence:
    """Returns a record in which tokens with a mask of True count, without a mask all; the first never counts."""
    if len(ids) < 2:
        raise ValueError(f'SFTTrainer: a row of {len(ids)} tokens has nothing to learn; leave it out')
    return all_but_first(ids, mask)
