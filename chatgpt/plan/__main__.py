"""Estimates the memory of a run per rank and phase, from a config.json alone, before any weight is loaded.

    python -m chatgpt.plan config.json --strategy fsdp --num_processes 8 --memory 24GiB

The exit code is 0 if the run fits (or no limit was given), 1 if it does not, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from chatgpt.launch.arguments import Parser, add_settings, run_main
from chatgpt.plan.setup import Setup, parse_bytes
from chatgpt.strategies.registry import strategy_flag


def memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


NO_FLAGS = (
    *('config', 'strategy_options', 'on_cuda', 'kl', 'own_reference', 'update_timesteps', 'num_phases', 'keep'),
    *('max_rows', 'process', 'margin', 'fused', 'critic_support', 'critic_apart', 'critic_train_batch_size'),
)
"""fields of `Setup` without a flag, or with another one"""


def parser() -> Parser:
    usage = '%(prog)s CONFIG [--name value ...]'
    out = Parser(prog='python -m chatgpt.plan', usage=usage, description=__doc__)
    out.add_argument('config', help='config.json of the policy, its folder, or a hub name')
    out.add_argument('--cpu', action='store_true', help='no GPU: devices are host memory (--host_memory)')
    out.add_argument('--no_kl', action='store_true', help='no reference')
    parts = 'processes that hold each layer together, with strategy fsdp (default: 1)'
    out.add_argument('--tensor_parallel', type=int, default=1, metavar='N', help=parts)
    parts = 'processes that hold a part of each sequence, with strategy fsdp (default: 1)'
    out.add_argument('--sequence_parallel', type=int, default=1, metavar='N', help=parts)
    readers: dict[str, Any] = {'memory': memory, 'host_memory': memory, 'strategy': strategy_flag}
    readers |= {'critic_config': str, 'reward_config': str}
    add_settings(out, Setup, skip=NO_FLAGS, read=readers)
    out.add_argument('--json', action='store_true', help='print numbers of bytes as JSON')
    return out


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from chatgpt.plan.advice import advice
    from chatgpt.plan.phases import make_plan

    try:
        together = ('tensor_parallel', 'sequence_parallel')
        options = {name: getattr(args, name) for name in together if getattr(args, name) != 1}
        setup = Setup.of(args, on_cuda=not args.cpu, kl=not args.no_kl, strategy_options=options)
        plan = make_plan(setup)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if args.json:
        phases = {name: {'device': m.device, 'host': m.host} for name, m in plan.phases.items()}
        found = {'phases': phases, 'peak': plan.peak, 'host_peak': plan.host_peak}
        print(json.dumps(found | {'fits': plan.fits, 'limit': plan.limit}))
    else:
        print(plan.table(), plan.verdict(), sep='\n\n')
        if not plan.fits:
            print(advice(setup))
    return 0 if plan.fits else 1


if __name__ == '__main__':
    run_main(main)
