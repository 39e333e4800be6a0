"""The reward model: one score per sequence, computed at its last real token. A normalising bias (the mean score of
reference responses, which is subtracted) is stored with the weights."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from chatgpt.nn import lora
from chatgpt.nn.computed import ComputedTensors
from chatgpt.nn.heads import SeededLinear, in_fp32, load_head, reward_head, save_head, set_state
from chatgpt.nn.layouts import layout_of
from chatgpt.nn.loading import (
    Role,
    add_lora,
    hub_options,
    load_base_model,
    load_config,
    load_model,
    part_of,
    trunk_of,
    write_folder,
)
from chatgpt.nn.packing import check_batch_independence, enable_packing, flat_hidden
from chatgpt.nn.peft_format import adapter_base
from chatgpt.nn.tensor_files import HEAD_FILE, stored_file
from chatgpt.nn.trunk import base_model, hidden_size, looks_ahead, use_fused_gelu
from chatgpt.nn.weights import WeightsSource, read_source_tensor
from chatgpt.types import Batch

BIAS_KEY = 'score_bias'


class RewardModel(Role):
    """A transformers base model with a head that scores a sequence.

    Args:
        model: a base model, or a causal LM, whose base model is used. Or a whole sequence-classification model, without
            `value_head`: its own logit is the score (with two labels, logit 1 minus logit 0). `from_pretrained` passes
            one for encoders with a pooler.
        value_head: (..., D) → (..., 1); None makes a linear one, weights N(0, 1/(D + 1)), unless `model` is a whole
            classifier.
        lora_rank, lora_train_bias, lora_options: as for `Actor`; the head is always trained.
    """

    by_name = 'AutoRM(pretrained=NAME_OR_FOLDER)'
    score_bias: Tensor

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None = None,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        lora_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        whole = value_head is None and _is_classifier(model)
        if whole:
            layout_of(model).auto_class('AutoModelForSequenceClassification', model.config, type(model).__name__)
        self.model = model if whole else trunk_of(model)
        use_fused_gelu(self.model)
        if whole:
            _check_labels(self.model.config.num_labels, type(model).__name__)
            self.value_head = None
        else:
            enable_packing(self.model)
            check_batch_independence(self.model)
            self.value_head = value_head if value_head is not None else reward_head(hidden_size(self.model))
        self.register_buffer('score_bias', torch.zeros((), dtype=torch.float32))
        set_state(self, {BIAS_KEY: torch.zeros((), device='cpu')})
        add_lora(self.model, lora_rank, lora_train_bias, lora_options)
        if whole and lora_rank:
            base = {id(p) for p in base_model(self.model).parameters()}
            for parameter in self.model.parameters():
                if id(parameter) not in base:
                    parameter.requires_grad_(True)

    def forward(self, batch: Batch) -> Tensor:
        """Returns scores (B,) fp32: the head's output at the last real token of each sequence (of an encoder the
        first), minus `score_bias`."""
        if self.value_head is None:
            return self._classifier_scores(batch) - self.score_bias
        states = flat_hidden(self.model, batch)
        width = batch.input_ids.shape[1]
        where = (
            torch.arange(batch.num_sequences, device=states.device) * width
            if looks_ahead(self.model)
            else batch.last_index
        )
        return in_fp32(self.value_head, states[where]) - self.score_bias

    def _classifier_scores(self, batch: Batch) -> Tensor:
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None and batch.num_sequences > 1:
            name = type(self.model).__name__
            raise ValueError(
                f'{name} has no pad_token_id, so it can score one sequence at a time; set config.pad_token_id'
            )
        ids = batch.input_ids.masked_fill(~batch.attention_mask, 0 if pad is None else pad)
        logits = self.model(input_ids=ids, attention_mask=batch.attention_mask.long()).logits.float()
        return logits[:, 0] if logits.shape[-1] == 1 else logits[:, 1] - logits[:, 0]

    @torch.no_grad()
    def calibrate(self, mean: float) -> None:
        """Shifts scores so that reference responses, with mean score `mean` until now, have mean 0 (arXiv 2403.17031).
        Adds `mean` to `score_bias`."""
        self.score_bias += mean

    # ------------------------------------------------------------------ files

    def _write(self, folder: str | Path, weights: Any, state: dict[str, Tensor], tokenizer: Any, dtype: Any) -> None:
        """Writes a folder that `transformers.AutoModelForSequenceClassification` loads too, for a linear head on a
        causal architecture that has such a class (GPT-2, OPT, BLOOM, Llama and others).

        There a score is the one here plus `score_bias` of config.json, which includes the bias of the head. That class
        finds the last token by the padding id of `tokenizer` or the config; without one there is a warning. For other
        models the folder holds the base model and a file of the head.
        """
        trunk = weights or part_of(state, 'model')
        head = part_of(state, 'value_head')
        shift = float(state[BIAS_KEY])
        classifier = self._empty_classifier(tokenizer)
        if classifier is not None:
            bias = head.get('bias')
            shift -= 0.0 if bias is None else float(bias)
            prefix, computed = f'{classifier.base_model_prefix}.', getattr(trunk, 'computed', {})
            kept = {prefix + k: trunk[k].contiguous() for k in trunk if k not in computed}
            kept['score.weight'] = head['weight'].contiguous()
            tensors = ComputedTensors(kept, {prefix + k: make for k, make in computed.items()})
            classifier.weights_source = getattr(self.model, 'weights_source', None)
            write_folder(classifier, folder, tensors, dtype=dtype)
        else:
            write_folder(self.model, folder, trunk, dtype=dtype)
            if head:
                save_head(self.value_head, head, folder)
        path = Path(folder, 'config.json')
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {BIAS_KEY: shift}, indent=2, sort_keys=True) + '\n')

    def _empty_classifier(self, tokenizer: Any) -> Any:
        """Returns a sequence-classification model on the meta device that fits this reward model's tensors, or None."""
        head = self.value_head
        if not isinstance(head, nn.Linear) or head.out_features != 1 or looks_ahead(self.model):
            return None
        if type(self.model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            return None
        config = copy.deepcopy(self.model.config)
        config.num_labels = 1
        _set_pad_token(config, tokenizer)
        with torch.device('meta'):
            classifier = AutoModelForSequenceClassification.from_config(config)
        own = {f'{classifier.base_model_prefix}.{name}' for name in _state_names(self.model)}
        return classifier if set(classifier.state_dict()) == own | {'score.weight'} else None

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, value_head: nn.Module | None = None, **options: Any) -> RewardModel:
        """Loads a folder of `save_pretrained`, or any sequence-classification model: with one label its logit is the
        score, with two it is logit 1 minus logit 0. `options` are keywords of the constructor and those of
        `chatgpt.nn.loading.load_model`.

        Raises ValueError if the folder has no trained head, or the classifier another number of labels.
        """
        own = {name: options.pop(name) for name in cls.build_options if name in options}
        parts = cls._load(folder, head=value_head is None, **options)
        if value_head is None and parts.head is None and not _is_classifier(parts.model):
            raise ValueError(
                f'{str(folder)!r} holds a {type(parts.model).__name__} without a trained score head; for a new head '
                'use AutoRM(pretrained=...), or give value_head'
            )
        model = cls.__new__(cls)
        cls._build(model, parts, value_head=value_head, **own)
        return model

    @classmethod
    def from_classifier(cls, classifier: Any) -> RewardModel:
        """Returns a reward model over a sequence classifier of transformers: its logit is the score; with two labels,
        logit 1 minus logit 0. Trunk and head are shared with the classifier, except that two labels need a new head. An
        encoder with a pooler is kept whole.

        Raises ValueError for another model, or another number of labels.
        """
        if not _is_classifier(classifier):
            raise ValueError(f'from_classifier: a {type(classifier).__name__} given; it must be a sequence classifier')
        _check_labels(classifier.config.num_labels, type(classifier).__name__)
        score, base = getattr(classifier, 'score', None), trunk_of(classifier)
        if not isinstance(score, nn.Linear) or looks_ahead(base):
            return cls(classifier)
        if score.out_features == 2:
            score = _single_output(score, getattr(classifier, 'weights_source', None))
        return cls(base, score)

    @classmethod
    def _load(cls, pretrained: Any = None, config: Any = None, **options: Any) -> ScorerParts:
        if pretrained is None:
            return ScorerParts(load_base_model(None, config, **options), None, 0.0)
        return load_scorer(pretrained, **options)

    def _build(self, parts: ScorerParts, *, value_head: nn.Module | None = None, **options: Any) -> None:
        RewardModel.__init__(self, parts.model, value_head or parts.head, **options)
        if value_head is None:
            set_state(self, {BIAS_KEY: torch.tensor(parts.bias, device='cpu')})


class ScorerParts(NamedTuple):
    """The parts of a reward model."""

    model: Any
    head: nn.Module | None
    """None if `model` is a whole classifier, or there is no trained head"""
    bias: float


def load_scorer(pretrained: str | Path, *, checkpoint: bool = False, head: bool = True, **options: Any) -> ScorerParts:
    """Loads base model, head and `score_bias` from a folder or hub name; of a causal LM or base model, or with
    `head=False` for a saved one, without a head."""
    config = load_config(pretrained, **{k: v for k, v in options.items() if k != 'attn_implementation'})
    bias, hub = float(getattr(config, BIAS_KEY, 0.0)), hub_options(options)
    is_adapter = adapter_base(pretrained) is not None
    own = hasattr(config, BIAS_KEY) or is_adapter
    saved = own and stored_file(pretrained, HEAD_FILE, **hub) is not None
    if saved or not _classifies(config):
        base = load_base_model(pretrained, checkpoint=checkpoint, **options)
        found = load_head(pretrained, **hub) if saved and head else None
        # the head beside an adapter has the bias of its base in it
        return ScorerParts(base, found, bias if saved and not is_adapter else 0.0)
    _check_labels(config.num_labels, str(pretrained))
    classifier = load_model('AutoModelForSequenceClassification', pretrained, None, checkpoint=checkpoint, **options)
    score = getattr(classifier, 'score', None)
    base = trunk_of(classifier)
    if not isinstance(score, nn.Linear) or looks_ahead(base):
        return ScorerParts(classifier, None, bias)
    return ScorerParts(base, _single_output(score, classifier.weights_source), bias)


def is_scorer(source: str | Path, config: Any, **hub: Any) -> bool:
    """Returns True if a folder or hub name, with this config, holds a reward model: a sequence classifier, or a model
    with `score_bias` and a head. False for an adapter with a head: it is a critic's too, and has the bias in it."""

    def has_head() -> bool:
        return stored_file(source, HEAD_FILE, **hub) is not None

    if adapter_base(source) is not None and has_head():
        return False
    return _classifies(config) or (hasattr(config, BIAS_KEY) and has_head())


def scores_one(config: Any) -> bool:
    """Returns False for a classifier of several classes."""
    return not _classifies(config) or config.num_labels in (1, 2)


def _classifies(config: Any) -> bool:
    return any(name.endswith('ForSequenceClassification') for name in config.architectures or ())


def _is_classifier(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) and type(model).__name__.endswith('ForSequenceClassification')


def _check_labels(number: int, source: str) -> None:
    if number not in (1, 2):
        raise ValueError(
            f'{source} has {number} labels; a reward model has 1, or 2 whose logit difference is the score'
        )


def _single_output(score: nn.Linear, source: WeightsSource | None) -> SeededLinear:
    """Returns a head with one output: the logit, or the difference of two logits. `source` is for a head on the meta
    device."""
    stored = source if score.weight.is_meta else None
    weight = (score.weight.detach() if stored is None else read_source_tensor(stored, 'score.weight')).float()
    bias = torch.zeros(score.out_features, device='cpu')
    if score.bias is not None:
        bias = (score.bias.detach() if stored is None else read_source_tensor(stored, 'score.bias')).float()
    if score.out_features == 2:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    head = reward_head(score.in_features)
    set_state(head, {'weight': weight, 'bias': bias})
    return head


def _state_names(model: nn.Module) -> set[str]:
    names = lora.merged_tensors(model) if lora.has_lora(model) else model.state_dict()
    return set(names)


def _set_pad_token(config: Any, tokenizer: Any) -> None:
    """Sets the id by which transformers' classifiers find the last real token: that of the text config."""
    config = config.get_text_config()
    pad = getattr(tokenizer, 'pad_token_id', None)
    config.pad_token_id = pad = config.pad_token_id if pad is None else int(pad)
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if pad is None:
        warnings.warn(
            'save_pretrained: no padding id known, so transformers will score one sequence at a time; pass tokenizer=',
            stacklevel=3,
        )
    elif pad in eos:
        warnings.warn(
            f'save_pretrained: the padding id {pad} is an end token too, so transformers will read the score of an '
            'ended sequence one token early; RewardModel.from_pretrained does not, nor does transformers if pad_token '
            'of the tokenizer is another token',
            stacklevel=3,
        )
