"""trlX's config objects: files of both eras, errors for typos, and the conversion of every field."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from chatgpt.testing.fakes import char_tokenizer
from chatgpt.trainer.schedule import lr_factor
from chatgpt.types import Sample
from chatgpt_compat import trlx
from chatgpt_compat.statistics import TRLX, evaluated, named
from chatgpt_compat.trlx import INSTEAD, SERVED, config, settings
from chatgpt_compat.trlx.config import (
    ILQLConfig,
    SFTConfig,
    TrainConfig,
    TRLConfig,
    default_ilql_config,
    default_nemo_2b_config,
    default_ppo_config,
    default_sft_config,
)
from chatgpt_compat.trlx.pipeline import PromptPipeline, prompts_of, register_datapipeline
from chatgpt_compat.trlx.rewards import RewardFunction, metric_function
from chatgpt_compat.trlx.trainers import trainer_class_of

PAGES = sorted((Path(__file__).resolve().parents[2] / 'docs' / 'coming_from' / 'trlx').glob('*.md'))


def test_update_takes_dotted_names_sections_and_bare_names():
    base = default_ppo_config()
    changed = TRLConfig.update(
        base.to_dict(), {'train.seed': 7, 'method': {'gamma': 0.9, 'gen_kwargs': {'top_p': 0.5}}, 'lam': 0.8}
    )
    assert (changed.train.seed, changed.method.gamma, changed.method.lam) == (7, 0.9, 0.8)
    assert changed.method.gen_kwargs == {'max_new_tokens': 40, 'top_k': 0, 'top_p': 0.5, 'do_sample': True}
    assert (base.train.seed, base.method.gamma, base.method.gen_kwargs['top_p']) == (1000, 1, 1.0)  # a copy
    assert default_ilql_config().evolve(method=dict(gamma=0.5)).method.gamma == 0.5  # noqa: C408
    assert json.loads(str(changed))['train']['seed'] == 7
    assert TRLConfig.from_dict(changed.to_dict()) == changed


@pytest.mark.parametrize(
    ('names', 'near'),
    [
        ({'method.gama': 1}, 'gamma'),
        ({'method': {'cliprang': 0.1}}, 'cliprange'),
        ({'optimiser.kwargs.lr': 1}, 'optimizer'),
        ({'bach_size': 3}, 'train.batch_size'),
        ({'method.init_kl': 3}, 'init_kl_coef'),
    ],
)
def test_a_typo_is_an_error_with_the_nearest_name(names, near):
    with pytest.raises(ValueError, match=near):
        TRLConfig.update(default_ppo_config(), names)


def test_a_typo_elsewhere():
    with pytest.raises(ValueError, match="TrainConfig has no 'epoch'; did you mean epochs"):
        TrainConfig(total_steps=1, epochs=1, batch_size=1, checkpoint_interval=1, eval_interval=1, epoch=2)
    chosen = default_sft_config()
    with pytest.raises(ValueError, match='did you mean batch_size'):
        chosen.train.batchsize = 3
    with pytest.warns(UserWarning, match='RIGHT_ANSWER is kept as a note of yours'):
        chosen.model.RIGHT_ANSWER = 2
    assert chosen.model.RIGHT_ANSWER == 2 and 'RIGHT_ANSWER' not in chosen.to_dict()['model']
    with pytest.raises(ValueError, match='did you mean'):
        TRLConfig.from_dict(chosen.to_dict() | {'tokeniser': {}})
    with pytest.raises(ValueError, match='PPOConfig'):
        TRLConfig.from_dict(chosen.to_dict() | {'method': {'name': 'PPOConfg'}})
    with pytest.raises(ValueError, match=r'model\.num_layers_unfrozen|no .weight_decay'):
        TRLConfig.update(chosen, {'num_layer_unfrozen': 1})
    with pytest.raises(ValueError, match='AcceleratePPOTrainer'):
        trainer_class_of('AcceleratePPOTrainr')


def test_methods_of_a_script_are_registered():
    @config.register_method
    @dataclass
    class MyMethod(config.MethodConfig):
        depth: int = 3

    made = TRLConfig.from_dict(default_sft_config().to_dict() | {'method': {'name': 'mymethod', 'depth': 4}})
    assert isinstance(made.method, MyMethod) and made.method.depth == 4


def test_defaults_are_trlx_s():
    ppo, ilql, sft = default_ppo_config(), default_ilql_config(), default_sft_config()
    m = ppo.method
    assert (m.num_rollouts, m.chunk_size, m.ppo_epochs, m.init_kl_coef, m.vf_coef) == (128, 128, 4, 0.001, 1)
    assert (m.cliprange_reward, m.scale_reward, m.target) == (10, 'ignored', None)
    assert (ppo.train.batch_size, ppo.optimizer.kwargs['lr'], ppo.model.num_layers_unfrozen) == (32, 3e-5, 2)
    assert (ilql.method.tau, ilql.method.alpha, ilql.method.steps_for_target_q_sync) == (0.7, 0.001, 5)
    assert (ilql.train.batch_size, ilql.train.seq_length) == (128, 64)
    assert (sft.train.batch_size, sft.optimizer.kwargs['lr']) == (8, 1e-4)
    with pytest.raises(ValueError, match='NeMo'):
        default_nemo_2b_config()


# ---------------------------------------------------------------------- conversion of fields


def test_every_name_field_and_statistic_is_on_a_page():
    text, default = '\n'.join(page.read_text() for page in PAGES), default_ppo_config()
    kinds = [(s, type(getattr(default, s))) for s in config.SECTIONS] + [('method', ILQLConfig), ('method', SFTConfig)]
    there = {f'| `{section}.{name}` |' for section, kind in kinds for name in kind.names()}
    there |= {f'`{name}`' for name in (*SERVED, *INSTEAD)} | {f'| `{name}` |' for name in TRLX}
    assert not [name for name in there if name not in text]


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        ({'model.model_arch_type': 'prefix'}, 'is not known'),
        ({'model.num_layers_unfrozen': 0}, 'leaves no block'),
        ({'train.minibatch_size': 3}, 'must divide batch_size=32'),
        ({'train.tracker': 'mlflw'}, 'choose one of tensorboard, wandb, trackio, mlflow, or None; did you mean mlflow'),
        ({'train.trainer_kwargs': {'stratgy': 'ddp'}}, "trainer_kwargs has no 'stratgy'; did you mean strategy"),
        ({'train.trainer_kwargs': {'config': 3}}, "trainer_kwargs has no 'config'"),
        ({'tokenizer.tokenizer_path': ''}, 'no tokenizer_path'),
        ({'train.epochs': 0}, 'at least 1'),
        ({'train.trainer': 'NeMoPPOTrainer'}, 'FSDP or ColossalAI'),
        ({'train.trainer': 'AccelerateRFTTrainer'}, 'needs a RFTConfig'),
        ({'train.trainer': 'AccelerateILQLTrainer'}, 'does not learn from a reward_fn|needs a ILQLConfig'),
        ({'optimizer.name': 'adamw_8bit_bnb'}, 'adamw, sgd, adam'),
        ({'optimizer.kwargs.leraning_rate': 1e-3}, "no 'leraning_rate'"),
        ({'scheduler.name': 'cosine'}, 'cosine_annealing, linear'),
        ({'scheduler.kwargs': {'T_max': None}}, 'needs kwargs.T_max'),
        ({'method.scale_reward': 'runing'}, "choose 'running'"),
        ({'model.peft_config': {'peft_type': 'PREFIX_TUNING'}}, 'PREFIX_TUNING is not served'),
        ({'model.peft_config': {'peft_type': 'LORA', 'use_dora': True}}, 'use_dora=True cannot be honoured'),
        ({'method.gen_kwargs.top_k': [1, 2], 'method.gen_kwargs.top_p': [0.1, 0.2]}, 'several lists'),
        ({'train.seq_length': 40}, 'leaves no token for a prompt'),
    ],
)
def test_unsupported_fields_are_errors_before_anything_is_loaded(names, message):
    chosen = TRLConfig.update(default_ppo_config(), {'model.model_path': '/nowhere', **names})
    with pytest.raises(ValueError, match=message):
        trlx.train(reward_fn=lambda samples, **_: [0.0], prompts=['a'], config=chosen)


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({}, 'give a reward_fn'),
        ({'samples': ['a', 'b'], 'rewards': [1.0]}, '2 samples but 1 rewards'),
        ({'reward_fn': len, 'samples': ['a']}, 'both reward_fn and samples'),
        ({'samples': ['a'], 'rewards': [1.0], 'config': default_sft_config()}, 'does not learn from rewards'),
    ],
)
def test_mistakes_in_the_arguments_of_train(given, message):
    with pytest.raises(ValueError, match=message):
        trlx.train(**given)


@pytest.mark.parametrize('name', ['cosine_annealing', 'rising cosine_annealing', 'linear'])
def test_learning_rates_are_torch_s(name):
    """Compares with torch's schedulers step by step, also for a rising rate (`eta_min` above it)."""
    end, name = (5e-3 if 'rising' in name else 2e-4), name.removeprefix('rising ')
    kwargs = (
        {'T_max': 8, 'eta_min': end}
        if name == 'cosine_annealing'
        else {'start_factor': 1.0, 'end_factor': 0.1, 'total_iters': 8}
    )
    chosen = default_sft_config()
    chosen.optimizer.kwargs['lr'] = 1e-3
    chosen.scheduler = config.SchedulerConfig(name, kwargs)
    assert settings.schedule_of(default_ppo_config()) == {'lr_schedule': 'constant'}  # a cosine longer than any run
    ours = settings.schedule_of(chosen)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    cls = {'cosine_annealing': torch.optim.lr_scheduler.CosineAnnealingLR, 'linear': torch.optim.lr_scheduler.LinearLR}
    scheduler = cls[name](optimizer, **kwargs)
    for step in range(8):
        factor = lr_factor(
            ours['lr_schedule'], step, total_steps=ours['lr_decay_steps'], end_factor=ours['lr_end_factor']
        )
        assert 1e-3 * factor == pytest.approx(optimizer.param_groups[0]['lr'], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_the_length_of_a_ppo_run():
    chosen = TRLConfig.update(
        default_ppo_config(),
        {'num_rollouts': 100, 'chunk_size': 40, 'ppo_epochs': 3, 'batch_size': 32, 'total_steps': 25, 'epochs': 100},
    )
    # three chunks are 120 rollouts, four batches, twelve steps a phase; 25 steps end in the third phase
    assert settings.ppo_length(chosen) == (3, 3, 12)
    chosen.train.epochs = 1
    assert settings.ppo_length(chosen).phases == 1


def test_without_a_penalty_no_target_adapts_it():
    assert settings.ppo_settings(TRLConfig.update(default_ppo_config(), {'method.init_kl_coef': 0.0})).kl_target is None


def test_the_horizon_counts_passes():
    chosen = TRLConfig.update(default_ppo_config(), {'target': 6, 'ppo_epochs': 2, 'batch_size': 16})
    found = settings.ppo_settings(chosen)
    # trlX multiplies by 1 + clip · 16 / 10000 after each of two passes, here once by 1 + clip · 128 / horizon
    once, twice = 1 + 0.2 * 128 / found.kl_horizon, (1 + 0.2 * 16 / 10000) ** 2
    assert once == pytest.approx(twice, abs=1e-6)
    assert found.kl_target == 6 and found.ratio_threshold is None and found.max_grad_norm is None


# ---------------------------------------------------------------------- functions


def sample(text, *, reason='length', columns=None, prompt='p '):
    ids = torch.tensor(char_tokenizer()(text).input_ids)
    zeros = torch.zeros(len(ids))
    return Sample(
        index=0,
        group=0,
        prompt_ids=torch.tensor([5]),
        response_ids=ids,
        response_mask=torch.ones(len(ids), dtype=torch.bool),
        logprobs=zeros,
        filtered_logprobs=zeros,
        edge_distances=zeros,
        finish_reason=reason,
        prompt_text=prompt,
        response_text=text,
        columns=columns or {},
    )


class OneProcess:
    """A strategy of one process, with the methods that a scorer calls."""

    def all_gather_object(self, value):
        return [value]

    def run_on_rank0(self, function):
        return function()


def called(function):
    """Calls `function` as a reward of prompt 'a' and output 'b' and returns its result."""
    seen = []

    @functools.wraps(function)
    def noted(*args, **kwargs):
        seen.append(function(*args, **kwargs))
        return [0.0]

    given = sample('b', prompt='a', columns={'label': 3})
    RewardFunction(noted, char_tokenizer()).score([given], OneProcess())
    return seen[0]


def test_functions_are_called_as_in_every_version():
    assert called(lambda samples, **kwargs: (samples, {'label', 'outputs', 'prompts', 'tokenizer'} <= set(kwargs))) == (
        ['ab'],
        True,
    )
    assert called(lambda walks: walks) == ['ab']  # 0.2
    assert called(lambda walks, **kwargs: (walks, kwargs['label'])) == (['ab'], [3])
    assert called(lambda samples, queries, responses: [samples, queries, responses]) == [['ab'], ['a'], ['b']]
    assert called(lambda outputs, label: [outputs, label]) == [['b'], [3]]


def test_scores_are_clipped_and_fitted_to_the_tokens():
    score = RewardFunction(lambda samples, **_: [[5.0, 1.0]], char_tokenizer(), clip=2.0, divisor=4.0)
    torch.testing.assert_close(score.score([sample('abc')], OneProcess())[0], torch.tensor([0.5, 0.25, 0.0]))
    longer = RewardFunction(lambda samples, **_: [torch.tensor([1.0, 2.0, 3.0])], char_tokenizer())
    torch.testing.assert_close(longer.score([sample('ab')], OneProcess())[0], torch.tensor([1.0, 5.0]))
    single = RewardFunction(lambda samples, **_: torch.tensor([[7.0]]), char_tokenizer(), clip=3.0)
    assert single.score([sample('ab')], OneProcess()) == [3.0]


def test_outputs_end_with_the_end_token_where_they_ended():
    seen = []
    score = RewardFunction(lambda outputs, **_: seen.append(outputs) or [0.0], char_tokenizer())
    score.score([sample('ab ', reason='stop')], OneProcess())
    score.score([sample('ab ')], OneProcess())
    assert seen == [['ab<eos>'], ['ab ']]  # blanks before a stop sequence are stripped


def test_one_number_stands_for_every_sample():
    found = metric_function(lambda samples: {'all': 2.0, 'each': torch.tensor([1.0, 3.0]), 'texts': ['x', 'y']})
    assert found(samples=['a', 'b'], prompts=['', ''], outputs=['a', 'b']) == {'all': [2.0, 2.0], 'each': [1.0, 3.0]}


def test_prompts_do_not_change_the_given_dicts():
    tokenizer, mine = char_tokenizer(), [{'prompt': 'abcdef', 'label': 3}]
    tokenizer.truncation_side = 'left'
    made = PromptPipeline(mine, 2, tokenizer)
    assert mine == [{'prompt': 'abcdef', 'label': 3}]
    prompt = prompts_of(made, tokenizer)[0]
    assert (tokenizer.decode(prompt.ids), prompt.columns) == ('ef', {'label': 3})
    assert prompts_of(PromptPipeline(['ab'], tokenizer), tokenizer)[0].ids.tolist() == tokenizer('ab').input_ids
    batch = next(iter(PromptPipeline(['a', 'bcd'], 8, tokenizer).create_loader(2)))
    assert batch['input_ids'].shape == (2, 3)


def test_a_pipeline_of_padded_ids_loses_its_padding():
    @register_datapipeline
    class Padded:
        rows = (torch.tensor([0, 0, 5, 6]), torch.tensor([7, 0]), torch.tensor([0, 0]))

        def __getitem__(self, index):
            return self.rows[index]

        def __len__(self):
            return 3

    found = [prompt.ids.tolist() for prompt in prompts_of(Padded(), char_tokenizer())]
    assert found == [[5, 6], [7], [1]]  # a row of padding becomes the begin token


def test_a_mask_says_what_is_padding():
    rows = [
        {'input_ids': [0, 0, 5, 0], 'attention_mask': [0, 1, 1, 1]},  # the pad token is also the prompt's own
        {'input_ids': torch.tensor([[7, 0]]), 'attention_mask': torch.tensor([[1, 0]]), 'label': 3},
        {'input_ids': [0], 'attention_mask': [0]},
    ]
    found = prompts_of(rows, char_tokenizer())
    assert [prompt.ids.tolist() for prompt in found] == [[0, 5, 0], [7], [1]]
    assert found[1].columns == {'label': 3}


def test_statistics_from_hand():
    ppo = settings.ppo_settings(default_ppo_config())
    metrics = {
        'ppo/policy_loss': 0.5,
        'ppo/value_loss': 0.25,
        'ppo/return_var': 4.0,
        'rollout/kl_k3_mean': 0.09,
        'rollout/response_len_mean': 9.0,
        'eval/score_mean@beta=1': 3.0,
        'eval/score_mean_best': 4.0,
        'eval/metrics/x': 5.0,
        'ppo/lr': 0.1,
    }
    found = named(TRLX, metrics, ppo) | evaluated(metrics)
    assert found.pop('policy/kl_per_token') == pytest.approx(0.1)
    assert found.pop('policy/sqrt_kl') == pytest.approx(0.3)
    assert found == {
        'losses/policy_loss': 0.5,
        'losses/value_loss': 0.25,
        'losses/total_loss': 0.75,
        'returns/std': 2.0,
        'reward/mean@beta=1': 3.0,
        'metrics/x': 5.0,
        'learning_rate_group_0': 0.1,
    }
    ilql = settings.ilql_settings(default_ilql_config())
    assert named(TRLX, {'ilql/cql_loss': 0.3}, ilql)['losses/loss_cql'] == pytest.approx(3.0)


def test_other_trackers_of_the_library(monkeypatch):
    from chatgpt.trainer.callbacks import TRACKERS, Callback, trackers

    monkeypatch.setattr(trackers, 'need_package', lambda *_: None)
    config = default_sft_config().evolve(train={'tracker': 'mlflow', 'project_name': 'mine'})
    (made,) = settings.tracker(config)
    assert isinstance(made, trackers.MLflow) and made.experiment == 'mine'
    config = config.evolve(train={'tracker': 'trackio', 'run_name': 'first', 'tags': ['a']})
    with pytest.warns(UserWarning, match="train.run_name, train.tags have no effect with tracker='trackio'"):
        (made,) = settings.tracker(config)
    assert isinstance(made, trackers.Trackio) and made.project == 'mine'
    mine = type('Mine', (Callback,), {})
    monkeypatch.setitem(TRACKERS, 'mine', mine)
    config = default_sft_config().evolve(train={'tracker': 'mine'})
    settings.check(config)
    assert [type(c) for c in settings.tracker(config)] == [mine]


def test_wandb_without_a_login_is_offline(monkeypatch, tmp_path):
    for name in ('WANDB_MODE', 'WANDB_API_KEY', 'debug'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    with pytest.warns(UserWarning, match='nobody is logged in'):
        callbacks = settings.tracker(default_sft_config())
    assert callbacks[0].init['mode'] == 'offline' and callbacks[0].project == 'trlx'
    assert settings.tracker(default_sft_config().evolve(train={'tracker': None})) == []
