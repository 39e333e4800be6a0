"""The cases of `compat_recent_work.py` here, and how far two sides are apart."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from compat_recent_work import END, PROMPTS, run_learner, run_ppo

from chatgpt.rollout import Abilities, Call, RolloutEngine
from chatgpt.types import Sample


class GivenResponses(RolloutEngine):
    """An engine that answers each prompt with the response it is given."""

    abilities = Abilities(copies_weights=False, reproducible=True)

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers

    def begin(self, actor: Any) -> None:
        pass

    def end(self) -> None:
        pass

    def generate(self, call: Call) -> list[Sample]:
        found = []
        for i, prompt in enumerate(call.prompts):
            ids = torch.tensor(self.answers[tuple(prompt.ids.tolist())])
            zeros, reason = torch.zeros(len(ids)), 'eos' if ids[-1] == END else 'length'
            found.append(call.sample(i, ids, zeros, zeros.clone(), torch.ones(len(ids)), reason))
        return found


def watch(trainer: Any, answers: dict[tuple[int, ...], list[int]]) -> tuple[Any, list[Any]]:
    from chatgpt.trainer.estimates import whiten_tokens

    inner = trainer.inner
    inner.collector.engine = inner.engine = GivenResponses(answers)
    inner.maker.settings = dataclasses.replace(inner.maker.settings, recompute_logprobs=True)

    def made() -> dict[str, list[list[float]]]:
        experiences = inner.last_experiences
        whitened = whiten_tokens(experiences)
        order = [[tuple(e.prompt_ids.tolist()) for e in experiences].index(tuple(p)) for p in PROMPTS]

        def rows(of: Any, items: Any = experiences) -> list[list[float]]:
            return [of(items[i]).tolist() for i in order]

        return {
            'scores': [[experiences[i].score] for i in order],
            'kl': rows(lambda e: e.kl),
            'rewards': rows(lambda e: e.rewards),
            'values': rows(lambda e: e.values),
            'returns': rows(lambda e: e.returns),
            'advantages': rows(lambda e: e.advantages, whitened),
        }

    return made, list(inner.optimizers().values())


def first_step(trainer: Any, call: Any) -> None:
    trainer.optimizer.register_step_pre_hook(lambda *_: call())


def names() -> SimpleNamespace:
    import chatgpt_compat.trl as trl

    kinds = ('PPO', 'DPO', 'SFT', 'Reward')
    return SimpleNamespace(
        **{f'{kind}{part}': getattr(trl, f'{kind}{part}') for kind in kinds for part in ('Config', 'Trainer')},
        first_step=first_step,
    )


def ppo(name: str, folders: dict[str, str], out: str) -> dict[str, Any]:
    return run_ppo(names(), watch, name, folders, out)


def learner(name: str, folders: dict[str, str], out: str) -> dict[str, Any]:
    return run_learner(names(), name, folders, out)


def differences(ours: dict[str, Any], theirs: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    """The greatest difference of each kind of number: of tokens relative to the greatest of their kind, of gradients to
    their norm, of logged numbers each to itself, or to 0.01 where it is smaller (a policy loss, which is a sum of
    advantages whose mean is 0, to 1)."""
    found = {}
    only, scale = case.get('only'), case.get('scale', 1.0)
    for kind, rows in theirs.get('tokens', {}).items():
        if only is None or kind in only:
            a, b = ([x for row in side for x in row] for side in (ours['tokens'][kind], rows))
            assert len(a) == len(b), kind
            found[kind] = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(max(map(abs, b)), 0.01)
    if only is not None:
        return found
    mine, other = ours['gradients'], theirs['gradients']
    assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
    largest = max(numbers[0] for numbers in other.values())
    found['gradients'] = max(
        abs(scale * x - y) / max(other[name][0], 1e-2 * largest)
        for name, numbers in mine.items()
        for x, y in zip(numbers, other[name], strict=True)
    )
    found['logged'] = 0.0
    for a, b in zip(ours['logs'], theirs['logs'], strict=True):
        assert b.keys() <= a.keys(), b.keys() - a.keys()
        for name in b.keys() - set(case.get('apart', ())):
            number = b[name]
            least = 1.0 if name == 'loss/policy_avg' else 0.01
            factor = scale if name in ('loss', 'grad_norm') else 1.0
            found['logged'] = max(found['logged'], abs(factor * a[name] - number) / max(abs(number), least))
    return found
