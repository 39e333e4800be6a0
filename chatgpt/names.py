"""What other systems call our settings: one table, for flags, config files and keywords alike.

A name of the table that means exactly the same is taken for ours on command lines and in config files; one that means
something near is named in the error. `hint` makes every suggestion of the library. Imports nothing of ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Ours(NamedTuple):
    """One of our names, the value of it that the other name stands for, and where the two differ; with a remark alone
    there is no such setting here."""

    name: str
    remark: str = ''
    value: str = ''


_STEP = 'of one optimizer step, all processes together'
THEIRS: dict[str, tuple[Ours, ...]] = {
    # Hugging Face's Trainer and scripts
    'learning_rate': (Ours('lr'), Ours('', 'the learning rate is that of the optimizer that the trainer is given')),
    'model_name_or_path': (Ours('pretrain'), Ours('model')),
    'tokenizer_name': (Ours('tokenizer'),),
    'output_dir': (Ours('save_path'), Ours('run_dir')),
    'dataset_name': (Ours('dataset'), Ours('prompt_path')),
    'train_file': (Ours('dataset'), Ours('prompt_path')),
    'validation_split_percentage': (Ours('validation_percentage'),),
    'per_device_train_batch_size': (Ours('batch_size'), Ours('train_batch_size', _STEP)),
    'num_train_epochs': (Ours('epochs'), Ours('max_epochs')),
    'lr_scheduler': (Ours('lr_schedule'),),
    'lr_scheduler_type': (Ours('lr_schedule'),),
    'max_train_steps': (Ours('max_steps'),),
    'logging_steps': (Ours('log_interval'),),
    'save_steps': (Ours('checkpoint_interval', 'in learning phases'),),
    'save_total_limit': (Ours('keep_last'),),
    'resume_from_checkpoint': (Ours('resume'),),
    'report_to': (Ours('log_with'), Ours('callbacks', 'such as TensorBoard() or WandB()')),
    'log_with': (Ours('callbacks', 'such as TensorBoard() or WandB()'),),
    'bf16': (Ours('precision', value='bf16'), Ours('', 'the precision is that of the strategy')),
    'fp16': (Ours('precision', value='fp16'), Ours('', 'the precision is that of the strategy')),
    'model_path': (Ours('weights'),),  # of inference; in training it is where the trained model is written
    'max_seq_length': (Ours('max_len'), Ours('max_length')),
    'max_tokens': (Ours('max_new_tokens', 'of a response'),),
    'warmup_ratio': (Ours('warmup_steps', 'in optimizer steps'),),
    'eval_steps': (Ours('eval_interval', 'in learning phases'),),
    'deepspeed': (Ours('strategy', 'such as fsdp or colossalai_zero2'), Ours('colossalai_zero2', 'or fsdp')),
    'fsdp': (Ours('strategy', value='fsdp'),),
    'load_in_4bit': (Ours('quantize', value='nf4'),),
    # TRL
    'mini_batch_size': (Ours('train_batch_size', _STEP),),
    'ppo_epochs': (Ours('max_epochs'),),
    'num_ppo_epochs': (Ours('max_epochs'),),
    'init_kl_coef': (Ours('kl_coef'),),
    'target': (Ours('kl_target'),),
    'horizon': (Ours('kl_horizon'),),
    'adap_kl_ctrl': (Ours('kl_target', 'which makes it adaptive'),),
    'cliprange': (Ours('eps_clip'),),
    'cliprange_value': (Ours('value_clip'),),
    'vf_coef': (Ours('value_coef'),),
    'beta': (Ours('kl_coef', 'of the penalty'),),
    'num_episodes': (Ours('num_timesteps', 'each of which collects and learns'),),
    'epsilon': (Ours('eps_clip'),),
    'epsilon_high': (Ours('eps_clip_high'),),
    'num_generations': (Ours('num_samples_per_prompt'),),
    'response_length': (Ours('max_new_tokens'),),
    'max_completion_length': (Ours('max_new_tokens'),),
    'max_prompt_length': (Ours('max_prompt_tokens'),),
    'missing_eos_penalty': (Ours('missing_eos_score', 'which is the score itself, so negative'),),
    'use_score_scaling': (Ours('score_scaling', value='running'),),
    'lora_r': (Ours('lora_rank'),),
    'reward_model_path': (Ours('reward_model'),),
    'sft_model_path': (Ours('pretrain'),),
    'loss': (Ours('loss_type'),),
    'min_length': (Ours('min_new_tokens', 'without the prompt'),),
    # llm-on-ray
    'epochs': (Ours('max_epochs'),),
    'base_model': (Ours('pretrain'),),
    'model_name': (Ours('pretrain'),),
    'checkpoint_dir': (Ours('model_path'),),
    'kl_coeff': (Ours('kl_coef'),),
    # torchrun
    'nproc_per_node': (Ours('num_workers', 'of all nodes together'),),
    'nnodes': (Ours('num_nodes'),),
    'max_restarts': (Ours('max_failures'),),
}


TEXTS = ('prompts', 'responses', 'completions', 'outputs', 'samples')
"""arguments of reward and metric functions that are given texts, here, in TRL or in trlX; so no names of columns"""


def ours(name: str, known: Collection[str]) -> str:
    """Our name for exactly what `name` says, where it is one of `known`; else the name itself."""
    if name in known:
        return name
    return next((o.name for o in THEIRS.get(name, ()) if o.name in known and not (o.remark or o.value)), name)


def hint(name: str, known: Collection[str], prefix: str = '') -> str:
    """The end of an error message about an unknown name.

    '; here it is lr' for another system's name, '; did you mean lr, lam?' for a misspelt one, both for another system's
    that is misspelt, and '' when nothing is near: no suggestion is better than a wrong one.

    Args:
        prefix: stands before each suggestion, such as '--'.
    """
    plain = _plain(name)
    if plain not in known and (told := _here(plain, known, prefix)):
        return f'; {told}'
    if told := next((there.remark for there in THEIRS.get(plain, ()) if not there.name), ''):
        return f'; {told}'
    theirs = [other for other in THEIRS if other not in known and _here(other, known, prefix)]
    close = near(name, [*known, *theirs])
    if not close:
        return ''
    if close[0] in theirs:
        return f'; did you mean {prefix}{close[0]}? H{_here(close[0], known, prefix)[1:]}'
    return f'; did you mean {", ".join(prefix + c for c in close if c not in theirs)}?'


def _here(name: str, known: Collection[str], prefix: str) -> str:
    """'here it is lr' for another system's name of one of `known`; else ''."""
    for there in THEIRS.get(name, ()):
        if there.name and there.name in known:
            value = (f' {there.value}' if prefix else f'={there.value!r}') if there.value else ''
            return f'here it is {prefix}{there.name}{value}' + (f', {there.remark}' if there.remark else '')
    return ''


def near(name: str, known: Collection[str]) -> list[str]:
    """Up to three of `known` that `name` may stand for, the nearest first.

    They are those with the fewest typing errors (a letter that is wrong, missing, too many or swapped with the next
    one; one of them in five letters), else those that hold the name as whole words, or abbreviate it.
    """
    # of section.key and phase/metric the last part, unless the name has several as well
    tails = {k: k if re.search('[./]', name) else re.split('[./]', k)[-1] for k in known}
    words, plain = {k: _plain(tail) for k, tail in tails.items()}, _plain(name)
    most = max(1, len(plain) // 5)
    errors = {k: _distance(plain, word) for k, word in words.items() if abs(len(plain) - len(word)) <= most}
    close = {
        k: (n, _distance(name, tails[k]))
        for k, n in errors.items()
        if n <= most and min(len(plain), len(words[k])) + n > 2  # of two letters, one wrong is half
    }
    if close:
        return [k for k in close if close[k] == min(close.values())][:3]
    whole = [k for k, word in words.items() if len(plain) > 3 and f'_{plain}_' in f'_{word}_']
    longer = [k for k, word in words.items() if len(plain) > 3 and word.startswith(plain)]
    shorter = [
        k for k, word in words.items() if len(word) > 2 and plain.startswith(word) and '_' not in plain[len(word) :]
    ]
    return list(dict.fromkeys([*whole, *longer, *sorted(shorter, key=len, reverse=True)]))[:3]


def _plain(name: str) -> str:
    return re.sub('[-/.]', '_', name.lower())


def _distance(a: str, b: str) -> int:
    """Fewest typing errors between two words (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def choice_hint(message: str) -> str:
    """The hint for a message of argparse about a value that is none of the choices, which it lists; '' for others."""
    found = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)$", message)
    return hint(found[1], [choice.strip("' ") for choice in found[2].split(',')]) if found else ''
