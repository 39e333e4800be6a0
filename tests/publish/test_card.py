"""Model cards: content, excluded content, and code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_runs import SIZES, byte_trainer

from chatgpt.monitor.publish import ModelFacts, hub_name, write_card
from chatgpt.monitor.publish.card import CARD, MARKER, measured_on_eval, without_paths
from chatgpt.monitor.run_folder import RunRecord, Start
from chatgpt.testing import byte_tokenizer, tiny_causal_lm

SECRET = '/home/private-person/project-x'


def record(**changes: Any) -> RunRecord:
    start = Start(
        at='2031-01-01T00:00:00+00:00',
        phase=0,
        command=['python', f'{SECRET}/train.py', '--api_key=abc'],
        git={'commit': 'feedbeef', 'dirty': False},
        versions={'python': '3.11.7', 'chatgpt': '9.9', 'torch': '2.13.0'},
        machine={'system': 'Linux private-host', 'processor': 'a secret one', 'gpus': []},
    )
    given: dict[str, Any] = {
        'method': 'ppo',
        'trainer': 'PPOTrainer',
        'settings': {'prompt_path': f'{SECRET}/data/prompts.jsonl', 'reward_fn': f'{SECRET}/r.py:score', 'lr': 3e-4}
        | {'kl_coef': 0.1, 'save_path': f'{SECRET}/out', 'reward_model': None, 'note': f'see {SECRET}/notes/a.txt'},
        'defaults': {'prompt_path': None, 'reward_fn': None, 'lr': 1e-5, 'kl_coef': 0.1, 'save_path': 'outputs/x'},
        'generation': {'max_new_tokens': 32, 'temperature': 0.7, 'do_sample': True, 'top_k': 0, 'top_p': 1.0},
        'strategy': {'name': 'NaiveStrategy', 'world_size': 1, 'precision': 'fp32', 'device': 'cpu', 'seed': 7},
        'reward': 'score, source 0123abcd',
        'data': {'prompts': 64, 'distinct': 60, 'cut': 3, 'skipped': 0},
        'num_phases': 20,
        'phase': 20,
        'status': 'ended',
        'starts': [start],
    }
    return RunRecord(**given | changes)


def rows(num: int = 20) -> list[dict[str, Any]]:
    return [
        {'step': i, 'rollout/score_mean': i / 10, 'rollout/kl_mean': i / 4, 'rollout/ended_share': 0.75}
        for i in range(1, num + 1)
    ]


EVALS = [{'step': s, 'eval/score_mean': v, 'eval/score_mean_best': 9.0} for s, v in ((0, 0.25), (10, 1.75), (20, 1.5))]
SAMPLE = {'step': 20, 'prompt': 'one day', 'response': ' a fox', 'score': 1.25}


def facts(**changes: Any) -> ModelFacts:
    given: dict[str, Any] = {'record': record(), 'metrics': rows(), 'eval': EVALS, 'samples': [SAMPLE]}
    given |= {'source': 'gpt2', 'parameters': 124_439_808, 'family': 'gpt2', 'run_name': 'words'}
    return ModelFacts(**given | changes)


def written(folder: Path, what: ModelFacts | None = None, **options: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    assert write_card(folder, what or facts(), **options)
    return (folder / CARD).read_text()


# ---------------------------------------------------------------- the front matter


def test_the_hub_reads_what_was_measured(tmp_path):
    from huggingface_hub import ModelCard

    data = ModelCard(written(tmp_path / 'actor')).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ('gpt2', 'transformers', 'text-generation')
    assert data.tags == ['chatgpt-rlhf', 'ppo', 'rlhf'] and data.license is None and data.datasets is None
    (result,) = data.eval_results  # the last, which is not the best
    assert (result.metric_name, result.metric_type, result.metric_value) == ('eval/score_mean', 'score_mean', 1.5)
    assert data.model_name == 'words' and result.dataset_type == 'local'


def test_a_folder_passes_on_its_base_model_and_licence(tmp_path):
    """PPO on an SFT model of gpt2, with a licence added to its card."""
    from huggingface_hub import ModelCard

    written(tmp_path / 'sft' / 'actor', facts(source='gpt2', run_name='sft', more={'license': 'mit'}))
    text = written(tmp_path / 'ppo', facts(source=str(tmp_path / 'sft' / 'actor')))
    data = ModelCard(text).data
    assert (data.base_model, data.license) == ('gpt2', 'mit')
    assert 'made of the model `sft`, which is made of [gpt2](https://huggingface.co/gpt2)' in text
    (tmp_path / 'sft' / 'actor' / CARD).write_text('---\n: [ no yaml\n---\n')
    assert ModelCard(written(tmp_path / 'ppo', facts(source=str(tmp_path / 'sft' / 'actor')))).data.base_model is None
    assert str(tmp_path) not in text


# ---------------------------------------------------------------- content


def test_a_card_has_method_settings_and_data(tmp_path):
    text = written(tmp_path / 'actor')
    assert '# words\n\n`words` is a language model, made of [gpt2](https://huggingface.co/gpt2) (gpt2, ' in text
    assert 'trained with ppo by chatgpt-rlhf' in text
    assert '20 learning phases in fp32, one process, seed 7.' in text
    assert '| prompt_path | `prompts.jsonl` | 64 |' in text and '| reward_fn | `r.py:score` |' in text
    assert '60 of the 64 prompts are distinct.' in text and '3 were cut, since they were too long.' in text
    assert '| `eval/score_mean` | 0.25 | 1.5 | 1.75 |' in text
    changed, everything = text.split('## Settings')[1].split('<details>')
    assert '| `lr` | `0.0003` | `1e-05` |' in changed and 'kl_coef' not in changed and 'kl_coef: 0.1' in everything
    assert 'python 3.11.7, chatgpt 9.9, torch 2.13.0' in text


LIMITS = {
    'the reward': ({}, 'optimised for `r.py:score`'),
    'length': ({}, '25 % of its last responses were cut off by the limit of 32 tokens'),
    'length of episodes': (  # 25 % did not end, mostly because no turns were left
        {'metrics': [row | {'environment/end_tokens_share': 0.15} for row in rows()]},
        '15 % of its last responses were cut off',
    ),
    'rewards of an environment': ({'record': record(settings={}, reward='EnvironmentScorer')}, "environment's reward."),
    'few prompts': ({}, 'It has seen 60 prompts only'),
    'no evaluation': ({'eval': ()}, 'not evaluated on data that it was not trained on'),
    'findings': ({'findings': [{'step': 3, 'finding': 'kl-runs-away'}] * 2}, 'run found: `kl-runs-away`.'),
    'failed': ({'record': record(status='failed')}, 'The run ended with an error.'),
    'always': ({'record': None}, 'It was not evaluated for truth, safety, bias or privacy'),
    'a reward model as reward': (
        {'record': record(settings={}, reward=f'RewardModelScorer, {SECRET}/rm')},
        'optimised for the reward model `rm`.',
    ),
    'several rewards': (
        {'record': record(settings={}, reward=[[0.5, 'one, source 1'], [2.0, 'EnvironmentScorer, form']])},
        "a weighted sum of rewards: 0.5 × `one`, 2 × the environment's reward `form`.",
    ),
}


@pytest.mark.parametrize('name', LIMITS)
def test_limits_follow_the_run(tmp_path, name):
    changes, sentence = LIMITS[name]
    assert sentence in written(tmp_path / 'actor', facts(**changes)).replace('\n', ' ')


def test_limits_that_do_not_hold_are_not_named(tmp_path):
    own = record(data={'prompts': 5000, 'distinct': 5000, 'cut': 0})
    evals = [*EVALS, {'step': 20, 'eval/metrics/truth': 0.5}]
    metrics = [row | {'rollout/ended_share': 1.0, 'rollout/kl_mean': 0.0} for row in rows()]
    episodes = [row | {'environment/end_tokens_share': 0.0} for row in rows()]  # no turns were left
    assert 'cut off' not in written(tmp_path / 'episodes', facts(metrics=episodes))
    text = written(tmp_path / 'actor', facts(record=own, eval=evals, metrics=metrics)).split('## Limits')[1]
    for words in ('only.', 'cut off', 'nats', 'same reward', 'not trained on', 'checks during', 'stopped'):
        assert words not in text.split('## Settings')[0], words


# ---------------------------------------------------------------- excluded content


def test_nothing_of_the_machine(tmp_path):
    text = written(tmp_path / 'actor', facts(source=f'{SECRET}/models/base'))
    for secret in ('private', 'project-x', 'api_key', 'feedbeef', 'a secret one', 'outputs/x', '2031'):
        assert secret not in text, secret
    assert 'note: see a.txt' in text and 'the model `base`' in text


def test_a_home_folder_is_not_the_name_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path / 'alice'))
    text = written(tmp_path / 'alice' / 'actor', facts(run_name=None))
    assert '\n# actor\n' in text and 'alice' not in text
    assert '\n# words\n' in written(tmp_path / 'alice' / 'words' / 'actor', facts(run_name=None))


def test_paths_lose_their_folders():
    shown = {'/a/b/c.json': 'c.json', '/a b/c d/': 'c d', '~/x/y.py:score': 'y.py:score', r'C:\Users\me\m.bin': 'm.bin'}
    shown |= {'a/b/c': 'c', 'org/model': 'org/model', 'yes / no': 'yes / no', 's3://bucket/key': 'key'}
    shown |= {'</answer>': '</answer>', '<x></y>': '<x></y>', '</home/me/run>': 'run>'}
    shown |= {'from /a/b/c to ~/d/e': 'from c to e', Path('/a/b'): 'b'}
    assert {value: without_paths(value) for value in shown} == shown
    assert without_paths({'x': ['/a/b', 3, None]}) == {'x': ['b', 3, None]}


def test_the_value_before_training_is_that_of_step_0():
    steps = [0, 5, 9]
    found = {'eval/score_mean': (steps, [None, 1.0, 2.0]), 'eval/length_mean': (steps, [3.0, 1.0, 2.0])}
    assert [row[:2] for row in measured_on_eval(found)] == [('eval/score_mean', None), ('eval/length_mean', 3.0)]


def test_what_is_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('org/model').mkdir(parents=True)
    assert hub_name('org/model') is None and hub_name('org/other') == 'org/other' and hub_name('gpt2') == 'gpt2'
    for other in ('data.jsonl', 'a/b/c', './a', '/a', '~/a', '', None, 'a b', 'rewards.py'):
        assert hub_name(other) is None, other


# ---------------------------------------------------------------- texts of models


HOSTILE = '---\n# title\n```\n````\n| a | <script>alert(1)</script> [x](javascript:1) \u202eesrever\x07 ' + MARKER


def test_texts_show_as_they_are(tmp_path):
    from huggingface_hub import ModelCard

    text = written(tmp_path / 'actor', facts(samples=[SAMPLE | {'prompt': HOSTILE, 'response': HOSTILE * 20}]))
    assert ModelCard(text).data.base_model == 'gpt2'
    markdown = pytest.importorskip('markdown', reason='needs the package Markdown')
    html = markdown.markdown(text.split('---\n', 2)[2], extensions=['fenced_code', 'tables'])
    assert '<script>' not in html and '<a href="javascript' not in html and '&lt;script&gt;alert(1)' in html
    assert html.count('<h1>') == 1 and '\u202e' not in text and '\\u202e' in text and '\\u0007' in text
    assert len(text) < 16_000 and ' …' in text  # a long one is cut


# ---------------------------------------------------------------- the files


def test_a_page_that_is_not_ours_stays(tmp_path):
    text = written(tmp_path)
    assert write_card(tmp_path, facts(source='other')) and 'other' in (tmp_path / CARD).read_text()
    mine = ''.join(line for line in text.splitlines(keepends=True) if MARKER not in line)
    (tmp_path / CARD).write_text(mine)
    assert not write_card(tmp_path, facts(source='third'))
    assert (tmp_path / CARD).read_text() == mine


# ---------------------------------------------------------------- of trainers; the code of a card runs


def run_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Runs the code of a folder's card in the parent folder; returns its variables and output."""
    found = re.search(r'^```python\n(.*?)^```', (folder / CARD).read_text(), re.M | re.S)
    assert found is not None
    names: dict[str, Any] = {}
    capsys.readouterr()
    exec(compile(found[1], CARD, 'exec'), names)
    return names, capsys.readouterr().out


def test_a_policy_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = byte_trainer(tmp_path / 'words')
    trainer.fit(['a', 'b', 'a'], max_timesteps=2, update_timesteps=1)
    trainer.save_pretrained('words/actor')
    text = Path('words/actor', CARD).read_text()
    assert '# words\n' in text and 'trained with rloo by' in text
    assert '2 learning phases in fp32, one process, seed 3, learning rate 0.1.' in text
    assert '2 of the 3 prompts are distinct' in text
    assert str(tmp_path) not in text
    monkeypatch.chdir(tmp_path / 'words')
    names, printed = run_code(Path('actor'), capsys)
    assert names['output'].shape[1] <= names['start'] + 3 and printed.endswith('\n')


def test_a_reward_model_and_a_critic(tmp_path, monkeypatch, capsys):
    """The card's code prints the score of the model."""
    from chatgpt.batching import collate
    from chatgpt.nn import Critic, RewardModel
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.trainer.saving import save_pretrained
    from chatgpt.types import Sequence

    monkeypatch.chdir(tmp_path)
    tokenizer, strategy = byte_tokenizer(), NaiveStrategy()
    torch.manual_seed(1)
    model = RewardModel(tiny_causal_lm('gpt2', **SIZES).base_model)
    with torch.no_grad():
        model.score_bias.fill_(0.5)
    save_pretrained(strategy, model, tmp_path / 'rm', tokenizer=tokenizer)
    names, printed = run_code(Path('rm'), capsys)
    ids = names['inputs']['input_ids'][0]
    with torch.no_grad():
        counted = torch.ones(len(ids) - 3, dtype=torch.bool)
        sequence = Sequence(prompt_ids=ids[:3], response_ids=ids[3:], response_mask=counted)
        want = model(collate([sequence]))
    assert float(printed) == pytest.approx(float(want), abs=1e-5)
    card = Path('rm', CARD).read_text()
    assert 'pipeline_tag: text-classification' in card and 'Scores of answers to the same prompt' in card
    save_pretrained(strategy, Critic(tiny_causal_lm('gpt2', **SIZES).base_model), tmp_path / 'critic')
    assert isinstance(run_code(Path('critic'), capsys)[0]['model'], Critic)
    assert 'library_name: chatgpt-rlhf' in Path('critic', CARD).read_text()


def test_a_classifier_of_two_labels(tmp_path, monkeypatch, capsys):
    """Its score is the difference of its logits, less the bias of the scores."""
    from transformers import BertConfig, BertForSequenceClassification

    from chatgpt.nn import RewardModel
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.trainer.saving import save_pretrained

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {'vocab_size': 259, 'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    config = BertConfig(**sizes, intermediate_size=16, initializer_range=0.5, num_labels=2)
    classifier = BertForSequenceClassification(config).eval()
    model = RewardModel(classifier)
    with torch.no_grad():
        model.score_bias.fill_(0.5)
    save_pretrained(NaiveStrategy(), model, tmp_path / 'rm', tokenizer=byte_tokenizer())
    names, printed = run_code(Path('rm'), capsys)
    with torch.no_grad():
        first, second = classifier(**names['inputs']).logits[0].tolist()
    assert float(printed) == pytest.approx(second - first - 0.5, abs=1e-5)
    assert abs(first) > 0.01


def test_adapters_alone(tmp_path, monkeypatch, capsys):
    from chatgpt.trainer.saving import save_adapter

    monkeypatch.chdir(tmp_path)
    trainer = byte_trainer(None, model={'lora_rank': 2})
    base = tiny_causal_lm('gpt2', **SIZES)
    base.save_pretrained('base')
    byte_tokenizer().save_pretrained('base')
    save_adapter(trainer.actor, tmp_path / 'adapter', base_model=str(tmp_path / 'base'))
    text = Path('adapter', CARD).read_text()
    assert 'library_name: peft' in text and '- lora' in text and str(tmp_path) not in text
    assert 'is a LoRA adapter of rank 2, to be loaded onto the model `base`' in text
    assert "base = 'base'  # the folder of the model that it was trained on\nmodel = " in text
    save_adapter(trainer.actor, tmp_path / 'hub', base_model='me/base')
    text = Path('hub', CARD).read_text()
    assert 'base_model: me/base\n' in text and 'base_model_relation: adapter' in text and "base = 'me/base'" in text
    pytest.importorskip('peft', reason='the code of this card needs peft')
    names, _ = run_code(Path('adapter'), capsys)
    assert type(names['model']).__name__ == 'PeftModelForCausalLM'


def test_a_chat_model_and_its_reward_model(tmp_path, monkeypatch, capsys):
    from chatgpt.data.formats import choose_text
    from chatgpt.nn import Actor, RewardModel
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.trainer.saving import save_pretrained

    monkeypatch.chdir(tmp_path)
    tokenizer, strategy = byte_tokenizer(), NaiveStrategy()
    tokenizer.chat_template = '{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}'
    choose_text(tokenizer, True)
    save_pretrained(strategy, Actor(tiny_causal_lm('gpt2', **SIZES)), tmp_path / 'chat', tokenizer=tokenizer)
    save_pretrained(strategy, RewardModel(tiny_causal_lm('gpt2', **SIZES).base_model), 'rm', tokenizer=tokenizer)
    for folder, text in (('chat', '<u>hi there'), ('rm', '<u>Tell me a short story.<a>Yes.')):
        if folder == 'chat':
            written(Path(folder), facts(samples=[SAMPLE | {'prompt': '<u>hi there', 'last_turn': 'hi there'}]))
        names, _ = run_code(Path(folder), capsys)
        assert bytes(names['inputs']['input_ids'][0].tolist()).decode() == text


def test_a_card_that_fails_does_not_stop_the_save(tmp_path, monkeypatch):
    from chatgpt.trainer import saving

    def fails(*args: Any, **options: Any) -> None:
        raise OSError('the disk is full')

    monkeypatch.setattr(saving, 'write_card', fails)
    with pytest.warns(UserWarning, match=r'the model is saved without a card \(OSError: the disk is full\)'):
        byte_trainer(None).save_pretrained(tmp_path / 'actor')
    assert (tmp_path / 'actor' / 'model.safetensors').is_file() and not (tmp_path / 'actor' / CARD).exists()


def test_secrets_within_settings_are_not_shown(tmp_path):
    options = {'api_key': 'sk-1234', 'turns': 3, 'url': 'https://me:pw@host/x'}
    text = written(tmp_path / 'actor', facts(record=record(settings={'environment_options': options})))
    assert 'turns: 3' in text and 'api_key' in text
    assert 'sk-1234' not in text and 'me:pw' not in text


def test_samples_are_of_eval_prompts_only_where_they_are(tmp_path):
    assert 'of the training prompts after phase' in written(tmp_path / 'a')
    assert 'of the eval prompts after phase' in written(tmp_path / 'b', facts(of_eval=True))
