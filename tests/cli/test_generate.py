"""The commands generate, chat and evaluate: words for flags, --weights, numbers by hand. See
tests/examples/test_inference.py for the generated text."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import call
from safetensors.torch import save_file
from transformers import AutoConfig, GPT2ForSequenceClassification

from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor, ILQLModel
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.trainer.experience import RewardFunctionError
from chatgpt.types import Prompt


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('models')
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'actor', tokenizer=demo_world.demo_tokenizer())
    GPTRM(config=demo_world.demo_config()).save_pretrained(folder / 'rm', tokenizer=demo_world.demo_tokenizer())
    rows = [{'prompt': f'one day a {animal}', 'bonus': number} for number, animal in enumerate(('fox', 'cat', 'dog'))]
    (folder / 'prompts.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (folder / 'score.py').write_text(
        'def bonus(prompts, responses, bonus=None):\n    return [2.0 * b for b in bonus]\n\n'
        'def words(prompts, responses, **columns):\n    return [float(len(r.split())) for r in responses]\n'
    )
    return folder


@pytest.mark.parametrize('flag', ['--weights', '--model_path='])
def test_weights_on_top_are_read_also_by_the_name_that_they_had(monkeypatch, capsys, folder, tmp_path, flag):
    """--model_path is the output folder in training, so here the flag has another name, which a warning gives."""
    torch.manual_seed(1)
    other = GPTActor(config=demo_world.demo_config())
    weights = {name: tensor.contiguous().clone() for name, tensor in other.state_dict().items()}
    save_file(weights, tmp_path / 'other.safetensors')
    other.save_pretrained(tmp_path / 'other', tokenizer=demo_world.demo_tokenizer())
    more = ['one day a fox', '--seed=1', '--max_new_tokens=8']
    assert call(monkeypatch, 'generate', str(folder / 'actor'), *more) == 0
    plain = capsys.readouterr()
    assert call(monkeypatch, 'generate', str(tmp_path / 'other'), *more) == 0
    wanted = capsys.readouterr()
    given = [f'{flag}{tmp_path}/other.safetensors'] if '=' in flag else [flag, f'{tmp_path}/other.safetensors']
    assert call(monkeypatch, 'generate', str(folder / 'actor'), *more, *given) == 0
    found = capsys.readouterr()
    assert found.out == wanted.out != plain.out
    warned = [line for line in found.err.splitlines() if line.startswith('warning')]
    assert warned == ([] if flag == '--weights' else ['warning: --model_path is called --weights here'])


def test_a_model_with_q_heads_is_decoded_as_ilql_does(monkeypatch, capsys, folder, tmp_path):
    torch.manual_seed(0)
    model = ILQLModel.from_pretrained(folder / 'actor')
    for head in model.target_q_heads:
        for p in head.parameters():
            torch.nn.init.normal_(p)
    model.save_pretrained(tmp_path / 'ilql', tokenizer=demo_world.demo_tokenizer())
    tokenizer = demo_world.demo_tokenizer()
    ids = tokenizer('one day a fox', add_special_tokens=False)['input_ids']
    for flags, beta in (([], 1.0), (['--beta=0'], 0.0), (['--beta=30'], 30.0)):
        sampling = SamplingParams(max_new_tokens=8, do_sample=False)
        with model.decoding(beta), LocalEngine() as engine:
            engine.begin(model)
            [want] = engine.generate(Call.of([Prompt(ids=torch.tensor(ids))], sampling, seed=0, indices=[0]))
        words = ['generate', str(tmp_path / 'ilql'), 'one day a fox', '--max_new_tokens=8', '--greedy', *flags]
        assert call(monkeypatch, *words) == 0
        assert tokenizer.decode(want.response_ids, skip_special_tokens=True).strip() in capsys.readouterr().out
    assert call(monkeypatch, 'generate', str(folder / 'actor'), 'a fox', '--beta=1') == 2
    assert 'has no Q heads' in capsys.readouterr().err


def test_evaluate_scores_every_prompt_with_the_columns_of_its_row(monkeypatch, capsys, folder, tmp_path):
    out = tmp_path / 'scored.jsonl'
    words = [str(folder / 'actor'), str(folder / 'prompts.jsonl'), '--max_new_tokens=5', f'--output={out}']
    assert call(monkeypatch, 'evaluate', *words, f'--reward_fn={folder}/score.py:bonus') == 0
    shown = capsys.readouterr().out.splitlines()
    numbers = json.loads(next(line for line in shown if line.startswith('{')))
    assert numbers['score_mean'] == 2.0  # of 0, 2 and 4
    assert numbers['score_std'] == pytest.approx((8 / 3) ** 0.5, abs=1e-6)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row['prompt'], row['score']) for row in rows] == [
        ('one day a fox', 0.0),
        ('one day a cat', 2.0),
        ('one day a dog', 4.0),
    ]
    assert shown[-1] == f'3 responses written to {out}'


def test_evaluate_with_a_reward_model_gives_that_models_scores(monkeypatch, capsys, folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / 'scored.jsonl'
    words = [str(folder / 'actor'), str(folder / 'prompts.jsonl'), '--max_new_tokens=5', '--temperature=1']
    assert call(monkeypatch, 'evaluate', *words, f'--reward_model={folder}/rm', f'--output={out}') == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / 'rm').eval()
    tokenizer = demo_world.demo_tokenizer()
    compared = 0
    for row in map(json.loads, out.read_text().splitlines()):
        ids = torch.tensor([tokenizer(f'{row["prompt"]} {row["response"]}')['input_ids']])
        if ids.shape[1] == 9:  # the text does not contain the end token
            compared += 1
            assert row['score'] == pytest.approx(float(theirs(ids).logits.detach()), rel=1e-4)
    assert compared


def test_a_reward_model_with_a_shorter_context_is_refused_before_generating(monkeypatch, capsys, folder, tmp_path):
    short = AutoConfig.from_pretrained(folder / 'rm')
    short.n_positions = 6
    GPT2ForSequenceClassification(short).save_pretrained(tmp_path / 'rm')
    words = [
        str(folder / 'actor'),
        str(folder / 'prompts.jsonl'),
        '--max_new_tokens=5',
        f'--reward_model={tmp_path}/rm',
    ]
    assert call(monkeypatch, 'evaluate', *words) == 2
    assert 'reads 6 tokens, and prompts of up to 4 with responses of up to 5 do not fit' in capsys.readouterr().err


def test_a_file_of_output_stays_until_there_is_something_to_write(monkeypatch, capsys, folder, tmp_path):
    out = tmp_path / 'kept.jsonl'
    out.write_text('{"old": 1}\n')
    (tmp_path / 'bad.py').write_text('def score(responses):\n    raise RuntimeError("no")\n')
    words = [str(folder / 'actor'), str(folder / 'prompts.jsonl'), '--max_new_tokens=2', f'--output={out}']
    with suppress(RewardFunctionError):
        assert call(monkeypatch, 'evaluate', *words, f'--reward_fn={tmp_path}/bad.py:score') != 0
    assert out.read_text() == '{"old": 1}\n'
    assert call(monkeypatch, 'generate', *words[:1], f'--input={folder}/prompts.jsonl', *words[2:]) == 0
    assert 'old' not in out.read_text() and out.read_text().count('\n') == 3
    assert (
        call(monkeypatch, 'generate', words[0], f'--input={folder}/prompts.jsonl', words[2], '--output=/dev/null') == 0
    )


@pytest.mark.parametrize('word', ['--max_turns=3', '--step_timeout_s=1', '--num_rows=-1'])
def test_options_that_would_do_nothing_are_refused(monkeypatch, capsys, tmp_path, word):
    words = [str(tmp_path), str(tmp_path / 'prompts.jsonl'), '--reward_fn=a:b', word]
    assert call(monkeypatch, 'evaluate', *words) == 2
    assert word.split('=')[0] in capsys.readouterr().err


def test_every_kind_of_file_holds_prompts(monkeypatch, capsys, folder, tmp_path):
    (tmp_path / 'a.tsv').write_text('prompt\nday\ncat\n')
    (tmp_path / 'b.txt').write_bytes('\ufeffday\ncat\n'.encode())
    for name in ('a.tsv', 'b.txt'):
        assert call(monkeypatch, 'generate', str(folder / 'actor'), str(tmp_path / name), '--max_new_tokens=1') == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith('> ')]
        assert shown == ['> day', '> cat'], name


@pytest.mark.parametrize('word', ['generate', 'evaluate'])
def test_a_reward_model_does_not_write(monkeypatch, capsys, folder, word):
    more = ['--reward_fn', f'{folder}/score.py:words'] if word == 'evaluate' else []
    assert call(monkeypatch, word, str(folder / 'rm'), str(folder / 'prompts.jsonl'), *more) == 2
    assert f'--pretrain {folder}/rm is a reward model (GPT2ForSequenceClassification)' in capsys.readouterr().err


@pytest.mark.parametrize('word', ['generate', 'evaluate'])
def test_a_response_of_no_tokens_is_refused_before_a_model_is_read(monkeypatch, capsys, tmp_path, word):
    more = ['--reward_fn=missing.py:words'] if word == 'evaluate' else []
    assert call(monkeypatch, word, str(tmp_path / 'missing'), 'a fox', '--max_new_tokens=0', *more) == 2
    assert 'max_new_tokens' in capsys.readouterr().err


def test_an_environment_is_not_cut_over_processes_and_a_chat_is_one(monkeypatch, capsys, folder):
    model, cut = str(folder / 'actor'), ['--strategy=fsdp', '--tensor_parallel=2']
    assert call(monkeypatch, 'evaluate', model, '--environment=games:countdown', *cut) == 2
    assert 'error: --environment does not go with --tensor_parallel: leave one of them out' in capsys.readouterr().err
    of_two = SimpleNamespace(world_size=1, processes=SimpleNamespace(world_size=2), is_rank_0=True)
    monkeypatch.setattr('chatgpt.launch.cli.generate.strategy_of', lambda args: nullcontext(of_two))
    assert call(monkeypatch, 'chat', model, *cut) == 2
    assert capsys.readouterr().err == 'error: a chat is one process: start it with python, or give --input\n'
