"""trlX's RFT: which samples it keeps in each round, by hand, and a whole run of `trlx.train`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from chatgpt_compat.trlx.data.configs import TRLConfig
from chatgpt_compat.trlx.data.default_configs import default_ppo_config
from chatgpt_compat.trlx.trainer.accelerate_rft_trainer import RFTConfig as TheirConfig

from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import RFTConfig
from chatgpt_compat.trlx import train
from chatgpt_compat.trlx.rft import GrowingRFT, thresholds_of


def sample(prompt, *response):
    return SimpleNamespace(prompt_ids=torch.tensor([prompt]), response_ids=torch.tensor(response))


def test_thresholds_are_interpolated_and_keep_from_the_ends():
    found = thresholds_of([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0], [1.0, 1.0, 1.0]], 0.75)
    assert found.tolist() == pytest.approx([1.5, 6.5 - 1e-3, 1.0 + 1e-3])  # 1.5, 6.5, 1 before the margin


def test_samples_stay_and_the_first_choice_is_made_twice():
    """With two improve steps trlX samples in its 1st, 2nd, 4th, 6th, ... choice; the percentile is that of the steps
    0, 0, 1, 0, 1, ..."""
    trainer = GrowingRFT.__new__(GrowingRFT)
    trainer.config = RFTConfig(start_quantile=0.5, end_quantile=1.0)
    trainer.improve_steps, trainer.pool, trainer.growths, trainer.train_data = 2, {}, 0, []
    rounds = [
        [(sample(1, 10), 0.0), (sample(1, 11), 2.0), (sample(2, 10), 8.0), (sample(2, 12), 4.0)],
        [(sample(1, 11), 2.0), (sample(1, 12, 13), 3.0), (sample(2, 13), 9.0)],
        [(sample(1, 14), 9.0)],
    ]
    asked = []

    def scored_samples(number):
        asked.append(number)
        return rounds[number]

    trainer.scored_samples = scored_samples

    def texts(number):
        return [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in trainer.chosen(number)]

    assert texts(0) == [[1, 11], [2, 10]]  # thresholds 1 and 6
    assert texts(1) == [[1, 12, 13], [2, 10], [2, 13]]  # 2 + 0.001 of 0, 2, 2, 3, and 8 - 0.001
    assert asked == [0, 1]
    assert trainer.round_metrics['scores_mean'] == pytest.approx((0 + 2 + 8 + 4 + 2 + 3 + 9) / 7)
    assert texts(2) == [[1, 12, 13], [2, 13]]  # the quantile 0.75: 2.25 and 8.5
    assert asked == [0, 1]
    assert trainer.round_metrics['len_samples_selected'] == 2
    assert texts(3) == [[1, 12, 13], [1, 14], [2, 10], [2, 13]]  # 2 + 0.001 of five, and 8 - 0.001
    assert asked == [0, 1, 2]
    (learned,) = {len(s.prompt_ids): s for s in trainer.chosen(2)}.values()  # every token but the first
    assert learned.response_mask.all() and len(learned.response_mask) == len(learned.response_ids)
    with pytest.raises(ValueError, match='cannot resume'):
        trainer.load_state_dict({})


def test_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    GPTActor(config=tiny_config('gpt2', layers=2, positions=32)).save_pretrained('model', tokenizer=char_tokenizer())
    method = TheirConfig(
        n_generations_per_prompt=4, n_improve_steps=2, gen_kwargs={'max_new_tokens': 5, 'do_sample': True}
    )
    base = default_ppo_config()
    base.method = method
    config = TRLConfig.update(
        base,
        {
            'model.model_path': 'model',
            'model.num_layers_unfrozen': -1,
            'tokenizer.tokenizer_path': 'model',
            'train': {'trainer': 'AccelerateRFTTrainer', 'epochs': 4, 'batch_size': 4, 'seq_length': 24},
            'train.tracker': None,
        },
    )
    assert TRLConfig.from_dict(config.to_dict()).method == method
    calls = []

    def reward_fn(samples, prompts, outputs):
        calls.append(len(samples))
        assert all(s == p + o for s, p, o in zip(samples, prompts, outputs, strict=True))
        return [float(len(set(output))) for output in outputs]

    trainer = train(reward_fn=reward_fn, prompts=['ab', 'c', 'd'], eval_prompts=['ab'], config=config)
    lines = [json.loads(line) for line in (tmp_path / 'ckpts' / 'metrics.jsonl').read_text().splitlines()]
    assert [line['rft/quantile'] for line in lines] == pytest.approx([0.7, 0.7, 0.825, 0.7])
    assert calls.count(12) == 3
    assert [line['scores_mean'] for line in lines][1] == lines[2]['scores_mean']
    assert trainer.iter_count == sum(-(-int(line['len_samples_selected']) // 4) for line in lines)
    assert lines[-1]['loss'] == lines[-1]['sft/loss']
    drawn = trainer.generate(torch.tensor([[3, 4]]), output_scores=True)
    assert drawn.shape == (1, 7) and torch.is_tensor(drawn)
    found = trainer.generate(
        torch.tensor([[3, 4]]), do_sample=False, return_dict_in_generate=True, output_scores=True, eos_token_id=None
    )
    assert found.sequences.shape == (1, 7) and len(found.scores) == 5
    best = [int(scores.argmax()) for scores in found.scores]
    assert found.sequences[0, 2:].tolist() == best
    with torch.no_grad():
        logits = trainer.model(found.sequences).logits[0, 1:-1]
    torch.testing.assert_close(torch.cat(found.scores), logits, rtol=1e-4, atol=1e-4)
