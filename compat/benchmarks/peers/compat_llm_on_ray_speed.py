"""Worker of `compat_llm_on_ray.py speed`: four optimizer steps on eight pairs each of a reward model, 2 x 64 tokens a pair.

With LLM_ON_RAY_SOURCE in the environment it is llm-on-ray's `RMTrainer.train` on its `HuggingFaceRewardModel`, else
`RewardModelTrainer.fit`. An update is an epoch of 32 pairs.

Of llm-on-ray's package only what the reward trainer uses is imported: the `__init__` of its `common` would import every
part, environments of RLlib too. `ray.train` and `peft` are replaced by empty names; neither has a part in a step.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from work import (
    ADAMW,
    NEW_TOKENS,
    PROMPT_TOKENS,
    SEQUENCES,
    VOCAB,
    Case,
    begin,
    prompt_ids,
    text_of,
    tokenizer,
    versions,
)

PAIRS_OF_A_STEP = 8


def answers() -> Any:
    """(SEQUENCES, 2, NEW_TOKENS) ids: the better answer, then the worse, which differ from the first token on."""
    ids = torch.randint(2, VOCAB, (SEQUENCES, 2, NEW_TOKENS), generator=torch.Generator().manual_seed(1))
    ids[:, :, 0] = torch.tensor([2, 3])
    ids[:, :, -1] = torch.tensor([2, 3])
    return ids


def stand_ins(source: str) -> None:
    names: dict[str, dict[str, Any]] = {
        'ray': {},
        'ray.train': {'report': None, 'Checkpoint': None},
        'peft': {'get_peft_model': None, 'LoraConfig': None},
        'llm_on_ray.common': {'__path__': [f'{source}/llm_on_ray/common']},
    }
    for name, attributes in names.items():
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)  # for those who only ask whether it is there
        made.__dict__.update(attributes)
        sys.modules[name] = made


def theirs(case: Case, source: str) -> Callable[[], None]:
    stand_ins(source)
    sys.path.insert(0, source)
    import accelerate
    from datasets import Dataset, DatasetDict
    from llm_on_ray.common.dataprocesser.rm_dataprocesser import RMDataProcesser
    from llm_on_ray.common.model.reward_model import HuggingFaceRewardModel
    from llm_on_ray.common.trainer.rm_trainer import RMTrainer

    # its trainer asks for prepare_dataloader, of which this class has only the old name
    RMDataProcesser.prepare_dataloader = RMDataProcesser.prepare
    rows = [
        {'prompt': text_of(prompt), 'chosen': f' {text_of(better)}', 'rejected': f' {text_of(worse)}'}
        for prompt, (better, worse) in zip(prompt_ids(SEQUENCES), answers(), strict=True)
    ]
    # without records to evaluate on: its evaluation asks a tensor for its loss, and raises
    data = DatasetDict({'train': Dataset.from_list(rows), 'test': Dataset.from_list(rows).select([])})
    model = HuggingFaceRewardModel()({'name': case.model})
    trainer = RMTrainer(
        {
            'num_train_epochs': 1,
            'log_path': tempfile.mkdtemp(),
            'dataprocesser': {
                'type': 'RMDataProcesser',
                'block_size': PROMPT_TOKENS + NEW_TOKENS,
                'per_device_train_batch_size': PAIRS_OF_A_STEP,
            },
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    trainer.prepare(model, tokenizer(), data, optimizer, accelerate.Accelerator(cpu=True))
    return trainer.train


def ours(case: Case) -> Callable[[], None]:
    from chatgpt.data.tokenize import TokenizedPreference
    from chatgpt.nn import GPTRM
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.trainer import RewardModelTrainer

    strategy = NaiveStrategy(seed=0, device='cpu')
    model = GPTRM(pretrained=case.model)
    model, optim = strategy.prepare((model, torch.optim.AdamW(model.parameters(), **ADAMW)))
    whole = torch.ones(NEW_TOKENS, dtype=torch.bool)
    data = [
        TokenizedPreference(prompt_ids=prompt, responses=list(pair), response_masks=[whole, whole])
        for prompt, pair in zip(prompt_ids(SEQUENCES), answers(), strict=True)
    ]
    return RewardModelTrainer(
        strategy,
        model,
        optim,
        data,
        train_batch_size=PAIRS_OF_A_STEP,
        max_epochs=1,
        lr_schedule='constant',
        max_grad_norm=None,
        calibrate=False,
    ).fit


def main() -> None:
    case, line = begin()
    source = os.environ.get('LLM_ON_RAY_SOURCE')
    update = theirs(case, source) if source else ours(case)
    line.ready(**versions('accelerate'), trainer='RMTrainer' if source else 'RewardModelTrainer')
    while line.wait():
        update()
        line.done(2 * SEQUENCES * (PROMPT_TOKENS + NEW_TOKENS), 2 * SEQUENCES)


if __name__ == '__main__':
    main()
