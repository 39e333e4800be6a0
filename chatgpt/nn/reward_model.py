"""The reward model: one score per sequence, read at its last real token.

A normalising bias (the mean score of reference answers, which is subtracted) is stored with the weights. Left out: training it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.nn import lora
from chatgpt.nn.heads import in_fp32, reward_head
from chatgpt.nn.loading import write_folder
from chatgpt.nn.trunk import base_model, flat_hidden, hidden_size, looks_ahead, to_dtype_of
from chatgpt.types import Batch

BIAS_KEY = 'score_bias'


class RewardModel(nn.Module):
    """A transformers base model with a head that scores a sequence.

    Args:
        model: a base model; of a causal LM the trunk is taken.
        value_head: (..., D) → (..., 1); None makes a linear one, weights N(0, 1/(D + 1)).
        lora_rank, lora_train_bias: as for `Actor`; the head is always trained.
    """

    score_bias: Tensor
    model: Any  # transformers' PreTrainedModel, whose attributes nn.Module does not know

    def __init__(
        self, model: nn.Module, value_head: nn.Module | None = None, lora_rank: int = 0, lora_train_bias: str = 'none'
    ) -> None:
        super().__init__()
        self.model = base_model(model)
        self.value_head = value_head if value_head is not None else reward_head(hidden_size(self.model))
        self.register_buffer('score_bias', torch.zeros((), dtype=torch.float32))
        if lora_rank:
            lora.convert_to_lora(self.model, lora_rank, bias=lora_train_bias)  # type: ignore[arg-type]

    def forward(self, batch: Batch) -> Tensor:
        """Scores (B,) fp32: the head at the last real token of each sequence (an encoder's at its first), minus `score_bias`."""
        states = flat_hidden(self.model, batch)
        width = batch.input_ids.shape[1]
        where = torch.arange(batch.num_sequences, device=states.device) * width if looks_ahead(self.model) else batch.last_index
        return in_fp32(self.value_head, states[where]) - self.score_bias

    def calibrate(self, mean: float) -> None:
        """Make the mean score of reference answers 0: `mean` is theirs as scored now (arXiv 2403.17031)."""
        self.score_bias += mean

    @torch.no_grad()
    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, *, state_dict: dict[str, Tensor] | None = None) -> None:
        """A folder for `from_pretrained`, which `transformers.AutoModelForSequenceClassification` loads too.

        There a score is the one here plus `score_bias`, which stands in config.json. A bias of the head, which such models
        do not have, is folded into `score_bias`.

        Raises:
            ValueError: the head is not linear, or the architecture has no sequence-classification model.
        """
        from transformers import AutoModelForSequenceClassification

        if not isinstance(self.value_head, nn.Linear):
            raise ValueError('save_pretrained writes reward models with a linear head; use strategy.save_model for others')
        full = dict(state_dict) if state_dict is not None else dict(self.state_dict())
        trunk = {k.removeprefix('model.'): v for k, v in full.items() if k.startswith('model.')}
        if lora.has_lora(self.model):
            trunk = lora.merged_state_dict(self.model)
        weight, bias = full['value_head.weight'], full.get('value_head.bias')
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        config.num_labels = 1
        if config.pad_token_id is None:
            config.pad_token_id = _pad_token(tokenizer, config)
        shift = float(full[BIAS_KEY]) - (float(bias) if bias is not None else 0.0)
        try:
            with torch.device('meta'):
                classifier = AutoModelForSequenceClassification.from_config(config)
        except ValueError as error:
            raise ValueError(f'{config.model_type} has no sequence-classification model in transformers: {error}') from None
        prefix = f'{classifier.base_model_prefix}.'
        names = {prefix + k: v.contiguous() for k, v in trunk.items()} | {'score.weight': weight.contiguous()}
        missing = sorted(set(classifier.state_dict()) - set(names))
        if missing:
            raise ValueError(f'{type(classifier).__name__} has weights this reward model has not: {", ".join(missing[:3])}')
        write_folder(classifier, folder, names)
        path = Path(folder, 'config.json')
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {BIAS_KEY: shift}, indent=2, sort_keys=True) + '\n')
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, trust_remote_code: bool = False, **kwargs: Any) -> RewardModel:
        """A reward model from a folder of `save_pretrained`, or from any sequence-classification model.

        With one label its logit is the score; with two it is logit 1 minus logit 0.

        Raises:
            ValueError: the classifier has another number of labels, or its head is more than a linear layer on one position.
        """
        from chatgpt.nn.loading import load_classifier

        classifier = load_classifier(str(folder), trust_remote_code=trust_remote_code)
        head = getattr(classifier, 'score', None)
        if head is None and looks_ahead(base_model(classifier)):
            head = _encoder_head(classifier)
        if not isinstance(head, nn.Module):
            raise ValueError(f'{type(classifier).__name__} has no score head that a RewardModel could take over')
        if isinstance(head, nn.Linear):
            head = _single_output(head, str(folder))
        model = cls(base_model(classifier), head, **kwargs)
        model.score_bias.fill_(float(getattr(classifier.config, BIAS_KEY, 0.0)))
        return model


class _EncoderHead(nn.Module):
    """The classification head of an encoder: whatever it does to the first token's state, then one number."""

    def __init__(self, stages: nn.Sequential) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, hidden: Tensor) -> Tensor:
        # Poolers take (B, S, D) and read position 0.
        out = to_dtype_of(hidden, self)[:, None]
        for stage in self.stages:
            out = stage(out)
        return out if out.shape[-1] == 1 else out[..., 1:] - out[..., :1]


def _encoder_head(classifier: nn.Module) -> nn.Module:
    stages = [m for m in (getattr(classifier, 'pooler', None), getattr(classifier, 'classifier', None)) if m is not None]
    if not stages:
        raise ValueError(f'{type(classifier).__name__} has no classification head that a RewardModel could take over')
    return _EncoderHead(nn.Sequential(*stages))


def _single_output(head: nn.Linear, source: str) -> nn.Linear:
    """A head with one output: the logit, or the difference of two logits."""
    if head.out_features not in (1, 2):
        raise ValueError(f'{source} has {head.out_features} labels; a reward model has 1, or 2 whose logit difference is the score')
    single = nn.Linear(head.in_features, 1)
    weight = head.weight.detach().float()
    bias = head.bias.detach().float() if head.bias is not None else torch.zeros(head.out_features)
    with torch.no_grad():
        single.weight.copy_(weight if head.out_features == 1 else weight[1:] - weight[:1])
        single.bias.copy_(bias if head.out_features == 1 else bias[1:] - bias[:1])
    return single


def _pad_token(tokenizer: Any, config: Any) -> int:
    """The id by which transformers' classifiers find the last real token."""
    if getattr(tokenizer, 'pad_token_id', None) is not None:
        return int(tokenizer.pad_token_id)
    eos = config.eos_token_id
    return int(eos[0] if isinstance(eos, list) else eos) if eos is not None else 0
