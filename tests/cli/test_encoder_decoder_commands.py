"""The command on a tiny T5 and a tiny BART: training, resuming, using the trained models, and refusals, with those of
docs/encoder_decoders.md."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from command_line import call
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from chatgpt.nn import RewardModel
from chatgpt.testing import encoder_decoder_tokenizer, tiny_causal_lm

DATA = {
    'demos.jsonl': [{'prompt': f'tl;dr {w} sat', 'response': w} for w in ('cat', 'dog', 'cow', 'hen')],
    'prompts.jsonl': [{'prompt': f'tl;dr {w} ran'} for w in ('cat', 'dog', 'cow', 'hen')],
    'pairs.jsonl': [{'prompt': f'tl;dr {w} sat', 'chosen': w, 'rejected': 'zz'} for w in ('cat', 'dog', 'cow', 'hen')],
    'rewards.jsonl': [{'prompt': f'tl;dr {w}', 'response': w, 'reward': len(w)} for w in ('cat', 'horse', 'ox')],
    'texts.jsonl': [{'text': 'only a text'}],
}
REWARD = 'def score(prompts, responses):\n    return [float(r.count("a")) for r in responses]\n'
ONLINE = (
    *('--experience_batch_size=4', '--train_batch_size=4', '--max_timesteps=1', '--update_timesteps=1'),
    *('--max_epochs=1', '--max_new_tokens=4', '--checkpoint_interval=1'),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a reward and two models."""
    monkeypatch.chdir(tmp_path)
    for name, rows in DATA.items():
        Path(name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    Path('rewards.py').write_text(REWARD)
    for family in ('t5', 'bart'):
        tiny_causal_lm(family, positions=32).save_pretrained(family)
        encoder_decoder_tokenizer(family).save_pretrained(family)
    return tmp_path


def lines(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]


def test_sft_reward_model_ppo_and_what_uses_them(place, monkeypatch, capsys):
    assert call(monkeypatch, 'sft', 'demos.jsonl', '--pretrain=t5', '--save_path=sft', '--max_epochs=1') == 0
    words = ('reward-model', 'pairs.jsonl', '--pretrain', 'sft/actor', '--save_path=rm', '--max_epochs=1')
    assert call(monkeypatch, *words) == 0
    ppo = ('ppo', 'prompts.jsonl', '--pretrain=sft/actor', '--reward_model=rm/reward_model', '--save_path=ppo', *ONLINE)
    assert call(monkeypatch, *ppo, '--num_episodes=1') == 0
    first = lines('ppo')
    assert first[0]['ppo/first_ratio_error'] < 1e-5 and abs(first[0]['rollout/kl_mean']) < 1e-5
    # the model of an earlier run is not replaced, except by a resume
    assert call(monkeypatch, *ppo, '--num_episodes=2') == 2
    assert call(monkeypatch, *ppo, '--num_episodes=2', '--resume=auto') == 0
    assert lines('ppo')[:1] == first and len(lines('ppo')) == 2

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained('ppo/actor'), AutoTokenizer.from_pretrained('ppo/actor')
    given = tokenizer('tl;dr cat ran', return_tensors='pt')
    with torch.no_grad():
        theirs = model.generate(**given, max_new_tokens=4, do_sample=False)[0, 1:]
    card = Path('ppo/actor/README.md').read_text()
    assert 'pipeline_tag: text2text-generation' in card and 'AutoModelForSeq2SeqLM.from_pretrained(name)' in card
    assert isinstance(RewardModel.from_pretrained('rm/reward_model'), RewardModel)
    capsys.readouterr()

    assert call(monkeypatch, 'generate', 'ppo/actor', 'tl;dr cat ran', '--greedy', '--max_new_tokens=4') == 0
    out = capsys.readouterr().out
    assert out.strip() == f'> tl;dr cat ran\n{tokenizer.decode(theirs, skip_special_tokens=True)}'.strip()
    words = ('evaluate', 'ppo/actor', 'prompts.jsonl', '--reward_fn=rewards.py:score', '--max_new_tokens=4')
    assert call(monkeypatch, *words) == 0
    assert 0 <= json.loads(capsys.readouterr().out.splitlines()[-1])['score_mean'] <= 4
    best = ('generate', 'ppo/actor', 'prompts.jsonl', '--best_of=3', '--reward_model=rm/reward_model', '--output=o')
    assert call(monkeypatch, *best, '--max_new_tokens=4') == 0
    assert [json.loads(line)['prompt'] for line in Path('o').read_text().splitlines()] == [
        row['prompt'] for row in DATA['prompts.jsonl']
    ]
    capsys.readouterr()
    monkeypatch.setattr('sys.stdin', io.StringIO('tl;dr cat ran\n'))
    assert call(monkeypatch, 'chat', 'ppo/actor', '--greedy', '--max_new_tokens=4') == 0
    assert f'> {tokenizer.decode(theirs, skip_special_tokens=True)}' in capsys.readouterr().out


def test_the_other_methods_and_an_adapter(place, monkeypatch):
    pytest.importorskip('peft')
    from peft import PeftModelForSeq2SeqLM

    words = ('grpo', 'prompts.jsonl', '--pretrain=t5', '--reward_fn=rewards.py:score', '--save_path=grpo', *ONLINE)
    assert call(monkeypatch, *words, '--num_episodes=2', '--num_samples_per_prompt=2', '--lora_rank=2') == 0
    assert len(lines('grpo')) == 2
    assert call(monkeypatch, 'dpo', 'pairs.jsonl', '--pretrain=t5', '--save_path=dpo', '--train_batch_size=4') == 0
    words = ('ilql', 'rewards.jsonl', '--pretrain=bart', '--save_path=ilql', '--train_batch_size=3', '--max_epochs=1')
    assert call(monkeypatch, *words) == 0
    assert Path('ilql/actor/ilql_heads.safetensors').is_file()
    words = ('sft', 'demos.jsonl', '--pretrain=t5', '--save_path=lora', '--lora_rank=2', '--save_adapter', '--lr=0.1')
    assert call(monkeypatch, *words, '--max_epochs=2') == 0
    model = PeftModelForSeq2SeqLM.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained('t5'), 'lora/adapter')
    merged = AutoModelForSeq2SeqLM.from_pretrained('lora/actor')
    assert AutoTokenizer.from_pretrained('lora/adapter').vocab_size == AutoTokenizer.from_pretrained('t5').vocab_size
    ids = torch.tensor([[6, 7, 2]])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (merged, model))
        before = AutoModelForSeq2SeqLM.from_pretrained('t5')(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - before).abs().max() > 0.01


PPO = ('ppo', 'prompts.jsonl', '--pretrain=t5', '--reward_fn=rewards.py:score', '--save_path=no', '--max_new_tokens=4')


@pytest.mark.parametrize(
    ('words', 'reason'),
    [
        ((*PPO, '--engine=local'), 'generates with model.generate alone'),
        ((*PPO, '--shared_trunk', '--lora_rank=2'), 'leave shared_trunk and quantize out'),
        ((*PPO, '--plan'), 'a plan tells the memory of causal language models'),
        (('sft', 'demos.jsonl', '--pretrain=t5', '--save_path=no', '--pack_examples'), 'pack_examples joins texts'),
        (('sft', 'texts.jsonl', '--pretrain=t5', '--save_path=no'), 'line 1: a text without a prompt'),
        (('sft', 'demos.jsonl', '--pretrain=bart', '--save_path=no', '--max_len=32'), 'give at most 31'),
        ((*PPO, '--pretrain=bart', '--max_new_tokens=32'), 'responses have up to 32 tokens, past the context of 31'),
        ((*PPO, '--pretrain=bart', '--prompt_path=long.jsonl'), 'the prompt has 42 tokens, and there is room for 31'),
        (('evaluate', 't5', '--environment=games:countdown'), 'the turns of an environment are written by causal'),
    ],
)
def test_what_cannot_be_is_one_line_before_any_weight_is_loaded(place, monkeypatch, capsys, words, reason):
    Path('long.jsonl').write_text(json.dumps({'prompt': 'a' * 40}) + '\n')
    for family in ('t5', 'bart'):
        Path(family, 'model.safetensors').unlink()
    if words[:2] == PPO[:2] and any(word.startswith('--prompt_path') for word in words):
        words = (words[0], *words[2:])
    assert call(monkeypatch, *words) != 0
    err = capsys.readouterr().err.strip().splitlines()
    assert reason in err[-1] and not any('Traceback' in line for line in err)
    assert not Path('no').exists()
