"""What other systems call our settings: one table, for flags, config files and keywords alike.

A name of the table that means exactly the same is taken for ours on command lines and in config files; one that means
something near is named in the error. Imports nothing of ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import NamedTuple


class Ours(NamedTuple):
    """One of our names, and where it differs from the other; with a remark alone there is no such setting here."""

    name: str
    remark: str = ''


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
    'bf16': (Ours('precision', 'bf16'), Ours('', 'the precision is that of the strategy')),
    'fp16': (Ours('precision', 'fp16'), Ours('', 'the precision is that of the strategy')),
    'model_path': (Ours('weights'),),  # of inference; in training it is where the trained model is written
    'max_seq_length': (Ours('max_len'), Ours('max_length')),
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
    'epsilon': (Ours('eps_clip'),),
    'epsilon_high': (Ours('eps_clip_high'),),
    'num_generations': (Ours('num_samples_per_prompt'),),
    'response_length': (Ours('max_new_tokens'),),
    'max_completion_length': (Ours('max_new_tokens'),),
    'max_prompt_length': (Ours('max_prompt_tokens'),),
    'missing_eos_penalty': (Ours('missing_eos_score', 'which is the score itself, so negative'),),
    'use_score_scaling': (Ours('score_scaling', "'running'"),),
    'lora_r': (Ours('lora_rank'),),
    'reward_model_path': (Ours('reward_model'),),
    'sft_model_path': (Ours('pretrain'),),
    'loss_type': (Ours('loss'),),
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


def ours(name: str, known: Collection[str]) -> str:
    """Our name for exactly what `name` says, where it is one of `known`; else the name itself."""
    if name in known:
        return name
    return next((o.name for o in THEIRS.get(name, ()) if o.name in known and not o.remark), name)


def hint(name: str, known: Collection[str], prefix: str = '') -> str:
    """'; here it is lr' for another system's name, '; did you mean lr, lam?' for a misspelt one, or '' when nothing is
    near."""
    for there in THEIRS.get(name, ()):
        if there.name in known:
            return f'; here it is {prefix}{there.name}' + (f', {there.remark}' if there.remark else '')
        if not there.name:
            return f'; {there.remark}'
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f'; did you mean {", ".join(prefix + c for c in close)}?' if close else ''


def choice_hint(message: str) -> str:
    """The hint for a message of argparse about a value that is none of the choices, which it lists; '' for others."""
    found = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)$", message)
    return hint(found[1], [choice.strip("' ") for choice in found[2].split(',')]) if found else ''
