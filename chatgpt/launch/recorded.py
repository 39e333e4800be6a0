"""Reads the recorded responses of earlier runs, to learn a critic from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from chatgpt.data import split_examples
from chatgpt.launch.beside import check_support
from chatgpt.launch.inputs import Inputs
from chatgpt.launch.runs import CriticRun
from chatgpt.monitor.run_folder.rollouts import read_rollouts, recorded_phases
from chatgpt.nn.heads import stored_support
from chatgpt.nn.reward_model import is_scorer
from chatgpt.trainer.callbacks.token_texts import token_texts
from chatgpt.trainer.objectives.critic import Returned, returned
from chatgpt.types import Sequence

COLUMNS = ('phase', 'index', 'prompt_ids', 'token_ids', 'prompt_tokens', 'mask', 'rewards', 'shaped_score')


def read_recorded(run: CriticRun, inputs: Inputs) -> None:
    """Reads the recorded responses of a run's folders; those to some of the prompts are held out.

    Raises:
        ValueError: for a folder without recorded responses, or with those of another tokenizer; for a single prompt;
            for a saved critic with a head for another `critic_loss`.
    """
    base = str(run.base)
    support = stored_support(base)
    if support is not None and not is_scorer(base, inputs.config):
        check_support(run, f'pretrain={base}', support)
    by_prompt: dict[tuple[int, ...], list[Returned]] = {}
    for folder in run.rollouts or ():
        for record in records_of(run, folder, inputs.tokenizer):
            by_prompt.setdefault(tuple(record.prompt_ids.tolist()), []).append(record)
    prompts = list(by_prompt)
    if run.validation_percentage and len(prompts) < 2:
        raise ValueError(
            'all recorded responses are to one prompt, so none can be held out: give further folders, or '
            '--validation_percentage 0'
        )
    train, held = split_examples(prompts, run.validation_percentage, seed=run.seed)
    inputs.train, inputs.validation = ([record for p in part for record in by_prompt[p]] for part in (train, held))
    inputs.notes = [
        f'{len(inputs.train)} responses to {len(train)} prompts to learn from, {len(inputs.validation)} to {len(held)} '
        'other prompts to evaluate on'
    ]


def records_of(run: CriticRun, folder: str, tokenizer: Any) -> list[Returned]:
    """Returns the responses recorded in the folder of a run, but for those without a token that counts."""
    sequences, rewards, seen = list[Sequence](), list[Tensor](), False
    for row in _rows(folder):
        if not seen:
            _check_tokenizer(folder, row, tokenizer)
        seen = True
        mask = torch.tensor(row['mask'], dtype=torch.bool)
        if not mask.any():
            continue
        ids = {name: torch.tensor(row[column]) for name, column in _IDS.items()}
        sequences.append(Sequence(**ids, response_mask=mask))
        rewards.append(_rewards(run, row, mask))
        if not torch.isfinite(rewards[-1]).all():
            raise ValueError(
                f'{folder}: a reward of sample {row["index"]}, phase {row["phase"]}, is not a finite number'
            )
    if not sequences:
        raise ValueError(f'{folder}: its recorded responses have no token that counts; give the folder of another run')
    return returned(sequences, rewards, gamma=run.gamma)


_IDS = {'prompt_ids': 'prompt_ids', 'response_ids': 'token_ids'}


def _rows(folder: str) -> Iterator[dict[str, Any]]:
    """Yields recorded sequences, a phase in memory at a time."""
    for phase in recorded_phases(folder):
        yield from read_rollouts(folder, [phase], columns=COLUMNS)


def _check_tokenizer(folder: str, row: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ValueError if the tokenizer does not write the tokens of a row as they were recorded."""
    ids, texts = row['prompt_ids'], row['prompt_tokens']
    found = token_texts(tokenizer, ids) if max(ids) < len(tokenizer) else None
    if found == texts:
        return
    if found is None:
        at, here = ids.index(max(ids)), 'unknown'
    else:
        at = next(i for i, (a, b) in enumerate(zip(found, texts, strict=True)) if a != b)
        here = repr(found[at])
    raise ValueError(
        f'{folder} was recorded with another tokenizer: token {ids[at]} is {texts[at]!r} there and {here} here; give '
        "--pretrain a model with the tokenizer of that run's policy"
    )


def _rewards(run: CriticRun, row: Mapping[str, Any], mask: Tensor) -> Tensor:
    if run.returns_from == 'rewards':
        return torch.tensor(row['rewards'], dtype=torch.float32)
    rewards = torch.zeros(len(mask))
    rewards[mask.nonzero()[-1]] = row['shaped_score']
    return rewards
