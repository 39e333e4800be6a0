"""The cases of `compat_work.py` here: what the last step made, and all of it as one dict."""

from __future__ import annotations

from typing import Any

from compat_work import CASES, run_case, summary


def watch(trainer: Any) -> Any:
    """What the last step made, of the tokens that count."""
    from chatgpt.trainer.estimates import whiten_tokens

    def made(stats: dict[str, Any]) -> dict[str, list[list[float]]]:
        experiences = trainer.inner.last_experiences
        whitened = whiten_tokens(experiences)

        def rows(of: Any, items: Any = experiences) -> list[list[float]]:
            return [of(e)[e.response_mask].tolist() for e in items]

        return {
            'rewards': rows(lambda e: e.rewards),
            'non_score_rewards': rows(lambda e: -stats['objective/kl_coef'] * e.kl),
            'values': rows(lambda e: e.values),
            'advantages': rows(lambda e: e.advantages, whitened),
            'returns': rows(lambda e: e.returns),
        }

    return made


def run(name: str, policy: str, reference: str) -> dict[str, Any]:
    """One case, with gradients as `summary` gives them."""
    import chatgpt_compat.trl as trl

    result = run_case(trl, watch, CASES[name], policy, reference)
    return result | {'gradients': summary(result['gradients'])}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """The greatest difference of each kind of number, relative to the greatest of its kind.

    Statistics are each relative to themselves; where a number is below 0.01, to 0.01.
    """
    found = {}
    for kind, rows in theirs['tokens'].items():
        a, b = ([x for row in side for x in row] for side in (ours['tokens'][kind], rows))
        assert len(a) == len(b), kind
        found[kind] = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(max(map(abs, b)), 0.01)
    assert ours['gradients'].keys() == theirs['gradients'].keys()
    found['gradients'] = max(
        abs(x - y) / theirs['gradients'][name][0]
        for name, numbers in ours['gradients'].items()
        for x, y in zip(numbers, theirs['gradients'][name], strict=True)
    )
    found['statistics'] = 0.0
    for a, b in zip(ours['stats'], theirs['stats'], strict=True):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        found['statistics'] = max(found['statistics'], *(abs(a[k] - b[k]) / max(abs(b[k]), 0.01) for k in b))
    return found
