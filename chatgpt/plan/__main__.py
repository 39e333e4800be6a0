"""`python -m chatgpt.plan config.json ...`: exit code 0 where the run fits (or no limit was given), 1 where it does
not."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

from chatgpt.names import choice_hint
from chatgpt.plan.setup import Setup, parse_bytes
from chatgpt.strategies.registry import STRATEGIES, strategy_flag


def memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """Whose mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message}{choice_hint(message)} (--help lists what there is)\n')


HELP = {
    'task': None,
    'reward_config': 'the same of a reward model; default: a reward function',
    'memory': 'of one GPU, such as 24GiB or 24',
    'host_memory': 'of one machine, such as 64GiB or 64',
    'precision': 'auto: bf16, or fp32 with --cpu',
    'shared_trunk': 'all models are adapters on one base; with lora_rank',
    'quantize': 'of that base',
    'rollouts_elsewhere': 'responses come from rollout workers',
    **dict.fromkeys(
        (
            *('optimizer', 'critic', 'gradient_checkpointing', 'logprob_kernel', 'stream_blocks', 'offload'),
            *('num_processes', 'processes_per_machine', 'lora_rank', 'num_layers_unfrozen', 'experience_batch_size'),
            *('num_samples_per_prompt', 'train_batch_size', 'max_tokens_per_batch', 'max_prompt_tokens'),
            'max_new_tokens',
        )
    ),
}
"""fields of `Setup` that are flags, and what --help says of them"""


def parser() -> argparse.ArgumentParser:
    out = Parser(prog='python -m chatgpt.plan', description=__doc__, allow_abbrev=False)
    out.add_argument('--help-all', action='help', help=argparse.SUPPRESS)
    out.add_argument('config', help='config.json of the policy, its folder, or a hub name')
    out.add_argument(
        '--strategy', type=strategy_flag, default='naive', help=f'{", ".join(STRATEGIES)}, or module:Class'
    )
    out.add_argument(
        '--cpu', action='store_true', help='no GPU: devices are host memory, of which --host_memory says how much'
    )
    out.add_argument('--no_kl', action='store_true', help='no reference')
    hints, defaults = get_type_hints(Setup), {f.name: f.default for f in fields(Setup)}
    for name, text in HELP.items():
        if defaults[name] is False:
            out.add_argument(f'--{name}', action='store_true', help=text)
        elif choices := get_args(hints[name]) if get_origin(hints[name]) is Literal else ():
            out.add_argument(f'--{name}', choices=choices, default=defaults[name], help=text)
        else:
            kind = memory if 'memory' in name else str if name == 'reward_config' else int
            out.add_argument(f'--{name}', type=kind, default=defaults[name], help=text)
    out.add_argument(
        '--tensor_parallel',
        type=int,
        default=1,
        help='processes that hold a model together (fsdp, colossalai_zero1 or colossalai_zero2)',
    )
    out.add_argument('--json', action='store_true', help='print numbers of bytes as JSON')
    return out


def main(argv: list[str] | None = None) -> int:
    args = vars(parser().parse_args(argv))
    as_json, on_cuda, kl = args.pop('json'), not args.pop('cpu'), not args.pop('no_kl')
    options = {'tensor_parallel': parts} if (parts := args.pop('tensor_parallel')) != 1 else {}
    from chatgpt.plan.advice import advice
    from chatgpt.plan.phases import make_plan

    try:
        setup = Setup(on_cuda=on_cuda, kl=kl, strategy_options=options, **args)
        plan = make_plan(setup)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if as_json:
        phases = {name: {'device': m.device, 'host': m.host} for name, m in plan.phases.items()}
        found = {'phases': phases, 'peak': plan.peak, 'host_peak': plan.host_peak}
        print(json.dumps(found | {'fits': plan.fits, 'limit': plan.limit}))
    else:
        print(plan.table())
        print()
        print(plan.verdict())
        if not plan.fits:
            print(advice(setup))
    return 0 if plan.fits else 1


if __name__ == '__main__':
    try:
        sys.exit(main())
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
