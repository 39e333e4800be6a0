"""Each page of docs/extend has a complete file of at most 40 lines, which works from outside the package as
described."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chatgpt.launch.config_file import parse_run
from chatgpt.launch.runs import PPORun
from chatgpt.nn import Actor, GPTActor
from chatgpt.nn.kinds import MODELS
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.rollout.registry import ENGINES
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import OfflineTrainer, PPOConfig, PPOTrainer
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES, PolicyInputs
from chatgpt.trainer.callbacks import Callback, ProgressBar
from chatgpt.types import Experience, Prompt, Sample, Sequence

ROOT = Path(__file__).resolve().parents[1]
PAGES = {page.stem: page for page in sorted((ROOT / 'docs' / 'extend').glob('*.md'))}
VOCAB = 16


def shown(page: str) -> tuple[str, str]:
    """Returns name and text of the file on a page."""
    ((code, name),) = re.findall(r'```python\n(# (\S+\.py)\n.*?)```', PAGES[page].read_text(), re.DOTALL)
    return name, code


def load(page: str) -> Any:
    """Writes the page's file into the working directory and imports it."""
    name, code = shown(page)
    path = Path(name)
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(f'{path.stem}_of_a_test', path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Uses a temporary working directory, and restores registries and imported modules."""
    monkeypatch.chdir(tmp_path)
    tables, modules = [(table, dict(table)) for table in (ESTIMATORS, POLICY_LOSSES, ENGINES, MODELS)], set(sys.modules)
    yield
    for table, before in tables:
        table.clear()
        table.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith('my_'):
            del sys.modules[name]


class CountGood(nn.Module):
    """A reward that is the share of token 7 in a response."""

    def forward(self, batch: Any) -> Tensor:
        hits = ((batch.action_ids == 7) & batch.action_mask).float()
        counts = torch.zeros(batch.num_sequences).index_add(0, batch.action_rows, batch.action_mask.float())
        return torch.zeros(batch.num_sequences).index_add(0, batch.action_rows, hits) / counts.clamp(min=1)


class Log(ProgressBar):
    """A callback that keeps the metrics of every phase."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append(metrics)


def ppo(
    *, critic: Any = None, actor: Any = None, reward: Any = None, callbacks: Any = (), **settings: Any
) -> PPOTrainer:
    """Returns a small trainer on ids; without a critic unless one is given."""
    strategy = NaiveStrategy(seed=3)
    actor = actor or GPTActor(config=tiny_config('gpt2', vocab_size=VOCAB, hidden=16, positions=32))
    initial = deepcopy(actor)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-5)) for m in (actor, critic) if m is not None]
    (actor, actor_optim), *rest = [strategy.prepare(pair) for pair in pairs]
    critic, critic_optim = rest[0] if rest else (None, None)
    reward = strategy.prepare(CountGood()) if reward is None else reward
    defaults: dict[str, Any] = {'experience_batch_size': 4, 'train_batch_size': 8, 'max_epochs': 2, 'kl_coef': 0.01}
    defaults |= {'max_new_tokens': 6, 'eos_token_id': 2, 'callbacks': [ProgressBar(enabled=False), *callbacks]}
    if critic is None:
        defaults |= {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 4}
    models = actor, critic, reward, strategy.prepare(initial), actor_optim, critic_optim
    return PPOTrainer(strategy, *models, **defaults | settings)


def prompts() -> list[Tensor]:
    return [torch.tensor([3 + i, 5][: 1 + i % 2]) for i in range(8)]


def trained(**settings: Any) -> Tensor:
    """Returns the actor's weights after one phase."""
    trainer = ppo(**settings)
    trainer.fit(prompts(), num_episodes=1, max_timesteps=1, update_timesteps=1)
    return torch.cat([p.detach().flatten() for p in trainer.actor.parameters()])


@pytest.mark.parametrize('page', PAGES)
def test_a_page_shows_one_whole_file_of_at_most_forty_lines(page):
    name, code = shown(page)
    assert name.startswith('my_') and len(code.splitlines()) <= 40


# ------------------------------------------------------------------ algorithm


def experience(group: int, rewards: list[float], mask: list[bool]) -> Any:
    tensors = {'rewards': torch.tensor(rewards), 'response_mask': torch.tensor(mask)}
    return SimpleNamespace(group=group, num_actions=len(mask), **tensors)


def test_an_estimator_and_a_policy_loss_by_their_formulas():
    module = load('algorithm')
    es = [experience(0, [1.0, 9.0], [True, False]), experience(0, [3.0], [True]), experience(0, [2.0], [True])]
    advantages, returns = module.above_median([*es, experience(1, [5.0], [True])], None)
    assert [a.tolist() for a in advantages] == [[-1, -1], [1], [0], [0]] and returns == advantages
    logs = torch.tensor([0.5]).log(), torch.tensor([0.4]).log()
    x = PolicyInputs(*logs, torch.tensor([-2.0]), torch.tensor([True]), torch.tensor([0]), 1)
    loss = module.simple_policy(x, PPOConfig(eps_clip=0.25))
    assert loss.item() == pytest.approx(2 * 1.25 + 2 * 0.25**2 / (2 * 0.25), rel=1e-5)
    high = torch.tensor(1.25, requires_grad=True)  # the minimum is at ρ = 1 + ε where A > 0
    x = x._replace(logprobs=high.log(), old_logprobs=torch.tensor(0.0), advantages=torch.tensor(2.0))
    module.simple_policy(x, PPOConfig(eps_clip=0.25)).backward()
    assert abs(high.grad.item()) < 1e-6


def test_it_trains_by_its_name_wherever_the_file_was_imported_and_by_module_and_name_where_not():
    with pytest.raises(ValueError, match="advantage_estimator='median' is not known"):
        ppo(advantage_estimator='median')
    Path('my_method.py').write_text(shown('algorithm')[1].split('ESTIMATORS[')[0])  # without its registry lines
    by_file = trained(advantage_estimator='my_method.py:median', policy_loss='my_method.py:spo', kl_in='loss')
    load('algorithm')
    by_name = trained(advantage_estimator='median', policy_loss='spo', kl_in='loss')
    assert torch.equal(by_file, by_name)
    assert not torch.equal(by_name, trained(advantage_estimator='rloo', policy_loss='spo', kl_in='loss'))
    assert not torch.equal(by_name, trained(advantage_estimator='median', kl_in='loss'))
    with pytest.raises(ValueError, match='set num_samples_per_prompt to 2 or more'):
        ppo(advantage_estimator='median', num_samples_per_prompt=1)
    with pytest.raises(ValueError, match="'my_method.py:above_median' is a function, no Estimator"):
        ppo(advantage_estimator='my_method.py:above_median')
    flags = ['--num_samples_per_prompt=2', '--save_path=run']
    words = ['--advantage_estimator', 'my_method.py:median', '--policy_loss', 'spo']
    run = parse_run(PPORun, description='', argv=[*flags, *words])
    run.validate()
    config = PPOConfig(**{name: getattr(run, name) for name in PPOConfig.field_names()})
    assert config.estimator.needs_groups and not config.whitens_advantages
    with pytest.raises(ValueError, match="policy_loss='spu' is not known.*spo"):
        parse_run(PPORun, description='', argv=[*flags, '--policy_loss', 'spu']).validate()


# ------------------------------------------------------------------ objective


def records(num: int) -> list[tuple[Sequence, float]]:
    generator, found = torch.Generator().manual_seed(0), []
    for i in range(num):
        ids = torch.randint(3, VOCAB, (2 + i % 3,), generator=generator)
        mask = torch.ones(len(ids), dtype=torch.bool)
        mask[0] = i % 2 == 0
        found.append((Sequence(prompt_ids=torch.tensor([3]), response_ids=ids, response_mask=mask), i / num))
    return found


def test_an_objective_trains_and_its_loss_is_its_formula():
    module, data, strategy = load('objective'), records(6), NaiveStrategy(seed=1)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=VOCAB, hidden=16, positions=32))
    expected = 0.0
    for sequence, reward in data:  # one by one, in float64
        ids = torch.cat([sequence.prompt_ids, sequence.response_ids])
        with torch.no_grad():
            logps = actor.model(ids[None]).logits[0, :-1].double().log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        expected -= math.exp(reward / 0.5) * float(logps[sequence.response_mask].sum()) / len(data)
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=3e-3)))
    log, settings = Log(), {'beta': 0.5, 'train_batch_size': 3, 'log_interval': 1, 'max_epochs': 6}
    method = {'method': module.RWR}
    trainer = OfflineTrainer(strategy, actor, optim, data, data, callbacks=[log], run_dir='run', **method, **settings)
    assert trainer.evaluate(data)['loss'] == pytest.approx(expected, rel=1e-5)
    other = OfflineTrainer(strategy, actor, optim, data, beta=5.0, **method)
    assert other.evaluate(data)['loss'] != pytest.approx(expected, rel=1e-2)
    trainer.fit()
    assert log.phases[-1]['rwr/val_loss'] < expected and log.phases[0]['rwr/grad_norm'] > 0
    assert json.loads(Path('run/metrics.jsonl').read_text().splitlines()[-1])['rwr/epoch'] == 6
    with pytest.raises(ValueError, match="RWRConfig has no setting 'bta'.*beta"):
        OfflineTrainer(strategy, actor, optim, data, bta=1.0, **method)


# ------------------------------------------------------------------ engine


def answers(engine: Any, **sampling: Any) -> list[Sample]:
    actor = Actor(tiny_causal_lm('gpt2', vocab_size=VOCAB, hidden=16, positions=32))
    params = SamplingParams(**{'max_new_tokens': 8, 'eos_token_ids': (2,)} | sampling)
    engine.begin(actor)
    found = engine.generate(Call.of([Prompt(ids=ids) for ids in prompts()], params, seed=5, indices=range(10, 18)))
    engine.end()
    return found


@pytest.mark.parametrize('sampling', [{}, {'temperature': 0.7, 'top_k': 5}, {'min_new_tokens': 8}])
def test_an_engine_draws_what_the_local_one_draws(sampling):
    module = load('engine')
    ours, theirs = answers(module.PlainEngine(), **sampling), answers(LocalEngine(), **sampling)
    assert any(s.num_actions < 8 for s in ours) or 'min_new_tokens' in sampling
    for a, b in zip(ours, theirs, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert (a.index, a.finish_reason) == (b.index, b.finish_reason)
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a.filtered_logprobs, b.filtered_logprobs, atol=1e-4, rtol=1e-4)


def test_a_trainer_learns_with_it():
    torch.testing.assert_close(trained(engine=load('engine').PlainEngine()), trained(), atol=1e-4, rtol=0)


# ------------------------------------------------------------------ reward


def test_a_function_with_a_column_and_a_scorer_of_ids_give_their_scores():
    module = load('reward')
    tokenizer = byte_tokenizer()
    ids = {'vocab_size': 259, 'pad_token_id': 256, 'eos_token_id': 258}
    actor = GPTActor(config=tiny_config('gpt2', hidden=16, positions=32, **ids))
    seen: list[Experience] = []

    class Keep(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: list[Experience]) -> None:
            seen.extend(experiences)

    rows = [{'prompt': f'{i} and', 'answer': chr(97 + i)} for i in range(4)]
    reward = [(2.0, module.right_answer), (0.5, module.NoRepeats())]
    words = {'tokenizer': tokenizer, 'eos_token_id': 258, 'num_samples_per_prompt': 8}
    trainer = ppo(actor=actor, reward=reward, callbacks=[Keep()], **words)
    trainer.fit(rows, num_episodes=1, max_timesteps=1, update_timesteps=1)
    assert len(seen) == 32
    for e in seen:
        ids = e.response_ids.tolist()
        repeats = -sum(a == b for a, b in zip(ids, ids[1:], strict=False))
        right = float(e.response_text.strip().endswith(e.columns['answer']))
        assert e.score == pytest.approx(2.0 * right + 0.5 * repeats)
    assert module.right_answer(['', ''], ['it is 4 ', '5'], ['4', '4']) == [1.0, 0.0]


# ------------------------------------------------------------------ callback


def counted(module: Any, phases: int, resume: Any = None) -> tuple[Any, PPOTrainer, Log]:
    counts, log = module.TokenCounts(VOCAB), Log()
    trainer = ppo(callbacks=[counts, log])
    if resume is not None:
        trainer.load_checkpoint(resume)
    trainer.fit(prompts(), num_episodes=1, max_timesteps=phases, update_timesteps=1)
    return counts, trainer, log


def test_a_callback_keeps_its_tensors_and_numbers_over_a_resume():
    module = load('callback')
    whole, _, log = counted(module, 2)
    assert whole.responses == 32 and int(whole.counts.sum()) > 32
    assert log.phases[-1]['rollout/vocabulary_used'] == float((whole.counts > 0).double().mean())
    _, trainer, _ = counted(module, 1)
    trainer.save_checkpoint('half')
    again = module.TokenCounts(VOCAB)
    resumed = ppo(callbacks=[again])
    resumed.load_checkpoint('half')
    assert 0 < int(again.counts.sum()) < int(whole.counts.sum()) and again.responses == 16
    resumed.is_resuming = False
    resumed.fit(prompts(), num_episodes=1, max_timesteps=1, update_timesteps=1)
    assert torch.equal(again.counts, whole.counts) and again.responses == 32


# ------------------------------------------------------------------ model


def test_a_family_and_a_head_train(tmp_path):
    from transformers import Qwen2Config

    module = load('model')
    sizes = {'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    config = Qwen2Config(**sizes, vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=32)
    actor = module.Qwen2Actor(config=config)
    critic = module.Qwen2Critic(config=config, value_head=module.DeepHead(16))
    before = critic.value_head.out.weight.detach().clone()
    assert not before.any()
    log = Log()
    trainer = ppo(actor=actor, critic=critic, callbacks=[log], num_samples_per_prompt=8)
    trainer.fit(prompts(), num_episodes=1, max_timesteps=1, update_timesteps=1)
    assert log.phases[0]['rollout/score_mean'] > 0 and critic.value_head.out.weight.abs().max() > 1e-4
    actor.save_pretrained(tmp_path / 'qwen')
    again = module.Qwen2Actor(pretrained=tmp_path / 'qwen')
    assert all(torch.equal(a, b) for a, b in zip(actor.state_dict().values(), again.state_dict().values(), strict=True))
    tiny_causal_lm('gpt2').save_pretrained(tmp_path / 'gpt2')
    with pytest.raises(ValueError, match="takes models of the family 'qwen2', but .* is of the family 'gpt2'"):
        module.Qwen2Actor(pretrained=tmp_path / 'gpt2')


# ------------------------------------------------------------------ data


def test_rows_of_another_shape_become_records():
    module = load('data')
    replies = [{'text': ' no', 'up': 0, 'down': 2}, {'text': ' yes', 'up': 3, 'down': 0}]
    rows = [{'ask': 'Is it so?', 'replies': replies}, {'ask': 'x', 'replies': []}]
    Path('votes.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    loaded = module.load_votes('votes.jsonl', byte_tokenizer())
    (record,) = loaded
    assert loaded.num_skipped == 1  # a row without replies is reported and skipped
    assert record.scores == (3, -2)
    assert [bytes(ids[:-1].tolist()).decode() for ids in record.responses] == [' yes', ' no']
    assert [int(ids[-1]) for ids in record.responses] == [258, 258]
