"""What is found before training: records that a model cannot read, and a loss that its config asks for and nobody adds.

Left out: tokenizers (`chatgpt.dataset.tokenize.check_tokenizer`), prompts of rollouts (the engines check them).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import nn

from chatgpt.nn.trunk import position_limit, positions_of, text_config
from chatgpt.types import Sequence


def check_records(what: str, records: Iterable[SequenceOf[Sequence]], model: nn.Module) -> None:
    """Whether an actor, critic or reward model can read these sequences, (P,) and (A,) int64 ids each, by record.

    Raises:
        ValueError: an id outside of the vocabulary, or a sequence longer than the model's positions; it names the
            record.
    """
    config = getattr(getattr(model, 'model', None), 'config', None)
    if config is None:
        return
    size: int | None = getattr(text_config(config), 'vocab_size', None)
    limit = position_limit(config)
    apart = getattr(config, 'is_encoder_decoder', False)  # which numbers prompt and response each from 0
    for i, sequences in enumerate(records):
        for s in sequences:
            for ids in (s.prompt_ids, s.response_ids):
                if size is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                    outside = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
                    raise ValueError(
                        f"{what}[{i}] has the token id {outside}, outside of the model's vocabulary of {size} tokens; "
                        'make it with the tokenizer of this model'
                    )
            # before the response stands the start token
            length = max(len(s.prompt_ids), len(s.response_ids) + 1) if apart else s.num_tokens
            if limit is not None and length > limit:
                most, counted = (limit - 1, ' on one side, the start token included') if apart else (limit, '')
                raise ValueError(
                    f'{what}[{i}] has {length} tokens{counted}, more than {positions_of(config)}; cut it '
                    f'(max_length={most} where text is loaded) or leave it out'
                )


def check_router_loss(config: Any) -> None:
    """Raises ValueError where a model that learns asks for the auxiliary loss which balances experts (Fedus et al.
    2021, "Switch Transformers"): no trainer adds it."""
    text = None if config is None else text_config(config)
    if getattr(text, 'output_router_logits', False):
        raise ValueError(
            f'the config of this {config.model_type} has output_router_logits=True, but the auxiliary loss that '
            f'balances experts (router_aux_loss_coef={getattr(text, "router_aux_loss_coef", None)}) is not added here; '
            'set output_router_logits to false in its config.json to train without it'
        )
