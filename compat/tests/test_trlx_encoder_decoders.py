"""Whole trlX programs on encoder-decoders (`model_arch_type='seq2seq'`): sentiments by PPO and ILQL on a T5, summaries
by PPO on a Flan-T5, and errors for unsupported settings."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from chatgpt.rollout import HFEngine
from chatgpt.testing import char_tokenizer, encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt_compat.modules import serving

REVIEWS = ['this film was', 'i did not like', 'what a dull', 'the best of']
HIGHLIGHTS = {'summarize: the cat sat on it': 'cat', 'summarize: a dog ran off': 'dog', 'summarize: it rained': 'rain'}


@pytest.fixture
def trlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package `trlx`, imported by its name in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with serving():
        yield importlib.import_module('trlx')


def folder_of(family: str) -> str:
    tiny_causal_lm(family, layers=3).save_pretrained(family)
    (char_tokenizer if family == 'gpt2' else lambda: encoder_decoder_tokenizer(family))().save_pretrained(family)
    return family


def config_of(trlx: Any, kind: str, family: str, **more: Any) -> Any:
    defaults = importlib.import_module('trlx.data.default_configs')
    small = {
        'model.model_path': folder_of(family),
        'model.model_arch_type': 'seq2seq',
        'model.num_layers_unfrozen': -1,
        'tokenizer.tokenizer_path': family,
        'train.tracker': None,
        'train.seq_length': 64,
        'train.batch_size': 4,
        'train.total_steps': 4,
        'train.eval_interval': 2,
    }
    return defaults.TRLConfig.update(getattr(defaults, f'default_{kind}_config')().to_dict(), small | more)


PPO = {'method.num_rollouts': 8, 'method.chunk_size': 4, 'method.ppo_epochs': 1, 'method.gen_kwargs.max_new_tokens': 6}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path('ckpts', name).read_text().splitlines()]


def test_sentiments_by_ppo_on_a_t5_with_hydra(trlx):
    seen: list[Any] = []

    def reward_fn(samples: list[str], prompts: list[str], outputs: list[str], **kwargs: Any) -> list[float]:
        seen.append((samples, prompts, outputs))
        return [float(sum(c in 'aeiou' for c in text)) for text in outputs]

    config = config_of(trlx, 'ppo', 't5', **PPO | {'model.num_layers_unfrozen': 1})
    trainer = trlx.train(reward_fn=reward_fn, prompts=REVIEWS, eval_prompts=REVIEWS[:2], config=config)
    assert trainer.iter_count == 4 and isinstance(trainer.trainer.engine, HFEngine)
    samples, prompts, outputs = seen[0]
    assert set(prompts) <= set(REVIEWS)  # without special tokens
    assert samples == [f'{p}<sep>{o}' for p, o in zip(prompts, outputs, strict=True)]
    assert all(e.prompt_ids[-1] == 2 for e in trainer.store)  # the encoder reads them, too
    phases = lines('metrics.jsonl')
    assert phases[0]['ppo/first_ratio_error'] < 1e-5 and abs(phases[0]['rollout/kl_mean']) < 1e-4
    before = dict(AutoModelForSeq2SeqLM.from_pretrained('t5').named_parameters())
    after = AutoModelForSeq2SeqLM.from_pretrained('ckpts/checkpoint_4/hf_model')
    changed = {name for name, p in after.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith(('decoder.block.2.', 'decoder.final_layer_norm')) for name in changed)
    trainer.save_pretrained('saved', max_shard_size='1GB')
    assert Path('saved', 'config.json').is_file()
    assert (trainer.tokenizer.sep_token, trainer.tokenizer.padding_side) == ('<sep>', 'left')
    ids = trainer.tokenizer(REVIEWS[:2], padding=True, return_tensors='pt')
    drawn = trainer.generate(**ids)
    assert drawn.shape[0] == 2 and drawn[:, 0].tolist() == [0, 0] and drawn.shape[1] <= 1 + 6
    out = trainer.model(ids['input_ids'], ids['attention_mask'], decoder_input_ids=drawn)
    assert out.logits.shape[:2] == drawn.shape and out.value.shape == drawn.shape


def test_summaries_by_ppo_on_a_flan_t5(trlx):
    config = config_of(trlx, 'ppo', 'flan-t5', **PPO)
    config.method.gen_kwargs = {'max_length': 8}

    def reward_fn(samples: Any, prompts: list[str], outputs: list[str], highlights: list[str], **_: Any) -> list[float]:
        found = zip(outputs, highlights, strict=True)
        return [float(len(set(text) & set(wanted))) for text, wanted in found]

    prompts = [{'prompt': text, 'highlights': words} for text, words in HIGHLIGHTS.items()]
    trainer = trlx.train(reward_fn=reward_fn, prompts=prompts, eval_prompts=prompts[:2], config=config)
    assert max(e.num_actions for e in trainer.store) <= 7  # max_length=8 includes the start token
    phases = lines('metrics.jsonl')
    assert len(phases) == 2 and phases[0]['ppo/first_ratio_error'] < 1e-5 and abs(phases[0]['rollout/kl_mean']) < 1e-4


def test_sentiments_by_ilql_on_a_t5(trlx):
    samples = [['review: a fine film', 'good'], ['review: dull and long', 'bad'], ['review: no plot', 'bad']]
    gen = {'max_new_tokens': 5, 'top_k': 20, 'beta': [1, 4], 'temperature': 1.0}
    config = config_of(trlx, 'ilql', 't5', **{'method.gen_kwargs': gen, 'train.batch_size': 3})
    given: list[Any] = []

    def metric_fn(samples: list[str], prompts: list[str], outputs: list[str], **_: Any) -> dict[str, list[float]]:
        given.append((samples, prompts, outputs))
        return {'length': [float(len(text)) for text in outputs]}

    evaluated = {'eval_prompts': ['review: i know'] * 2, 'metric_fn': metric_fn}
    trainer = trlx.train(samples=samples, rewards=[1.0, 0.0, 0.2], config=config, **evaluated)
    record = trainer.data[0]
    assert trainer.tokenizer.decode(record.prompt_ids) == 'review: a fine film<eos>'
    assert trainer.tokenizer.decode(record.response_ids) == 'good<eos>'
    assert given[0][0][0] == f'{given[0][1][0]}<sep>{given[0][2][0]}'
    assert {name for name in lines('eval.jsonl')[-1] if 'length' in name} >= {
        'eval/metrics/length@beta=1',
        'eval/metrics/length@beta=4',
    }


def test_sft_and_what_is_refused(trlx):
    config = config_of(trlx, 'sft', 'bart', **{'method.gen_kwargs': {'max_new_tokens': 4}, 'train.batch_size': 2})
    trainer = trlx.train(samples=[['ab', 'cd'], ['a', 'b']], eval_prompts=['ab'], config=config)
    assert [s.response_ids.tolist() for s in trainer.data] == [[1, 8, 9, 2], [1, 7, 2]]
    with pytest.raises(ValueError, match='a prompt and an output, and this is a text'):
        trlx.train(samples=['only a text'], config=config_of(trlx, 'sft', 'bart'))
    with pytest.raises(ValueError, match='a prompt and an output, and this is 4 messages'):
        trlx.train(samples=[['a', 'b', 'c', 'd']], config=config_of(trlx, 'sft', 'bart'))
    wrong = config_of(trlx, 'ppo', 't5', **PPO | {'model.model_arch_type': 'causal'})
    with pytest.raises(ValueError, match=r"model_arch_type='causal', and the model \(t5\) is 'seq2seq'"):
        trlx.train(reward_fn=lambda samples, **_: [0.0] * len(samples), prompts=REVIEWS, config=wrong)
    wrong = config_of(trlx, 'ppo', 'gpt2', **PPO)
    with pytest.raises(ValueError, match=r"model_arch_type='seq2seq', and the model \(gpt2\) is 'causal'"):
        trlx.train(reward_fn=lambda samples, **_: [0.0] * len(samples), prompts=REVIEWS, config=wrong)
    wrong = config_of(trlx, 'ppo', 't5', **PPO | {'model.model_arch_type': 'prefix'})
    with pytest.raises(ValueError, match="model_arch_type='prefix' is not known"):
        trlx.train(reward_fn=lambda samples, **_: [0.0] * len(samples), prompts=REVIEWS, config=wrong)
