"""examples/train_prompts.py: a one-line error for every mistake, before any weight is loaded where possible."""

from __future__ import annotations

import pytest
from example_script import QUICK, REWARD, fails, run

from chatgpt.nn import Actor, AutoActor, RewardModel
from chatgpt.nn.peft_format import export_peft


@pytest.fixture
def no_weights(monkeypatch):
    """Fails if a weight is loaded or made."""
    from chatgpt.launch import recipes

    def build_ppo_models(inputs):
        raise AssertionError('weights were touched before the mistake was found')

    monkeypatch.setattr(recipes, 'build_ppo_models', build_ppo_models)


@pytest.mark.usefixtures('no_weights')
@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ('--kl_coeffs 0.1', "unknown argument '--kl_coeffs'; did you mean --kl_coef"),
        ('--epochs=2 --num_episodes=3 {run}', 'epochs=2 and num_episodes=3 both say how long to train; give one'),
        ('--validation_file={prompts} {run}', 'is the training data: give another, or'),
        ('--model_path={model} {run}', 'the trained model would replace --pretrain '),
        ('--mini_batch_size=3', "unknown argument '--mini_batch_size'; here it is --train_batch_size"),
        ('{prompts} --pretrain={model}', 'give --reward_model FOLDER or --reward_fn module:function'),
        ('{prompts} --pretrain=/no/such/model {reward}', "'/no/such/model': there is no such folder"),
        ('{prompts} --pretrain={model} --reward_fn=joy', 'write module:name or path/to/file.py:name'),
        ('{prompts} --pretrain={model} --reward_fn={tmp}/broken.py:joy', 'importing it raised ZeroDivisionError'),
        ('{prompts} --pretrain={model} --reward_fn={tmp}/narrow.py:joy', 'it is called as joy(prompts, responses)'),
        (
            '{prompts} --pretrain={model} --reward_fn={tmp}/narrow.py:right',
            "reward function right needs a column 'answer' beside the prompts; there are none",
        ),
        (
            '{tmp}/nocolumn.csv --pretrain={model} {reward}',
            "no column 'prompt' for the prompt; the columns are 'act', 'words'",
        ),
        (
            '{tmp}/empty.jsonl --pretrain={model} {reward}',
            'empty.jsonl, line 2: the prompt is empty. Bad records are left out with --skip_bad_records',
        ),
        ('--max_new_tokens=60 {run}', 'and there is room for 4 (max_prompt_tokens, or the context'),
        (
            '{tmp}/long.jsonl --pretrain={model} {reward}',
            'long.jsonl, line 2: the prompt has 70 tokens, and there is room for 60 (max_prompt_tokens, or the',
        ),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, model_folder, prompt_file, flags, message):
    (tmp_path / 'nocolumn.csv').write_text('act,words\nx,y\n')
    (tmp_path / 'empty.jsonl').write_text('{"prompt": "one day"}\n{"prompt": ""}\n')
    (tmp_path / 'long.jsonl').write_text('{"prompt": "one day"}\n{"prompt": "' + 'fox ' * 70 + '"}\n')
    (tmp_path / 'broken.py').write_text('1 / 0\n')
    (tmp_path / 'narrow.py').write_text(
        'limit = 3\ndef joy(texts):\n    return [0.0] * len(texts)\ndef right(prompts, responses, answer, **k): ...\n'
    )
    places = {'tmp': tmp_path, 'prompts': prompt_file, 'model': model_folder, 'reward': ' '.join(REWARD)}
    places['run'] = '{prompts} --pretrain={model} {reward}'.format(**places)
    given = flags.format(**places).split()
    error = fails(monkeypatch, capsys, *QUICK, '--save_path', str(tmp_path / 'run'), *given)
    assert message in error
    assert not (tmp_path / 'run').exists()  # it wrote nothing


@pytest.mark.usefixtures('no_weights')
def test_a_tokenizer_that_does_not_match(monkeypatch, capsys, tmp_path, model_folder, prompt_file):
    from transformers import GPT2Config, GPT2Model

    from chatgpt.testing import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / 'bytes')
    common = [str(prompt_file), '--pretrain', str(model_folder), *QUICK, '--save_path', str(tmp_path / 'run')]
    error = fails(monkeypatch, capsys, *common, '--tokenizer', str(tmp_path / 'bytes'), *REWARD)
    assert 'does not match the model' in error
    small = GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    RewardModel(GPT2Model(small)).save_pretrained(tmp_path / 'rm')
    error = fails(monkeypatch, capsys, *common, '--reward_model', str(tmp_path / 'rm'))
    assert 'knows 16 tokens, fewer than the tokenizer of the policy' in error


@pytest.mark.parametrize(
    ('body', 'message', 'code'),
    [
        ('raise SystemExit(3)', 'raised SystemExit: 3, at {file}:2', 1),
        ('import time; time.sleep(30)', 'did not return within 0.3 s', 1),
        ('return [1.0]', 'returned 1 scores for 4 responses; return one per response; it is defined at {file}:1', 2),
        ("return [float('nan')] * len(responses)", "returned nan for sample 0 ('", 1),
        ('return [1e30] * len(responses)', 'give score_clip', 2),
    ],
)
def test_a_reward_function_that_misbehaves(monkeypatch, capsys, tmp_path, model_folder, body, message, code):
    (tmp_path / 'bad.py').write_text(f'def score(prompts, responses):\n    {body}\n')
    flags = [*QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path / 'run')]
    flags.append(f'--score_timeout_s={0.3 if "sleep" in body else 600}')
    error = fails(monkeypatch, capsys, *flags, '--reward_fn', f'{tmp_path / "bad.py"}:score', code=code)
    assert message.replace('{file}', str(tmp_path / 'bad.py')) in error


def test_an_adapters_folder_is_a_place_to_start_from(monkeypatch, tmp_path, model_folder):
    export_peft(
        Actor(AutoActor(pretrained=model_folder).model, lora_rank=2), tmp_path / 'adapter', base_model=str(model_folder)
    )
    run(monkeypatch, *QUICK, '--pretrain', str(tmp_path / 'adapter'), '--save_path', str(tmp_path / 'run'), *REWARD)
    assert 'transformer.h.0.mlp.c_fc.weight' in AutoActor(pretrained=tmp_path / 'run' / 'actor').model.state_dict()


def test_bad_records_of_every_source_are_counted_and_named(monkeypatch, capsys, tmp_path, model_folder):
    good = '{"prompt": "one day a small fox"}\n'
    prompts, validation, ptx = (tmp_path / f'{name}.jsonl' for name in ('prompts', 'validation', 'ptx'))
    prompts.write_text(good * 4 + '{"prompt": ""}\nnonsense\n')
    validation.write_text('nonsense\n' + good)
    ptx.write_text('{"text": "a fox ."}\n{"text": 3}\n')
    flags = (
        f'{prompts} --validation_file {validation} --ptx_data {ptx} --ptx_coef=0.5 --pretrain {model_folder}'.split()
    )
    flags += [*REWARD, *QUICK, '--max_timesteps=1', '--save_path', str(tmp_path / 'run')]
    error = fails(monkeypatch, capsys, *flags)
    assert f'{prompts}, line 5: ' in error  # without the flag the first bad record ends the run
    run(monkeypatch, *flags, '--skip_bad_records')
    output = capsys.readouterr().out
    assert f'{prompts}: 4 prompts, 2 bad ones left out ({prompts}, line 5: ' in output
    assert f'{validation}: 1 eval prompts, 1 bad ones left out ({validation}, line 1: ' in output
    assert f'{ptx}: 1 texts, 1 bad ones left out ({ptx}, line 2: ' in output
