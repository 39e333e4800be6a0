"""The numbers of `compat_trlx_work.py` out of trlX 0.7's own code, as JSON.

    python compat_trlx_peer.py SOURCE OUT.json     # in trlX's environment; SOURCE is a folder with the package `trlx`

`deepspeed`, `ray` and `wandb` are replaced by empty modules and torchtyping's annotations by nothing: trlX imports them,
and a run on one process uses none. Rollouts and losses are the trainer's own `make_experience` and `loss`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch


class _Annotation:
    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def module(name: str, **attributes: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)  # for those who only ask whether it is there
    made.__dict__.update(attributes)
    sys.modules[name] = made
    return made


def stand_ins() -> None:
    """Modules that trlX imports and does not use here."""
    gathered = types.SimpleNamespace(GatheredParameters=lambda *a, **k: contextlib.nullcontext())
    module('deepspeed', zero=gathered)
    module('torchtyping', TensorType=_Annotation)
    module('wandb')
    session = module('ray.air.session')
    air = module('ray.air', session=session)
    module('ray', is_initialized=lambda: False, air=air)


def config_of(case: dict[str, Any], tokenizer: str, model: Any) -> Any:
    from trlx.data.configs import ModelConfig, OptimizerConfig, SchedulerConfig, TokenizerConfig, TrainConfig, TRLConfig
    from trlx.data.method_configs import get_method

    base = {
        'ppo': work.PPO_METHOD,
        'ilql': work.ILQL_METHOD,
        'sft': {'name': 'sftconfig', 'gen_kwargs': {'max_new_tokens': 8}},
    }
    method = {**base[case['kind']], **case.get('method', {})}
    return TRLConfig(
        method=get_method(method['name']).from_dict(method),
        model=ModelConfig(model_path=model, num_layers_unfrozen=case.get('unfrozen', -1)),
        optimizer=OptimizerConfig(name='sgd', kwargs={'lr': 0.1}),
        scheduler=SchedulerConfig(name='cosine_annealing', kwargs={'T_max': 10}),
        tokenizer=TokenizerConfig(tokenizer_path=tokenizer),
        train=TrainConfig(
            total_steps=4,
            seq_length=48,
            epochs=1,
            batch_size=4,
            checkpoint_interval=100,
            eval_interval=100,
            pipeline='PromptPipeline',
            trainer='AcceleratePPOTrainer',
            tracker=None,
        ),
    )


def ppo(case: dict[str, Any], folder: str) -> dict[str, Any]:
    from trlx.utils.loading import get_pipeline, get_trainer

    config = config_of(case, folder, work.make_model(0.0))

    def reward_fn(samples: Any, outputs: Any, tokenizer: Any, **_: Any) -> Any:
        return work.dense_scores(outputs, tokenizer) if case.get('dense') else work.score(samples)

    trainer = get_trainer('AcceleratePPOTrainer')(config=config, reward_fn=reward_fn)
    work.fill(trainer.model.v_head, 0.0, 'v_head.')
    wrong = None
    if 'unfrozen' in case:
        work.shift(trainer.model.base_model, 0.3)
    else:  # its own reference leaves the first block out; measured, and then replaced by a sound one
        wrong = reference_error(trainer.model)
        del trainer.model.frozen_head
        trainer.ref_model = work.make_model(0.9)
    tokenizer, given = trainer.tokenizer, dict(zip(work.PROMPTS, case['responses'], strict=True))

    def generate(input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        prompts = tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        ids = [[*tokenizer(given[p]).input_ids, work.EOS] for p in prompts]
        width = max(map(len, ids))
        padded = torch.tensor([row + [work.PAD] * (width - len(row)) for row in ids])
        return torch.cat([input_ids, padded], dim=1)

    trainer.generate = generate
    pipeline = get_pipeline('PromptPipeline')(work.PROMPTS, 40, tokenizer)
    trainer.prompt_iterator = iter(pipeline.create_loader(config.method.chunk_size))
    trainer.make_experience(4)
    elements = list(trainer.store.history)
    batch = next(iter(trainer.store.create_loader(4, shuffle=False)))
    lengths = [len(e.rewards) for e in elements]
    advantages, returns = config.method.get_advantages_and_returns(
        batch.values, batch.rewards, batch.rewards.shape[1], use_whitening=False
    )
    work.shift(trainer.model, work.OLD_SHIFT)
    loss, stats = trainer.loss(batch)
    loss.backward()
    return {
        'reference_error_at_initialisation': wrong,
        'lists': {
            'logprobs': [e.logprobs.tolist() for e in elements],
            'values': [e.values.tolist() for e in elements],
            'rewards': [e.rewards.tolist() for e in elements],
            'advantages': [row[:n].tolist() for row, n in zip(advantages, lengths, strict=True)],
            'returns': [row[:n].tolist() for row, n in zip(returns, lengths, strict=True)],
        },
        'numbers': {'loss': loss.item(), **{k: float(v) for k, v in stats.items()}},
        'gradients': work.gradients(trainer.model),
    }


@torch.no_grad()
def reference_error(model: Any) -> float:
    """The largest difference between the logits of policy and reference before any training; 0 where they are one."""
    ids = torch.arange(4, 24)[None]
    return float((model(ids, return_dict=True).logits - model.forward_hydra(ids, return_dict=True).logits).abs().max())


def ilql(case: dict[str, Any], folder: str) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from trlx.models.modeling_ilql import AutoModelForCausalLMWithILQLHeads
    from trlx.trainer.accelerate_ilql_trainer import make_experience

    config = config_of(case, folder, None)
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(
        work.make_model(0.0), two_qs=config.method.two_qs, alpha=0.1
    )
    work.fill(model.ilql_heads, 0.0, 'ilql_heads.')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    store = make_experience(work.SAMPLES, work.RETURNS, tokenizer, max_length=48, verbose=False)
    from trlx.pipeline.offline_pipeline import ilql_collate_fn

    batch = ilql_collate_fn([store[i] for i in range(len(work.SAMPLES))])
    logits, qs, target_qs, vs, _ = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        actions_ixs=batch.actions_ixs,
        states_ixs=batch.states_ixs,
    )
    loss, stats = config.method.loss((logits, (qs, target_qs, vs)), batch)
    loss.backward()
    rewards = [e[e != 0].tolist() for e in batch.rewards]
    return {
        'lists': {'rewards': rewards},
        'numbers': {k: float(v) for k, v in stats.items()},
        'gradients': work.gradients(model),
    }


def sft(case: dict[str, Any], folder: str) -> dict[str, Any]:
    from trlx.utils.loading import get_trainer

    work.make_model(0.0).save_pretrained(f'{folder}/model')
    trainer = get_trainer('AccelerateSFTTrainer')(config=config_of(case, folder, f'{folder}/model'))
    trainer.make_experience(work.TEXTS, 48)
    loss, _ = trainer.loss(next(iter(trainer.store.create_loader(2))))
    loss.backward()
    return {'lists': {}, 'numbers': {'loss': loss.item()}, 'gradients': work.gradients(trainer.model)}


def main() -> None:
    source, out = sys.argv[1:3]
    stand_ins()
    sys.path.insert(0, source)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work.make_tokenizer(folder)
        for name, case in work.CASES.items():
            torch.manual_seed(0)
            found[name] = {'ppo': ppo, 'ilql': ilql, 'sft': sft}[case['kind']](case, folder)
    import transformers

    about = {'trlx': '0.7.0', 'torch': torch.__version__, 'transformers': transformers.__version__}
    with open(out, 'w') as file:
        json.dump({'about': about, 'cases': found}, file, indent=1)
        file.write('\n')


if __name__ == '__main__':
    import compat_trlx_work as work

    main()
