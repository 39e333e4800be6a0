"""Names of our settings in other systems, for flags, config files and keyword arguments.

Command lines and config files accept a name that means exactly the same; for one of similar meaning the error names our
setting. `hint` makes every suggestion of the library. Imports nothing of ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Ours(NamedTuple):
    """Our name for a setting of another system, the difference between the two, and our value that corresponds to the
    other name. With an empty name, there is no such setting and the remark says what to use."""

    name: str
    remark: str = ''
    value: str = ''


_STEP = 'of one optimizer step, all processes together'
_TIMESTEPS = Ours('num_timesteps', 'each of which collects and learns')
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
    'num_train_epochs': (Ours('epochs'), _TIMESTEPS, Ours('max_epochs')),
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
    'model_path': (Ours('weights'),),  # of inference; in training, the output folder
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
    'beta': (Ours('weight'), Ours('kl_coef', 'of the penalty')),
    'scale_rewards': (Ours('advantage_estimator', "for scale_rewards=False; 'grpo' divides", 'dr_grpo'),),
    'num_episodes': (_TIMESTEPS,),
    'total_episodes': (Ours('num_episodes', 'passes over the prompts'), _TIMESTEPS),
    'num_iterations': (Ours('max_epochs', 'of a learning phase'),),
    'epsilon': (Ours('eps_clip'),),
    'epsilon_high': (Ours('eps_clip_high', 'the distance from 1; with CISPO epsilon_high is the bound itself'),),
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
    'epochs': (_TIMESTEPS, Ours('max_epochs')),
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
"""text arguments of reward and metric functions, here, in TRL or in trlX; columns cannot have these names"""


def ours(name: str, known: Collection[str]) -> str:
    """Returns our name of the same meaning, if it is one of `known`; else `name` itself.

    Of several names that are known the first counts.
    """
    if name in known:
        return name
    found = next((o for o in THEIRS.get(name, ()) if o.name in known), None)
    return found.name if found and not (found.remark or found.value) else name


def hint(name: str, known: Collection[str], prefix: str = '') -> str:
    """Returns the end of an error message about an unknown name.

    '; here it is lr' for another system's name, '; did you mean lr, lam?' for a misspelt name, both for a misspelt name
    of another system, and '' if nothing is similar.

    Args:
        prefix: put before each suggestion, such as '--'.
    """
    plain = _plain(name)
    if plain not in known and (remark := _here(plain, known, prefix)):
        return f'; {remark}'
    if remark := next((there.remark for there in THEIRS.get(plain, ()) if not there.name), ''):
        return f'; {remark}'
    theirs = [t for t in THEIRS if t not in known and _here(t, known, prefix)] if plain not in THEIRS else []
    close = near(name, [*known, *theirs])
    if not close:
        return ''
    if close[0] in theirs:
        return f'; did you mean {prefix}{close[0]}? H{_here(close[0], known, prefix)[1:]}'
    return f'; did you mean {", ".join(prefix + c for c in close if c not in theirs)}?'


def _here(name: str, known: Collection[str], prefix: str) -> str:
    """Returns 'here it is lr' if `name` is another system's name for one of `known`; else ''."""
    for there in THEIRS.get(name, ()):
        if there.name and there.name in known:
            value = (f' {there.value}' if prefix else f'={there.value!r}') if there.value else ''
            return f'here it is {prefix}{there.name}{value}' + (f', {there.remark}' if there.remark else '')
    return ''


def near(name: str, known: Collection[str]) -> list[str]:
    """Returns up to three of `known` that are similar to `name`, the most similar first.

    These are the names at the smallest edit distance (a letter substituted, missing, added or swapped with the next;
    at most one edit in five letters), else those that contain the name as whole words or abbreviate it.
    """
    # compares the last part of section.key and phase/metric, unless the name itself has several parts
    tails = {k: k if re.search('[./]', name) else re.split('[./]', k)[-1] for k in known}
    words, plain = {k: _plain(tail) for k, tail in tails.items()}, _plain(name)
    most = max(1, len(plain) // 5)
    errors = {k: _distance(plain, word) for k, word in words.items() if abs(len(plain) - len(word)) <= most}
    close = {
        k: (n, _distance(name, tails[k]))
        for k, n in errors.items()
        if n <= most and min(len(plain), len(words[k])) + n > 2  # two letters with one edit are not similar
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
    """Returns the edit distance between two words (optimal string alignment)."""
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
    """Returns the hint for argparse's message about an invalid choice; '' for other messages."""
    found = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)$", message)
    return hint(found[1], [choice.strip("' ") for choice in found[2].split(',')]) if found else ''
