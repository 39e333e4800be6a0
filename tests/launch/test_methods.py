"""The table of methods: settings, trainer, model and reader of every entry fit; a user's own method is one line."""

from __future__ import annotations

import re
import shutil
from ast import literal_eval
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from chatgpt.launch.config_file import parse_run
from chatgpt.launch.inputs import read_inputs
from chatgpt.launch.methods import METHODS, Recipe
from chatgpt.launch.planning import setup_of
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import DataRun, PPORun, Run, run_class
from chatgpt.monitor.run_folder.rollouts import read_rollouts
from chatgpt.trainer import callbacks as cb
from chatgpt.trainer.objectives.config import SFTConfig
from chatgpt.trainer.objectives.reward_model import RewardModelConfig
from chatgpt.trainer.objectives.sft import SFTTrainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('name', METHODS)
def test_the_parts_of_an_entry_are_there_and_its_settings_are_settings(name):
    method = METHODS[name]
    run = run_class(name)
    assert issubclass(run, Run) and method.positional in run.field_names()
    assert set(method.part('config').field_names()) <= set(run.field_names()) | {'loss_type', 'gamma', 'weight'}
    assert callable(method.part('trainer')) and callable(method.part('reader'))
    assert {*method.settings, *method.defaults} <= set(run.field_names())
    if run is PPORun and name != 'ppo':
        run(**method.settings).validate()


NAMES = {'Dr. GRPO': 'dr_grpo', 'REINFORCE++ with baseline': 'reinforce++_baseline'}
CRITIC_FREE = {'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'rloo', 'reinforce++', 'reinforce++_baseline'}


def test_the_commands_have_the_settings_of_the_table_of_methods():
    text = (ROOT / 'docs/algorithms/ppo.md').read_text().split('## Other methods')[1]
    found = set()
    for row in re.findall(r'^\| .*\|$', text, re.MULTILINE):
        title, estimator, loss, _, kl, further = (cell.strip() for cell in row.strip('|').split(' |'))
        title = title.strip('[').split(']')[0]
        name = NAMES.get(title, title.lower())
        if name not in METHODS:
            continue
        found.add(name)
        run = run_class(name)(**METHODS[name].settings)
        assert estimator == repr(run.advantage_estimator) and repr(run.policy_loss) in loss
        stated = re.findall(r"(\w+)=(\d[\d.e-]*|'\w+')[,`]", f'{kl}, {further}')
        assert {key: getattr(run, key) for key, _ in stated} == {key: literal_eval(value) for key, value in stated}
        assert (kl == 'reward') == (run.kl_in == 'reward' and run.kl_coef > 0), name
    assert found >= CRITIC_FREE | {'ppo', 'vc-ppo', 'vapo', 'a2c'}


def test_the_presets_of_the_papers_and_what_overrides_them():
    """VAPO, arXiv 2504.05118, section 5.1; VC-PPO's values in its section 4.1."""
    found = {}
    for name in ('vc-ppo', 'vapo'):
        run = parse_run(
            run_class(name), description='', argv=['--kl_coef=0.02', '--critic_warmup_phases=9'], method=name
        )
        assert (run.method, run.save_path, run.kl_coef, run.critic_warmup_phases) == (name, f'outputs/{name}', 0.02, 9)
        assert (run.value_lam, run.gamma, run.eps_clip, run.aggregation) == (1.0, 1.0, 0.2, 'token')
        found[name] = run.lam, run.lam_length, run.eps_clip_high, run.num_samples_per_prompt, run.positive_coef
    assert found == {'vc-ppo': (0.95, None, None, 1, 0.0), 'vapo': (0.95, 0.05, 0.28, 16, 0.1)}
    with pytest.raises(ValueError, match='lam_length=0.05 takes the place of lam=0.9'):
        parse_run(run_class('vapo'), description='', argv=['--lam=0.9'], method='vapo').validate()


@dataclass(kw_only=True)
class MyConfig(SFTConfig):
    strength: float = 0.5
    """a setting of the user's method"""


class MyTrainer(SFTTrainer):
    seen: list[object] = []

    def __init__(self, *args, config, **options):
        self.seen.append(config)
        plain = SFTConfig(**{name: getattr(config, name) for name in SFTConfig.field_names()})
        super().__init__(*args, config=plain, **options)


def read_plainly(run, inputs):
    from chatgpt.data import load_demonstrations

    inputs.train = load_demonstrations(run.dataset, inputs.tokenizer)[0]


def read_pairs(run, inputs):
    from chatgpt.data import load_preferences

    inputs.train, inputs.validation = load_preferences(run.dataset, inputs.tokenizer)


def test_a_custom_method_is_one_line(monkeypatch, tmp_path, model_folder, capsys):
    monkeypatch.setitem(
        METHODS,
        'mine',
        Recipe(about='mine', config=MyConfig, trainer=MyTrainer, reader=read_plainly, defaults={'lr': 0.125}),
    )
    cls = run_class('mine')
    assert issubclass(cls, DataRun) and 'strength' in {f.name for f in fields(cls)}
    (tmp_path / 'data.jsonl').write_text('{"prompt": "one day", "response": " a fox"}\n' * 4)
    words = [str(tmp_path / 'data.jsonl'), f'--pretrain={model_folder}', f'--save_path={tmp_path}/run']
    run = parse_run(cls, description='', positional='dataset', argv=[*words, '--strength=0.75', '--max_epochs=1'])
    execute(run)
    (config,) = MyTrainer.seen
    assert (config.strength, run.lr) == (0.75, 0.125)
    assert (tmp_path / 'run' / 'actor' / 'config.json').is_file()


def test_a_custom_method_may_train_a_reward_model(monkeypatch, tmp_path, model_folder):
    class Mine(RewardModelConfig):
        pass

    recipe = METHODS.find('reward-model')
    monkeypatch.setitem(METHODS, 'mine', replace(recipe, config=Mine, run=None, reader=read_pairs))
    cls = run_class('mine')
    assert cls.trained == 'reward_model'
    (tmp_path / 'data.jsonl').write_text('{"prompt": "one day", "chosen": " a fox", "rejected": " a"}\n' * 4)
    words = [
        str(tmp_path / 'data.jsonl'),
        f'--pretrain={model_folder}',
        f'--save_path={tmp_path}/run',
        '--max_epochs=1',
    ]
    execute(parse_run(cls, description='', positional='dataset', argv=words))
    assert (tmp_path / 'run' / 'reward_model' / 'config.json').is_file()


@pytest.mark.parametrize(('settings', 'rate'), [({}, 1e-3), ({'critic': 'shared'}, 1e-3), ('grpo', None)])
def test_the_settings_that_a_run_writes_down_are_settings_of_such_a_run(settings, rate):
    """Without a critic critic_lr has no default."""
    run = PPORun(pretrain='embedded', **(METHODS[settings].settings if isinstance(settings, str) else settings))
    run.fill_defaults()
    assert run.critic_lr == rate
    PPORun.from_dict(run.to_dict()).validate()


def test_without_a_kl_penalty_no_copy_of_the_model_is_made(tmp_path, model_folder, capsys):
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "one day"}\n' * 8)
    (tmp_path / 'rewards.py').write_text(
        'def score(prompts, responses):\n    return [float(len(r)) for r in responses]\n'
    )
    words = [str(tmp_path / 'prompts.jsonl'), f'--pretrain={model_folder}', f'--reward_fn={tmp_path}/rewards.py:score']
    words += ['--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--max_new_tokens=4', '--max_epochs=1']

    def started(*own):
        """Returns the trainer after a phase, and whether its plan has a copy of the model, and a reference."""
        run = parse_run(
            PPORun, description='', positional='prompt_path', argv=[*words, *own, f'--save_path={tmp_path}/run']
        )
        shutil.rmtree(tmp_path / 'run', ignore_errors=True)
        setup = setup_of(read_inputs(run))
        return execute(run), setup.has_initial_model, setup.kl

    def of_phase():
        return cb.read_jsonl(tmp_path / 'run/metrics.jsonl')[-1]

    with_kl, copied, kl = started('--kl_coef=0.1')
    assert with_kl.maker.reference.initial_model is not None and copied and kl
    assert of_phase()['rollout/kl_mean'] == pytest.approx(0.0, abs=1e-5)
    without, copied, kl = started('--kl_coef=0')
    assert not without.maker.reference.exists and not copied and not kl
    assert 'rollout/kl_mean' not in of_phase() and 'kl' not in cb.read_jsonl(tmp_path / 'run/samples.jsonl')[0]
    assert all(row['kl'] is None for row in read_rollouts(tmp_path / 'run'))
    in_actor, copied, kl = started('--kl_coef=0', '--lora_rank=2')
    assert in_actor.maker.reference.exists and not copied and kl
    assert 'rollout/kl_mean' in of_phase()
