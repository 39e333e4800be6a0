"""`RLOOTrainer` of TRL 0.11 to 0.21: its loss, its advantages and its sizes against slow loops, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser

from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt.trainer.algorithms import PolicyInputs
from chatgpt_compat.trl import RLOOConfig, RLOOTrainer
from chatgpt_compat.trl.rloo import SEQUENCES, sequence_loss
from chatgpt_compat.trl.scripts import ModelConfig


def length_reward(prompts, responses):
    return [float(len(set(response))) for response in responses]


def trainer_of(tmp_path, **given):
    """Returns a trainer on the demo's tiny policy, with a reward of different letters."""
    torch.manual_seed(0)
    tokenizer = demo_world.demo_tokenizer()
    policy, reference = (GPTActor(config=demo_world.demo_config()).model for _ in range(2))
    rows = Dataset.from_dict({'input_ids': [tokenizer(text)['input_ids'] for text in ('a', 'bc', 'd', 'ef', 'g', 'h')]})
    settings = {'output_dir': str(tmp_path), 'response_length': 6, 'per_device_train_batch_size': 4} | given
    settings = {'num_sample_generations': 0, 'report_to': 'none', 'save_strategy': 'no', 'max_grad_norm': 0} | settings
    return RLOOTrainer(
        config=RLOOConfig(**settings),
        tokenizer=tokenizer,
        policy=policy,
        ref_policy=reference,
        reward_model=length_reward,
        train_dataset=rows,
        eval_dataset=rows,
    )


def test_the_loss_has_one_ratio_per_response():
    shifts, counts = [[0.1, 0.2], [-0.5, 0.0, 0.25]], [[1, 1], [1, 0, 1]]
    advantages = [1.5, -2.0]
    rows = torch.tensor([0, 0, 1, 1, 1])
    inputs = PolicyInputs(
        torch.tensor([s for row in shifts for s in row]),
        torch.zeros(5),
        torch.tensor(advantages)[rows],
        torch.tensor([c for row in counts for c in row], dtype=torch.bool),
        rows,
        2,
    )

    class Settings:
        eps_clip = 0.2

    expected = []
    for shift, count, advantage in zip(shifts, counts, advantages, strict=True):
        ratio = math.exp(sum(s for s, c in zip(shift, count, strict=True) if c))
        expected += [max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))] * len(shift)
    torch.testing.assert_close(sequence_loss(inputs, Settings), torch.tensor(expected))
    assert expected[0] == pytest.approx(-1.5 * 1.2)  # clipped: the ratio is exp(0.3)
    assert SEQUENCES.per_sequence


@pytest.mark.parametrize('normalize', [False, True])
def test_advantages_are_against_the_other_responses_to_the_prompt(tmp_path, normalize):
    given = {'num_mini_batches': 2, 'total_episodes': 8, 'rloo_k': 4, 'kl_coef': 0.3, 'num_ppo_epochs': 2}
    trainer = trainer_of(tmp_path, **given, normalize_advantage=normalize)
    trainer.train()
    found = trainer.inner.last_experiences
    assert len(found) == 8  # 4 x 2 mini-batches, of two prompts
    assert trainer.args.batch_size == 8
    assert trainer.args.mini_batch_size == 4
    assert trainer.inner.num_updates == 4
    groups: dict[int, list] = {}
    for e in found:
        groups.setdefault(e.group, []).append(e)
    assert sorted(map(len, groups.values())) == [4, 4]
    expected = {}
    for members in groups.values():
        totals = []
        for e in members:
            kl = sum(float(a - b) for a, b in zip(e.old_logprobs, e.ref_logprobs, strict=True))
            totals.append(float(e.score) - 0.3 * kl)
        for e, total in zip(members, totals, strict=True):
            expected[e.index] = total - (sum(totals) - total) / 3
    if normalize:
        mean = sum(expected.values()) / 8
        spread = math.sqrt(sum((value - mean) ** 2 for value in expected.values()) / 7)
        expected = {index: (value - mean) / spread for index, value in expected.items()}
        assert trainer.inner.config.whitens_advantages
        found = trainer.inner.config.estimator.whiten(found)
    for e in found:
        torch.testing.assert_close(e.advantages, torch.full_like(e.advantages, expected[e.index]), rtol=2e-3, atol=1e-4)
    assert trainer.state.episode == 8
    (logged,) = trainer.state.log_history
    assert logged['objective/scores'] == pytest.approx(sum(float(e.score) for e in found) / 8, rel=1e-5)


def test_a_command_line_and_what_is_refused(tmp_path):
    config, _ = HfArgumentParser((RLOOConfig, ModelConfig)).parse_args_into_dataclasses(
        ['--output_dir', str(tmp_path), '--rloo_k', '4', '--kl_coef', '0.1']
    )
    assert (config.rloo_k, config.kl_coef, config.temperature, config.learning_rate) == (4, 0.1, 0.7, 5e-5)
    with pytest.raises(ValueError, match='rloo_k=3 must be 2 or more, and divide the batch of 4 responses'):
        trainer_of(tmp_path, rloo_k=3)
    with pytest.raises(ValueError, match='num_generations=4 cannot be honoured: an argument of 0.22 and later'):
        trainer_of(tmp_path, num_generations=4)
    with pytest.raises(ValueError, match='RLOOTrainer: reward_funcs cannot be honoured here'):
        RLOOTrainer(reward_funcs=length_reward, args=RLOOConfig())
    with pytest.raises(ValueError, match='normalize_reward=True cannot be honoured'):
        trainer_of(tmp_path, normalize_reward=True)
