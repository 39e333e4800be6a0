"""The arithmetic of the comparison with TRL, and its protocol against a peer that does nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / 'benchmarks'
sys.path.insert(0, str(BENCHMARKS))
import vs_peers  # noqa: E402
from work import GROUP, NEW_TOKENS, SEQUENCES, Case, prompt_ids, text_of, tokenizer  # noqa: E402

FAKE = """
import sys
from work import begin
case, line = begin()
print('noise that must not reach the protocol')
line.ready(version='none')
tokens = int(sys.argv[0].endswith('fast.py')) * 100 + 100
while line.wait():
    line.done(tokens, 2)
"""


def side(cpu_s, wall_s, new_tokens, sequences=2):
    return {'cpu_s': cpu_s, 'wall_s': wall_s, 'new_tokens': new_tokens, 'sequences': sequences}


def test_ratios_are_of_tokens_per_second_of_neighbours():
    # ours 100/1, 100/2, 100/4 tokens per CPU-second; theirs 50 each
    rounds = [(side(c, 2 * c, 100), side(1.0, 4.0, 50)) for c in (1.0, 2.0, 4.0)]
    result = vs_peers.summary(rounds)
    assert result['ratio'] == {'min': 0.5, 'median': 1.0, 'max': 2.0}
    assert result['ratio_wall'] == {'min': 1.0, 'median': 2.0, 'max': 4.0}
    assert result['ratio_total'] == pytest.approx((300 / 7) / (150 / 3))
    assert result['ours'] == {'cpu_s': 2.0, 'wall_s': 4.0, 'new_tokens_per_cpu_s': 50.0, 'mean_length': 50.0}
    assert result['theirs']['mean_length'] == 25.0


def test_sides_swapped_give_the_inverse():
    rounds = [(side(1.0, 1.0, 300), side(2.0, 2.0, 150))]
    assert vs_peers.summary(rounds)['ratio']['median'] == 4.0
    assert vs_peers.summary([(b, a) for a, b in rounds])['ratio']['median'] == 0.25


def test_end_probability_gives_the_mean_length():
    p = vs_peers.end_prob_for(1 / 3, NEW_TOKENS)
    lengths = [(1 - p) ** (n - 1) * p * n for n in range(1, NEW_TOKENS)]
    mean = sum(lengths) + (1 - p) ** (NEW_TOKENS - 1) * NEW_TOKENS
    assert mean == pytest.approx(NEW_TOKENS / 3, abs=1e-6)


def test_rigged_model_ends_with_one_probability_everywhere(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    wanted = {'fixed': 0.0, 'eos': vs_peers.end_prob_for(1 / 3, NEW_TOKENS)}
    for lengths, p in wanted.items():
        model = AutoModelForCausalLM.from_pretrained(vs_peers.save_model(tmp_path, lengths))
        with torch.no_grad():
            probs = model(prompt_ids(8)).logits.softmax(-1)
        assert probs[..., 0].max() < 1e-9
        assert torch.allclose(probs[..., 1], torch.full((), p), rtol=0.1, atol=1e-9)
        assert probs[..., 1].mean().item() == pytest.approx(p, rel=0.02, abs=1e-9)


def test_words_are_ids():
    ids = prompt_ids(3)
    assert tokenizer()([text_of(row) for row in ids])['input_ids'] == ids.tolist()


def test_cases_are_named_apart_and_travel_as_json():
    cases = vs_peers.all_cases()
    assert len({c.name for c in cases}) == len(cases)
    assert all(Case.from_json(c.to_json()) == c for c in cases)
    assert all(c.num_prompts == (SEQUENCES if c.method == 'ppo' else SEQUENCES // GROUP) for c in cases)
    assert {c.peer for c in cases} == set(vs_peers.ENVIRONMENTS)


def test_comparison_with_a_fake_peer(tmp_path):
    for name in ('fast', 'slow'):
        (tmp_path / f'{name}.py').write_text(FAKE)
    case = Case('trl_now', 'grpo', 'eos', 'fp32')
    fast, slow = ([sys.executable, str(tmp_path / f'{name}.py')] for name in ('fast', 'slow'))
    result = vs_peers.compare(case, fast, slow, rounds=3, warmup=1, logs=tmp_path / 'logs')
    assert len(result['rounds']) == 3 and result['target'] == 3.0
    assert (result['ours']['mean_length'], result['theirs']['mean_length']) == (100.0, 50.0)
    assert result['about']['theirs'] == {'version': 'none'}
    assert f'| {case.name} |' in vs_peers.table([result])
    assert 'bf16' in vs_peers.page([result], vs_peers.machine(), 'command')
    result['machine'], slower = vs_peers.machine(), {**result, 'ratio': {'min': 0.4, 'median': 0.5, 'max': 0.6}}
    own = vs_peers.page([result], vs_peers.machine(), 'command', [result], [slower]).split(
        'without 16-bit instructions'
    )[1]
    assert f'| {case.name} | 0.50 | ' in own and 'ONEDNN_MAX_CPU_ISA=AVX512_CORE' in own


def test_a_peer_that_fails_says_why(tmp_path):
    (tmp_path / 'bad.py').write_text('raise SystemExit("no such thing here")')
    with pytest.raises(RuntimeError, match='no such thing here'):
        vs_peers.Worker([sys.executable, str(tmp_path / 'bad.py')], tmp_path / 'logs' / 'bad.log')


def test_sizes_travel_with_a_case():
    case = Case('trl_ppo', 'ppo', 'eos', 'bf16', device='cuda', sequences=6, prompt_tokens=5, new_tokens=4, vocab=1000)
    assert Case.from_json(case.to_json()) == case and case.num_prompts == 6
    ids = case.prompts()
    assert ids.shape == (6, 5) and ids.min() >= 2 and ids.max() < 1000
    assert tokenizer(1000)(text_of(ids[0]))['input_ids'] == ids[0].tolist()
    assert Case('trl_ppo', 'ppo', 'eos', 'fp32').prompts().tolist() == prompt_ids(SEQUENCES).tolist()


def test_a_model_of_the_sizes_of_a_case(tmp_path):
    from transformers import AutoConfig

    case = Case('trl_ppo', 'ppo', 'fixed', 'fp32', prompt_tokens=100, new_tokens=50, vocab=700)
    config = AutoConfig.from_pretrained(vs_peers.save_model(tmp_path, 'fixed', layers=1, width=16, heads=2, like=case))
    assert (config.vocab_size, config.n_layer, config.n_embd, config.n_positions) == (700, 1, 16, 150)


def test_a_peer_finds_the_packages_of_its_wheels_first(tmp_path):
    site = tmp_path / 'wheels_of_ours'
    site.mkdir()
    (site / 'torch.py').write_text('__version__ = "from the wheels"\n')
    (tmp_path / 'peer.py').write_text(
        'import json, sys, torch\n'
        'print(json.dumps({"ready": {"torch": torch.__version__}}), flush=True)\n'
        'sys.stdin.read()\n'
    )
    worker = vs_peers.Worker([sys.executable, str(tmp_path / 'peer.py')], tmp_path / 'peer.log', site=site, wait=False)
    try:
        assert worker.about == {'torch': 'from the wheels'}
    finally:
        worker.close()
    with pytest.raises(ValueError, match='holds no wheels'):
        vs_peers.site_of('trl_ppo', tmp_path / 'nowhere', tmp_path)
