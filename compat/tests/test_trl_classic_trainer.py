"""TRL's classic trainer on this library's: arguments, shapes of inputs and outputs, logging, processes."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_hub import WRITE, serving, use
from torch import Tensor
from trl_page import KEYS

import chatgpt_compat.trl as trl
from chatgpt.nn import Actor
from chatgpt.testing.fakes import char_tokenizer, tiny_causal_lm
from chatgpt_compat.trl import core
from chatgpt_compat.trl.config import DEFAULTS, PPOConfig, is_second

QUERIES = [torch.tensor(ids) for ids in ([5, 9, 12], [8, 3], [21, 14, 6, 11], [4, 17, 30])]
SAMPLED = {'do_sample': True, 'top_k': 0.0, 'top_p': 1.0, 'min_length': -1, 'eos_token_id': -1}


def make(model: Any = None, ref_model: Any = None, *, trainer: dict[str, Any] | None = None, **settings: Any) -> Any:
    if model is None:
        model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    config = PPOConfig(**{'batch_size': 4, 'mini_batch_size': 4, 'ppo_epochs': 1} | settings)
    return trl.PPOTrainer(config, model, ref_model, char_tokenizer(), **trainer or {})


def step(trainer: Any, scores: Any = (1.0, 0.0, 2.0, -1.0), **more: Any) -> dict[str, Any]:
    responses = trainer.generate(QUERIES, return_prompt=False, max_new_tokens=5, **SAMPLED)
    return trainer.step(QUERIES, responses, [torch.tensor(s) for s in scores], **more)


# ---------------------------------------------------------------- config


def test_defaults_are_those_of_0_11_4() -> None:
    """The values are those of trl/trainer/ppo_config.py of that version."""
    theirs = {
        'seed': 0,
        'steps': 20000,
        'learning_rate': 1.41e-5,
        'adap_kl_ctrl': True,
        'init_kl_coef': 0.2,
        'kl_penalty': 'kl',
        'target': 6.0,
        'horizon': 10000.0,
        'gamma': 1.0,
        'lam': 0.95,
        'cliprange': 0.2,
        'cliprange_value': 0.2,
        'vf_coef': 0.1,
        'batch_size': 128,
        'mini_batch_size': 128,
        'gradient_accumulation_steps': 1,
        'ppo_epochs': 4,
        'max_grad_norm': None,
        'early_stopping': False,
        'target_kl': 1.0,
        'ratio_threshold': 10.0,
        'use_score_scaling': False,
        'use_score_norm': False,
        'score_clip': None,
        'whiten_rewards': False,
        'gradient_checkpointing': False,
        'remove_unused_columns': True,
        'tracker_project_name': 'trl',
        'log_with': None,
        'model_name': 'gpt2',
    }
    config = PPOConfig()
    assert {name: getattr(config, name) for name in theirs} == theirs
    assert config.era == 'classic' and config.backward_batch_size == 128 and config.total_ppo_epochs == 157


def test_without_a_penalty_no_target_adapts_it() -> None:
    for coef, target in ((0.0, None), (0.2, 6)):
        config = PPOConfig(init_kl_coef=coef)
        config.resolve('classic')
        assert config.settings().get('kl_target') == target


def test_names_of_both_eras_follow_each_other() -> None:
    config = PPOConfig(num_ppo_epochs=3, kl_coef=0.3)
    assert config.era == 'second' and config.ppo_epochs == 3 and config.init_kl_coef == 0.3
    config.resolve('classic')
    assert (config.ppo_epochs, config.init_kl_coef) == (3, 0.3)
    assert config.learning_rate == DEFAULTS['classic']['learning_rate'] and config.batch_size == 128
    config = PPOConfig(output_dir='somewhere')
    assert config.learning_rate == DEFAULTS['second']['learning_rate']
    config.learning_rate, config.num_ppo_epochs = 0.5, 2  # changed by the script
    config.resolve('classic')
    assert (config.learning_rate, config.ppo_epochs, config.num_ppo_epochs) == (0.5, 2, 2)
    with pytest.raises(ValueError, match=r'kl_coef=0.1 and init_kl_coef=0.2 mean the same'):
        PPOConfig(kl_coef=0.1, init_kl_coef=0.2)


def test_an_argument_given_at_its_default_is_given() -> None:
    config = PPOConfig(per_device_train_batch_size=8)
    config.resolve('classic')
    assert config.batch_size == 8
    config = PPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=3)
    config.resolve('classic')
    assert (config.batch_size, config.mini_batch_size) == (24, 8)
    names = [f.name for f in dataclasses.fields(PPOConfig)]
    plain = PPOConfig()
    every = PPOConfig(**{name: PPOConfig.__dataclass_fields__[name].default for name in names} | empty_dicts())
    assert every._given == plain._given == set() and every.batch_size == 128  # as from a command-line parser
    assert PPOConfig(log_with=None).era == PPOConfig(output_dir=None).era == 'classic'
    assert PPOConfig(num_mini_batches=1).era == 'second'
    assert copy.deepcopy(config)._given == {'per_device_train_batch_size', 'gradient_accumulation_steps'}


def empty_dicts() -> dict[str, Any]:
    return {name: {} for name in ('tracker_kwargs', 'accelerator_kwargs', 'project_kwargs')}


def test_arguments_of_the_other_era_are_named_unless_they_are_turned_off() -> None:
    config = PPOConfig(batch_size=4, mini_batch_size=4, temperature=0.7)
    with pytest.warns(UserWarning, match='PPOConfig: temperature=0.7 has no effect here'):
        config.check('classic')
    config = PPOConfig(batch_size=4, mini_batch_size=4, push_to_hub=False, bf16=False, is_encoder_decoder=None)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        config.check('classic')


@pytest.mark.parametrize(
    ('setting', 'sentence'),
    [
        ({'batchsize': 3}, 'did you mean batch_size'),
        ({'batch_size': 6, 'mini_batch_size': 4}, 'must be a multiple of mini_batch_size'),
        ({'kl_penalty': 'k7'}, 'kl_penalty'),
    ],
)
def test_mistakes_in_the_config(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PPOConfig(**setting)


def test_arguments_without_effect_give_warnings_and_a_plain_config_none() -> None:
    given = {'optimize_cuda_cache': True, 'accelerator_kwargs': {'cpu': True}, 'output_dir': 'x', 'bf16': True}
    with pytest.warns(UserWarning) as told:
        make(**given)
    assert all(any(name in str(w.message) for w in told) for name in given)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        make(learning_rate=1e-4, init_kl_coef=0.1, model_name='mine', steps=100, seed=4)


# ---------------------------------------------------------------- the dispatch


def test_arguments_select_the_trainer() -> None:
    model, tokenizer, config = SimpleNamespace(parameters=list), SimpleNamespace(decode=str), object()
    assert not is_second((config, model, model, tokenizer), {})
    assert not is_second((config,), {'model': model, 'tokenizer': tokenizer})
    assert not is_second((), {'config': config, 'model': model, 'ref_model': None, 'tokenizer': tokenizer})
    assert is_second((config, tokenizer, model, model), {})
    assert is_second((), {'args': config, 'processing_class': tokenizer, 'model': model, 'reward_model': model})
    assert is_second((), {'config': config, 'tokenizer': tokenizer, 'policy': model, 'train_dataset': []})
    with pytest.raises(ValueError, match='lr_scheduler is an argument of 0.4 to 0.11, reward_model of 0.12'):
        is_second((), {'config': config, 'lr_scheduler': 1, 'reward_model': model})
    with pytest.raises(ValueError, match='give .config, model, ref_model, tokenizer'):
        is_second((config,), {})


def test_a_subclass_of_the_trainer() -> None:
    class Mine(trl.PPOTrainer):
        def step(self, *args: Any) -> Any:
            return super().step(*args) | {'mine': 1.0}

        def compute_rewards(self, *args: Any) -> Any:
            raise AssertionError

    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    config = PPOConfig(batch_size=4, mini_batch_size=4, ppo_epochs=1)
    with pytest.warns(UserWarning, match='Mine.compute_rewards is never called here: give step the scores'):
        trainer = Mine(config, model, None, char_tokenizer())
    assert isinstance(trainer, trl.PPOTrainer) and not isinstance(config, trl.PPOTrainer)
    responses = trainer.generate(QUERIES, return_prompt=False, max_new_tokens=5, **SAMPLED)
    assert trainer.step(QUERIES, responses, [torch.tensor(1.0)] * 4)['mine'] == 1.0


def test_mistakes_in_the_arguments() -> None:
    with pytest.raises(ValueError, match='AutoModelForCausalLMWithValueHead.from_pretrained'):
        make(tiny_causal_lm('gpt2'))
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    with pytest.raises(ValueError, match='tokenizer must be'):
        trl.PPOTrainer(PPOConfig(), model, None, None)
    with pytest.raises(AttributeError, match='PPOTrainer.compute_rewards is not served'):
        make().compute_rewards()


# ---------------------------------------------------------------- generate


def test_shapes_of_generate() -> None:
    trainer = make()
    one = trainer.generate(QUERIES[0], max_new_tokens=4, **SAMPLED)
    assert one.shape == (1, 7) and torch.equal(one[0, :3], QUERIES[0])  # with the prompt, as in TRL
    assert trainer.generate(QUERIES[0], return_prompt=False, max_new_tokens=4, **SAMPLED).shape == (1, 4)
    several = trainer.generate(QUERIES, max_new_tokens=4, **SAMPLED)
    assert [len(r) for r in several] == [len(q) + 4 for q in QUERIES]
    assert all(torch.equal(r[: len(q)], q) for r, q in zip(several, QUERIES, strict=True))
    with pytest.raises(ValueError, match=r'\(1, 3\)'):
        trainer.generate(QUERIES[0][None])


def test_responses_of_the_reference() -> None:
    """Each equals the reference's response to one prompt without padding."""
    greedy = {'max_new_tokens': 5, 'do_sample': False, 'pad_token_id': 0, 'eos_token_id': -1}
    trainer = make()
    with torch.no_grad():
        for parameter in trainer.ref_model.pretrained_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    own, reference = trainer.generate(QUERIES, return_prompt=False, generate_ref_response=True, batch_size=3, **greedy)
    for query, response, other in zip(QUERIES, own, reference, strict=True):
        assert torch.equal(response, trainer.generate(query, return_prompt=False, **greedy)[0])
        whole = trainer.ref_model.generate(query[None], attention_mask=torch.ones_like(query)[None], **greedy)
        assert torch.equal(other, whole[0, len(query) :])
    assert any(not torch.equal(a, b) for a, b in zip(own, reference, strict=True))
    _, with_prompt = trainer.generate(QUERIES[0], generate_ref_response=True, **greedy)
    assert torch.equal(with_prompt[0], torch.cat([QUERIES[0], reference[0]]))
    ended = trainer.generate(
        QUERIES[0], return_prompt=False, generate_ref_response=True, **greedy | {'eos_token_id': int(reference[0][1])}
    )[1][0]
    first = reference[0].tolist().index(int(reference[0][1]))
    assert torch.equal(ended, reference[0][: first + 1])


def test_a_mask_drops_padding_of_a_query() -> None:
    trainer = make()
    query, greedy = QUERIES[2], {'max_new_tokens': 5, 'eos_token_id': -1}
    expected = trainer.generate(query, return_prompt=False, **greedy)
    padded, mask = torch.tensor([0, *query, 0]), torch.tensor([0, 1, 1, 1, 1, 0])
    assert not torch.equal(trainer.generate(padded, return_prompt=False, **greedy), expected)
    for given in (mask, mask[None], mask.tolist()):
        assert torch.equal(trainer.generate(padded, return_prompt=False, attention_mask=given, **greedy), expected)
    whole = trainer.generate(padded, attention_mask=mask, **greedy)
    assert torch.equal(whole, torch.cat([padded, expected[0]])[None])
    several = trainer.generate(
        [padded, query], return_prompt=False, attention_mask=[mask, torch.ones(4, dtype=torch.int64)], **greedy
    )
    assert all(torch.equal(r, expected[0]) for r in several)
    with pytest.raises(ValueError, match=r'attention_mask is \[\(4,\)\], of queries \[\(6,\)\]'):
        trainer.generate(padded, attention_mask=torch.ones(4), **greedy)


@pytest.mark.parametrize('family', ['gpt2', 't5'])
def test_objects_of_transformers_in_generate(family: str) -> None:
    """With a criterion or a processor `model.generate` runs; rows that a criterion has stopped have no padding."""
    kind = trl.AutoModelForSeq2SeqLMWithValueHead if family == 't5' else trl.AutoModelForCausalLMWithValueHead
    trainer, seen = make(kind.from_pretrained(tiny_causal_lm(family))), list[int]()

    def only_nine(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([9]), 0.0)

    def first_row_at_two(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.arange(len(ids)) < (len(seen) >= 2)

    given = {'max_new_tokens': 4, 'eos_token_id': -1, 'pad_token_id': 0, 'remove_padding': True}
    start = [0] if family == 't5' else []
    found = trainer.generate(QUERIES, return_prompt=False, logits_processor=[only_nine], **given)
    assert [r.tolist() for r in found] == [start + [9] * 4] * len(QUERIES)
    found = trainer.generate(
        QUERIES[:2], return_prompt=False, logits_processor=[only_nine], stopping_criteria=[first_row_at_two], **given
    )
    assert [r.tolist() for r in found] == [start + [9] * 2, start + [9] * 4]
    one = trainer.generate(QUERIES[0], prefix_allowed_tokens_fn=lambda i, ids: [7], **given)
    assert one.tolist() == [(start or QUERIES[0].tolist()) + [7] * 4]


def test_defaults_of_generate_are_those_of_transformers() -> None:
    """Greedy, 20 new tokens, as `model.generate`."""
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    trainer = make(model)
    for query in QUERIES:
        expected = model.pretrained_model.generate(query[None], attention_mask=torch.ones_like(query)[None])
        assert torch.equal(trainer.generate(query), expected)


def test_lengths_are_sampled_once_per_batch() -> None:
    trainer = make()
    drawn = iter([3, 6])
    responses = trainer.generate(
        QUERIES, length_sampler=lambda: next(drawn), batch_size=3, return_prompt=False, **SAMPLED
    )
    assert [len(r) for r in responses] == [3, 3, 3, 6]


def test_settings_that_only_transformers_has() -> None:
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    trainer = make(model)
    found = trainer.generate(QUERIES[2], num_beams=3, max_new_tokens=5, pad_token_id=0)
    mask = torch.ones_like(QUERIES[2])[None]
    expected = model.pretrained_model.generate(
        QUERIES[2][None], attention_mask=mask, num_beams=3, max_new_tokens=5, pad_token_id=0
    )
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match='temprature'):
        trainer.generate(QUERIES[0], temprature=1.0)


# ---------------------------------------------------------------- step


def test_mistakes_in_step() -> None:
    trainer = make()
    scores = [torch.tensor(1.0)] * 4
    with pytest.raises(ValueError, match='3 queries given, but batch_size=4'):
        trainer.step(QUERIES[:3], QUERIES, scores)
    with pytest.raises(ValueError, match='scores must be a list of tensors'):
        trainer.step(QUERIES, QUERIES, [1.0] * 4)
    with pytest.raises(ValueError, match='responses must be a list of tensors; got a Tensor'):
        trainer.step(QUERIES, torch.zeros(4, 2), scores)


def test_statistics_of_one_step() -> None:
    trainer = make(ppo_epochs=2, mini_batch_size=2)
    stats = step(trainer)
    assert set(stats) == {name for name, text in KEYS.items() if not text.startswith('left out')}
    assert len(KEYS) == 40
    assert stats['objective/logprobs'].shape == (4, 5)
    assert len(stats['ppo/policy/ratio']) == len(stats['ppo/policy/advantages']) == 2 * 4 * 5
    assert stats['ppo/mean_scores'] == pytest.approx(0.5)
    assert stats['ppo/loss/total'] == pytest.approx(stats['ppo/loss/policy'] + 0.1 * stats['ppo/loss/value'])
    assert trainer.kl_ctl.value != stats['objective/kl_coef'] == 0.2  # adaptive: changed after 4 samples
    assert trainer.kl_ctl.value == pytest.approx(0.2 * (1 - 0.2 * 4 / 10000))


def test_scores_per_token_are_taken_too() -> None:
    trainer = make()
    dense = [[0.0, 1.0, 0.0, 0.0, 0.5]] * 4
    stats = step(trainer, dense)
    assert stats['ppo/mean_scores'] == pytest.approx(1.5)
    assert trainer.inner.last_experiences[0].rewards.tolist() == dense[0]  # KL is 0 in the first step


def test_the_given_optimizer_scheduler_and_reference_are_used() -> None:
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    trainer = make(model, tiny_causal_lm('gpt2', seed=5), trainer={'optimizer': optimizer, 'lr_scheduler': scheduler})
    assert trainer.optimizer is optimizer
    before = [p.detach().clone() for p in model.parameters()]
    first = step(trainer)
    assert first['objective/kl'] != 0.0 and first['ppo/learning_rate'] == 0.5
    moved = [p.detach().clone() for p in model.parameters()]
    assert any(not torch.equal(p, q) for p, q in zip(before, moved, strict=True))
    assert step(trainer)['ppo/learning_rate'] == 0.0
    assert all(torch.equal(p, q) for p, q in zip(moved, model.parameters(), strict=True))
    with pytest.warns(UserWarning, match='num_shared_layers has no effect'):
        make(ref_model=tiny_causal_lm('gpt2'), trainer={'num_shared_layers': 1})


def test_later_changes_of_the_config() -> None:
    trainer = make(ppo_epochs=1, mini_batch_size=2)
    assert len(step(trainer)['ppo/policy/ratio']) == 4 * 5
    trainer.config.ppo_epochs, trainer.config.cliprange = 3, 0.05
    assert len(step(trainer)['ppo/policy/ratio']) == 3 * 4 * 5
    assert trainer.inner.config.eps_clip == 0.05
    trainer.config.batch_size = 2  # a smaller last batch
    responses = trainer.generate(QUERIES[:2], return_prompt=False, max_new_tokens=5, **SAMPLED)
    stats = trainer.step(QUERIES[:2], responses, [torch.tensor(1.0)] * 2)
    assert len(stats['objective/kl_dist']) == 2
    trainer.config.kl_penalty, trainer.config.batch_size = 'abs', 4
    with pytest.warns(UserWarning, match="kl_kind='abs' has no effect now"):
        step(trainer)


def test_dropout_is_off_whatever_the_script_calls() -> None:
    """As in TRL, whose forwards are in eval mode: the ratio of the first update is 1."""
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2', dropout=0.5))
    trainer = make(model)
    responses = trainer.generate(QUERIES, return_prompt=False, max_new_tokens=5, **SAMPLED)
    model.train()
    stats = trainer.step(QUERIES, responses, [torch.tensor(1.0)] * 4)
    assert stats['ppo/policy/approxkl'] < 1e-10 and stats['objective/kl'] == 0.0
    np.testing.assert_allclose(stats['ppo/policy/ratio'], 1.0, atol=1e-5)


def test_gradient_checkpointing_changes_no_number() -> None:
    def stats(**settings: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        found = step(make(**settings))
        return {k: v for k, v in found.items() if isinstance(v, float) and not k.startswith('time/')}

    assert stats(gradient_checkpointing=True) == pytest.approx(stats(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize('bits', ['bfloat16', 'float16'])
def test_a_step_in_16_bits(bits: str, tmp_path: Path, with_16_bits: None) -> None:
    tiny_causal_lm('gpt2').save_pretrained(tmp_path)
    model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, torch_dtype=bits)
    trainer = make(model, learning_rate=1e-2)
    before = model.v_head.summary.weight.detach().clone()
    stats = step(trainer)
    assert stats['objective/kl'] == pytest.approx(0.0, abs=0.01)
    assert not torch.equal(before, model.v_head.summary.weight)
    # a model in bf16 learns with fp32 masters, one in fp16 is in fp32
    assert model.pretrained_model.dtype == (torch.bfloat16 if bits == 'bfloat16' else torch.float32)


def test_push_to_hub_goes_through_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving() as hub:
        use(hub.address, monkeypatch, tmp_path, token=None)
        trainer = make()
        assert trainer.push_to_hub('me/mine', token=WRITE, private=True, branch='draft') == f'{hub.address}/me/mine'
        assert hub.repos['me/mine']['private']
        wanted = {'model.safetensors', 'tokenizer.json', 'config.json'}
        assert wanted <= set(hub.files('me/mine', 'draft'))
        with pytest.raises(
            RuntimeError, match=r'the model could not be uploaded to nobody/none \(.*403.*later: hf '
        ) as e:
            trainer.push_to_hub('nobody/none', token=WRITE)
        kept = Path(str(e.value).partition('; it is in ')[2].partition(', and this uploads it later')[0])
        assert wanted <= {p.name for p in kept.iterdir()}
        shutil.rmtree(kept.parent)


# ---------------------------------------------------------------- accelerator, logging


def test_accelerator_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make()
    a = trainer.accelerator
    assert a.is_main_process and a.is_local_main_process and a.is_last_process
    assert (a.num_processes, a.process_index, a.local_process_index) == (1, 0, 0)
    assert a.device == trainer.current_device and not trainer.is_distributed
    a.wait_for_everyone()
    a.print('said')
    assert capsys.readouterr().out == 'said\n'
    assert a.unwrap_model(trainer.model) is trainer.model
    role, llama = Actor(tiny_causal_lm('gpt2')), tiny_causal_lm('llama')
    assert a.unwrap_model(role) is role.model and a.unwrap_model(llama) is llama
    layer = torch.nn.Linear(2, 2)
    assert a.prepare(layer) is layer and a.prepare(layer, [1]) == (layer, [1])
    assert torch.equal(a.gather(torch.arange(3)), torch.arange(3))
    with a.main_process_first(), a.autocast():
        pass
    with pytest.raises(AttributeError, match='accelerator.backward is not served'):
        a.backward(None)


def test_wandb_gets_arrays_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Run:
        id = 'r'

        def log(self, values: dict[str, Any], step: int) -> None:
            logged.append((values, step))

        def finish(self, exit_code: int) -> None:
            logged.append('finished')

    made: dict[str, Any] = {}
    fake: Any = SimpleNamespace(init=lambda **s: made.update(s) or Run(), Table=lambda columns, data: (columns, data))
    fake.__spec__ = True
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    trainer = make(log_with='wandb', tracker_kwargs={'wandb': {'name': 'mine'}}, tracker_project_name='project')
    stats = step(trainer)
    batch = {'query': ['a', 'b', 'c', 'd'], 'response': ['e', 'f', 'g', 'h']}
    trainer.log_stats(stats, batch, [torch.tensor(float(i)) for i in range(4)])
    trainer.accelerator.end_training()
    assert made['project'] == 'project' and made['name'] == 'mine'
    (values, number), (table, same), end = logged
    assert number == same == 1 and end == 'finished'
    assert table['game_log'] == (
        ['query', 'response', 'reward'],
        [list(r) for r in zip('abcd', 'efgh', range(4), strict=True)],
    )
    assert isinstance(values['env/reward_dist'], np.ndarray) and values['env/reward_mean'] == 1.5
    with pytest.raises(ValueError, match="no 'ref_response'"):
        trainer.log_stats(stats, batch, [0.0] * 4, columns_to_log=['ref_response'])


def test_trackers_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="log_with='comet_ml' is not known; choose one of tensorboard, wandb"):
        make(log_with='comet_ml')
    with pytest.raises(ValueError, match='logging_dir'):
        make(log_with='tensorboard')


# ---------------------------------------------------------------- core and the package


def test_core_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(core.masked_mean(values, mask)) == 2.0
    assert core.masked_mean(values, mask, axis=1).tolist() == [1.5, 3.0]
    assert float(core.masked_var(values, mask)) == pytest.approx(1.0)  # ((-1)² + 0 + 1) / 2
    assert float(core.masked_var(values, mask, unbiased=False)) == pytest.approx(2 / 3)
    whitened = core.masked_whiten(values, mask)
    assert whitened[0, 0] == pytest.approx(-1.0) and whitened[1, 0] == pytest.approx(1.0)
    assert core.masked_whiten(values, mask, shift_mean=False)[1, 0] == pytest.approx(3.0)
    assert core.whiten(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert core.clip_by_value(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 1.0]), 2.0).tolist() == [1.0, 2.0]
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25]]]))
    chosen = core.logprobs_from_logits(logits, torch.tensor([[1]]))
    assert float(chosen) == pytest.approx(np.log(0.25))
    assert core.logprobs_from_logits(logits, None, gather=False).shape == (1, 1, 3)
    assert float(core.entropy_from_logits(logits)) == pytest.approx(1.5 * np.log(2))
    kept = core.top_k_top_p_filtering(logits[0], top_k=1)
    assert torch.isneginf(kept).tolist() == [[False, True, True]]
    assert core.flatten_dict({'a': {'b': 1, 'c': {'d': 2}}}) == {'a/b': 1, 'a/c/d': 2}
    stacked = core.stack_dicts([{'x': torch.tensor([1.0, 2.0])}, {'x': torch.tensor([3.0])}])
    assert stacked['x'].tolist() == [[1.0, 2.0], [3.0, -1.0]]
    assert core.convert_to_scalar({'x': torch.tensor([2.0])}) == {'x': 2.0}
    assert core.stats_to_np({'x': torch.tensor([2.0]).bfloat16()})['x'].dtype == np.float32
    with pytest.raises(ValueError, match='0 everywhere'):
        core.masked_var(values, torch.zeros_like(mask))


def test_length_sampler_draws_below_the_second_number() -> None:
    core.set_seed(3)
    sampler = core.LengthSampler(2, 5)
    drawn = [sampler() for _ in range(200)]
    assert set(drawn) == {2, 3, 4}
    core.set_seed(3)
    assert [sampler() for _ in range(200)] == drawn
    with pytest.raises(ValueError, match='excluded'):
        core.LengthSampler(4, 4)


def test_respond_to_batch_follows_the_model() -> None:
    def successor(ids: Tensor) -> tuple[Tensor]:
        return (100.0 * torch.nn.functional.one_hot((ids + 1) % 8, 8).float(),)

    found = core.respond_to_batch(successor, torch.tensor([[1, 2], [5, 6]]), txt_len=3)
    assert found.tolist() == [[3, 4, 5], [7, 0, 1]]


def test_the_package_is_cheap_to_import() -> None:
    code = (
        "import sys, chatgpt_compat.trl as t; t.SERVED; print(*({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ''
