"""The numbers of `compat_trlx_work.py` out of this library, from trlX's own config objects, and how far they are from
trlX's."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import compat_trlx_work as work
import torch

from chatgpt.trainer.losses import ActorLoss, SharedLoss, ValueLoss, collate_experience, experience_totals
from chatgpt.types import Sample
from chatgpt_compat.trlx import config as trlx_config
from chatgpt_compat.trlx import trainers
from chatgpt_compat.trlx.pipeline import PromptPipeline, prompts_of

SFT_METHOD = {'name': 'sftconfig', 'gen_kwargs': {'max_new_tokens': 8}}


def config_of(case: dict[str, Any], tokenizer: Any, folder: str) -> Any:
    base: dict[str, Any] = {'ppo': work.PPO_METHOD, 'ilql': work.ILQL_METHOD, 'sft': SFT_METHOD}[case['kind']]
    train = {
        'total_steps': 4,
        'seq_length': 48,
        'epochs': 1,
        'batch_size': 4,
        'tracker': None,
        'checkpoint_dir': folder,
    }
    return trlx_config.TRLConfig.from_dict(
        {
            'method': base | case.get('method', {}),
            'model': {'model_path': None, 'num_layers_unfrozen': case.get('unfrozen', -1)},
            'tokenizer': {'tokenizer_path': tokenizer},
            'optimizer': {'name': 'sgd', 'kwargs': {'lr': 0.1}},
            'scheduler': {'name': 'cosine_annealing', 'kwargs': {'T_max': 1e12}},
            'train': train | {'checkpoint_interval': 100, 'eval_interval': 100},
        }
    )


def run(name: str) -> dict[str, Any]:
    """A case by its name."""
    case = work.CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = work.make_tokenizer(folder)
        config = config_of(case, tokenizer, folder)
        config.model.model_path = work.make_model(0.0)
        return {'ppo': ppo, 'ilql': ilql, 'sft': sft}[case['kind']](case, config, tokenizer)


def ppo(case: dict[str, Any], config: Any, tokenizer: Any) -> dict[str, Any]:
    def reward_fn(samples: Any, outputs: Any, tokenizer: Any, **_: Any) -> Any:
        return work.dense_scores(outputs, tokenizer) if case.get('dense') else work.score(samples)

    there = trainers.AcceleratePPOTrainer(config, reward_fn=reward_fn)
    actor = there.actor
    work.fill(actor.value_head, 0.0, 'v_head.')
    error = None
    if there.initial is not None:
        error = reference_error(actor, there.initial)
        work.fill(there.initial.model, 0.9)
    else:
        work.shift(actor.model, 0.3)
    trainer = there.trainer
    prompts = prompts_of(PromptPipeline(work.PROMPTS, 40, tokenizer), tokenizer)
    samples = []
    for i, (prompt, text) in enumerate(zip(prompts, case['responses'], strict=True)):
        ids = torch.tensor([*tokenizer(text).input_ids, work.EOS])
        zeros = torch.zeros(len(ids))
        samples.append(
            Sample(
                index=i,
                group=i,
                prompt_ids=prompt.ids,
                response_ids=ids,
                response_mask=torch.ones(len(ids), dtype=torch.bool),
                logprobs=zeros,
                filtered_logprobs=zeros,
                edge_distances=zeros,
                finish_reason='eos',
            )
        )
    trainer.collector.decode(samples)
    settings = replace(trainer.maker.settings, recompute_logprobs=True)
    size, made = config.method.chunk_size, []
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        made += trainer.maker.make(chunk, kl_coef=trainer.kl_controller.value, settings=settings)
    items = trainer.config.estimator.whiten(made)
    work.shift(actor, work.OLD_SHIFT)
    loss_of = SharedLoss(ActorLoss(trainer.config, _forward), ValueLoss(trainer.config))
    totals = experience_totals(items, trainer.config, None)
    loss, metrics = loss_of(actor, collate_experience(items, totals))
    loss.backward()
    means = {k: float(m.total.detach() / m.weight) for k, m in metrics.items() if hasattr(m, 'weight')}
    return {
        'reference_error_at_initialisation': error,
        'lists': {
            'logprobs': [e.old_logprobs.tolist() for e in made],
            'values': [e.values.tolist() for e in made],
            'rewards': [e.rewards.tolist() for e in made],
            'advantages': [e.advantages.tolist() for e in made],
            'returns': [e.returns.tolist() for e in made],
        },
        'numbers': {
            'loss': loss.item(),
            'losses/policy_loss': means['policy_loss'],
            'losses/value_loss': means['value_loss'],
            'values/mean': means['value_mean'],
            'policy/approx_kl': means['approx_kl_k3'],
            'ratio': means['ratio_mean'],
        },
        'gradients': work.gradients(actor),
    }


def _forward(model: Any, batch: Any) -> Any:
    return model(batch, with_entropy=True)


@torch.no_grad()
def reference_error(actor: Any, initial: Any) -> float:
    ids = torch.arange(4, 24)[None]
    return float((actor.model(ids).logits - initial.model(ids).logits).abs().max())


def ilql(case: dict[str, Any], config: Any, tokenizer: Any) -> dict[str, Any]:
    there = trainers.AccelerateILQLTrainer(config)
    there.make_experience(work.SAMPLES, work.RETURNS)
    model = there.actor
    for name in ('v_head', 'q_heads', 'target_q_heads'):
        work.fill(getattr(model, name), 0.0, f'{name}.')
    objective, records = there.trainer.objective, list(there.trainer.train_data)
    loss, metrics = objective.loss(model, objective.batch(records, objective.totals(records)))
    loss.backward()
    means = {k: float(m.total / m.weight) for k, m in metrics.items()}
    c = config.method
    return {
        'lists': {'rewards': [r.rewards[r.rewards != 0].tolist() for r in records]},
        'numbers': {
            'losses/loss': loss.item(),
            'losses/loss_q': means['td_loss'],
            'losses/loss_v': means['value_loss'],
            'losses/loss_cql': means['cql_loss'] / c.cql_scale,
            'losses/loss_awac': means['awac_loss'] / c.awac_scale,
            'values/mean': means['value_mean'],
        },
        'gradients': work.gradients(model),
    }


def sft(case: dict[str, Any], config: Any, tokenizer: Any) -> dict[str, Any]:
    there = trainers.AccelerateSFTTrainer(config)
    there.make_experience(work.TEXTS)
    objective, records = there.trainer.objective, list(there.trainer.train_data)
    loss, _ = objective.loss(there.actor, objective.batch(records, objective.totals(records)))
    loss.backward()
    return {'lists': {}, 'numbers': {'loss': loss.item()}, 'gradients': work.gradients(there.actor)}


ON_TOKENS = ('values/mean', 'ratio')
"""numbers of a padded batch that trlX takes over the tokens alone"""
ONLY_THEIRS = {'transformer.wpe.weight'}
"""trained by trlX's hydra, although the reference shares it"""


def differences(ours: dict[str, Any], theirs: dict[str, Any], *, padded: bool = False) -> dict[str, float]:
    """The largest relative difference of each kind of number; a list's is relative to its largest entry, a gradient's to
    its norm. Two numbers below 0.01 are relative to 0.01: the policy loss, a mean of advantages whose mean is 0, and the
    approximate KL, a mean of squares of log-ratios near 0, which are differences of log-probs near 5.

    Args:
        padded: trlX's batch has padding. There the score of a shorter response stands behind its end, and padding enters
            the whitening: such rewards are compared up to the end, advantages and returns of full rows alone, and of
            the losses nothing.
    """
    found = {}
    for name, rows in ours['lists'].items():
        pairs = [_comparable(name, a, b) for a, b in zip(rows, theirs['lists'][name], strict=True)]
        a, b = (torch.tensor([x for pair in pairs for x in pair[side]], dtype=torch.float64) for side in (0, 1))
        found[name] = float((a - b).abs().max() / b.abs().max())
    for name, value in ours['numbers'].items():
        if not padded or name in ON_TOKENS:
            least = 0.01 if name in ('losses/policy_loss', 'policy/approx_kl') else 0.0
            found[name] = abs(value - theirs['numbers'][name]) / max(abs(theirs['numbers'][name]), least)
    if not padded:
        found['gradients'] = _gradients(ours['gradients'], theirs['gradients'])
    return found


def _comparable(name: str, ours: list[float], theirs: list[float]) -> tuple[list[float], list[float]]:
    n = len(ours)
    if len(theirs) == n:
        return ours, theirs
    if name in ('advantages', 'returns'):
        return [], []
    stop = n - 1 if name == 'rewards' else n
    return ours[:stop], theirs[:stop]


def _gradients(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    if (others := set(ours) ^ set(theirs)) - ONLY_THEIRS:
        raise ValueError(f'other gradients: {sorted(others)}')
    largest = max(norm for norm, _, _ in theirs.values())
    worst = 0.0
    for name, (norm, product, wave) in ours.items():
        other_norm, other_product, _ = theirs[name]
        scale = max(other_norm, 1e-3 * largest)  # the keys' biases have none but rounding
        worst = max(worst, abs(norm - other_norm) / scale, abs(product - other_product) / (scale * wave))
    return worst


def is_padded(name: str) -> bool:
    return len({len(text) for text in work.CASES[name].get('responses', ['x'])}) > 1
