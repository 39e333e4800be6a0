"""`--strategy fsdp` builds on the meta device: every script, from every kind of model, trains the same weights as one
process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from chatgpt.launch import demo_world
from chatgpt.launch.arguments import make_strategy, run_main
from chatgpt.nn import GPTRM, GPTActor
from chatgpt.strategies import FSDPStrategy
from chatgpt.testing.processes import environment, free_port, torchrun_environment

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'
LORA = ['--lora_rank=2', '--lora_alpha=4', '--lora_train_bias=lora_only']
PPO = (
    '{prompts} --max_new_tokens=4 training_iteration=1 --experience_batch_size=4 --train_batch_size=4 --lr=1e-3'.split()
)
LEARN = ['--train_batch_size=4', '--max_steps=2', '--lr=1e-2', '--log_interval=1']
RUNS = {
    'sft, adapters': ('train_sft', ['{demonstrations}', *LEARN, *LORA]),
    'reward model, recomputed': ('train_reward_model', ['{pairs}', *LEARN, *LORA, '--gradient_checkpointing']),
    'dpo': ('train_preference', ['{pairs}', *LEARN, '--method=dpo']),
    'ppo, adapters': ('train_prompts', [*PPO, *LORA, '--reward_model={rm}']),
    'ppo, hydra': ('train_prompts', [*PPO, '--num_layers_unfrozen=1', '--reward_model={rm}']),
    'grpo': (
        'train_prompts',
        [*PPO, '--advantage_estimator=grpo', '--num_samples_per_prompt=2', '--reward_model={classifier}'],
    ),
}


@pytest.fixture(scope='module')
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import GPT2ForSequenceClassification

    folder = tmp_path_factory.mktemp('start')
    tokenizer, config = demo_world.demo_tokenizer(), demo_world.demo_config()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    GPTActor(config=config).save_pretrained(folder / 'base', tokenizer=tokenizer)
    reward_model = GPTRM(config=config)
    torch.nn.init.normal_(reward_model.value_head.weight)
    reward_model.save_pretrained(folder / 'rm', tokenizer=tokenizer)
    config.num_labels, config.pad_token_id = 2, tokenizer.pad_token_id
    classifier = GPT2ForSequenceClassification(config)
    torch.nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(folder / 'classifier')
    for name, rows in (
        ('demonstrations', [{'prompt': r['prompt'], 'completion': r['response']} for r in demo_world.demo_corpus(8)]),
        ('pairs', demo_world.demo_preferences(8)),
        ('prompts', demo_world.demo_prompts(4)),
    ):
        (folder / f'{name}.jsonl').write_text('\n'.join(json.dumps(row) for row in rows) + '\n')
    kinds = {'base': '', 'rm': '', 'classifier': ''}
    kinds |= dict.fromkeys(('demonstrations', 'pairs', 'prompts'), '.jsonl')
    return {name: Path(f'{folder / name}{ending}') for name, ending in kinds.items()}


def learned(script: str, monkeypatch: pytest.MonkeyPatch, flags: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Runs a script and returns the weights in its folder."""
    from transformers import AutoModel

    spec = importlib.util.spec_from_file_location(script, EXAMPLES / f'{script}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, 'argv', [script, *flags, '--save_path', str(folder)])
    monkeypatch.setenv('CHATGPT_TRACEBACK', '1')
    run_main(module.main)
    return AutoModel.from_pretrained(
        folder / ('reward_model' if script == 'train_reward_model' else 'actor')
    ).state_dict()


@pytest.mark.parametrize('kind', RUNS)
def test_the_meta_device_changes_nothing(monkeypatch, places, tmp_path, kind):
    from transformers import AutoModel

    script, flags = RUNS[kind]
    flags = [f.format(**places) for f in flags] + ['--pretrain', str(places['base'])]
    built: list[str] = []
    materialise = FSDPStrategy._materialise

    def noted(self, model, stream):
        built.append(type(model).__name__)
        materialise(self, model, stream)

    monkeypatch.setattr(FSDPStrategy, '_materialise', noted)
    plain = learned(script, monkeypatch, [*flags, '--strategy=naive'], tmp_path / 'naive')
    assert not built
    with environment(**torchrun_environment(0, 1, free_port())):
        sharded = learned(script, monkeypatch, [*flags, '--strategy=fsdp'], tmp_path / 'fsdp')
    assert len(built) >= (2 if script in ('train_prompts', 'train_preference') and '--lora_rank=2' not in flags else 1)
    start = AutoModel.from_pretrained(places['base']).state_dict()
    assert plain.keys() == sharded.keys()
    assert any((plain[name] - start[name]).abs().max() > 1e-4 for name in plain)
    for name, tensor in plain.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f'{n}: {text}')


@pytest.mark.parametrize(('name', 'remote_code', 'meta'), [('fsdp', True, False), ('fsdp_cpu', False, True)])
def test_code_from_a_hub_is_built_whole(name, remote_code, meta):
    with (
        environment(**torchrun_environment(0, 1, free_port())),
        make_strategy(name, seed=0, precision='fp32', remote_code=remote_code) as strategy,
        strategy.model_init_context(),
    ):
        assert torch.empty(1).is_meta == meta
