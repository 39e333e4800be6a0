"""The code of a model card that loads the model and uses it once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from chatgpt.publish.text import hub_name

Role = Literal['actor', 'reward_model', 'critic']
"""what the model does: it writes, scores whole answers, or values each token"""
_DRAWING: Mapping[str, Any] = {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}
"""what is left out where it is the default of `generate`: but for top_k, which that has at 50"""


def snippet(folder: Path, role: Role, name: str, prompt: str, response: str, generation: Mapping[str, Any]) -> str:
    """Python for the saved folder; `name` is where the model is read from.

    Args:
        prompt, response: an example.
        generation: how the model was drawn from in training.
    """
    lines = ['from transformers import {classes}', '', f'name = {name!r}']
    has_tokenizer = (folder / 'tokenizer_config.json').is_file()
    if (folder / 'adapter_config.json').is_file():
        return _adapter(folder, name, prompt, generation)
    if role == 'critic' or (role == 'reward_model' and not is_classifier(folder)):
        kind = 'Critic' if role == 'critic' else 'RewardModel'
        return f'from chatgpt.nn import {kind}\n\nname = {name!r}\nmodel = {kind}.from_pretrained(name)'
    if role == 'reward_model':
        lines += _tokenizer(has_tokenizer)
        lines += [
            'model = AutoModelForSequenceClassification.from_pretrained(name)',
            f"inputs = tokenizer({prompt + response!r}, return_tensors='pt')"
            if has_tokenizer
            else "inputs = {'input_ids': torch.tensor([[1, 2, 3]])}",
            'score = model(**inputs).logits[0, 0].item() - model.config.score_bias',
            'print(score)',
        ]
        return _joined(lines, 'AutoModelForSequenceClassification', has_tokenizer)
    apart = is_encoder_decoder(folder)
    kind = 'AutoModelForSeq2SeqLM' if apart else 'AutoModelForCausalLM'
    lines += [*_tokenizer(has_tokenizer), f'model = {kind}.from_pretrained(name)']
    lines += _generating(prompt, generation, has_tokenizer, apart=apart)
    return _joined(lines, kind, has_tokenizer)


def _adapter(folder: Path, name: str, prompt: str, generation: Mapping[str, Any]) -> str:
    adapter = json.loads((folder / 'adapter_config.json').read_text())
    named = adapter.get('base_model_name_or_path') or 'base'
    base = hub_name(named) or Path(named).name
    kind = {'CAUSAL_LM': 'AutoModelForCausalLM', 'SEQ_2_SEQ_LM': 'AutoModelForSeq2SeqLM'}.get(
        adapter.get('task_type'), 'AutoModel'
    )
    writes, apart = kind != 'AutoModel', kind == 'AutoModelForSeq2SeqLM'
    lines = [
        'from peft import PeftModel',
        'from transformers import {classes}',
        '',
        f'name = {name!r}',
        f'base = {base!r}',
        f'model = PeftModel.from_pretrained({kind}.from_pretrained(base), name)',
    ]
    if writes:
        lines.append('tokenizer = AutoTokenizer.from_pretrained(base)')
        lines += _generating(prompt, generation, True, apart=apart)
    return _joined(lines, kind, writes)


def _tokenizer(there: bool) -> list[str]:
    return ['tokenizer = AutoTokenizer.from_pretrained(name)'] if there else []


def _generating(prompt: str, generation: Mapping[str, Any], has_tokenizer: bool, *, apart: bool) -> list[str]:
    """`apart`: what is generated begins with a start token, not with the prompt."""
    drawn = generation.get('do_sample') is not False
    options = {'max_new_tokens': generation.get('max_new_tokens') or 64, 'do_sample': drawn}
    if drawn:
        options |= {k: generation[k] for k in _DRAWING if generation.get(k) is not None}
        options.setdefault('top_k', 0)
        options = {k: v for k, v in options.items() if k == 'top_k' or _DRAWING.get(k) != v}
    given = ', '.join(f'{k}={v!r}' for k, v in options.items())
    if not has_tokenizer:
        start = 1 if apart else 3
        return [f'output = model.generate(torch.tensor([[1, 2, 3]]), {given})', f'print(output[0, {start}:].tolist())']
    return [
        f"inputs = tokenizer({prompt!r}, return_tensors='pt')",
        f'output = model.generate(**inputs, {given})',
        'start = 1' if apart else "start = inputs['input_ids'].shape[1]",
        'print(tokenizer.decode(output[0, start:], skip_special_tokens=True))',
    ]


def _joined(lines: list[str], kind: str, has_tokenizer: bool) -> str:
    classes = ', '.join([kind, 'AutoTokenizer'] if has_tokenizer else [kind])
    code = '\n'.join(lines).replace('{classes}', classes, 1)
    return code if 'torch.' not in code else f'import torch\n{code}'


def is_classifier(folder: Path) -> bool:
    """Whether the saved model is one that transformers loads for sequence classification."""
    return any('ForSequenceClassification' in name for name in _config(folder).get('architectures') or ())


def is_encoder_decoder(folder: Path) -> bool:
    """Whether the saved model reads a prompt with an encoder, such as T5."""
    return bool(_config(folder).get('is_encoder_decoder'))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / 'config.json'
    return json.loads(path.read_text()) if path.is_file() else {}
