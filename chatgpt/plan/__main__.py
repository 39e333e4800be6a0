"""`python -m chatgpt.plan config.json ...`: exit code 0 where the run fits (or no limit was given), 1 where it does
not."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NoReturn, get_args

from chatgpt.functional.logprobs import KERNELS
from chatgpt.names import choice_hint
from chatgpt.plan.advice import advice
from chatgpt.plan.phases import make_plan
from chatgpt.plan.setup import Setup, Task, parse_bytes
from chatgpt.trainer.strategies.registry import STRATEGIES, strategy_flag, that_cut_layers


def memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """Whose mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message}{choice_hint(message)} (--help lists what there is)\n')


def parser() -> argparse.ArgumentParser:
    out = Parser(prog='python -m chatgpt.plan', description=__doc__, allow_abbrev=False)
    out.add_argument('--help-all', action='help', help=argparse.SUPPRESS)
    out.add_argument('config', help='config.json of the policy, its folder, or a hub name')
    out.add_argument('--task', choices=get_args(Task), default='ppo')
    out.add_argument('--reward_config', help='the same of a reward model; default: a reward function')
    out.add_argument(
        '--strategy', type=strategy_flag, default='naive', help=f'{", ".join(STRATEGIES)}, or module:Class'
    )
    out.add_argument('--memory', type=memory, help='of one device, such as 24GiB')
    out.add_argument('--host_memory', type=memory, help='of one machine, such as 64GiB')
    out.add_argument('--cpu', action='store_true', help='no GPU: devices are host memory')
    out.add_argument(
        '--precision', choices=('auto', 'fp32', 'bf16', 'fp16'), default='auto', help='auto: bf16, or fp32 with --cpu'
    )
    out.add_argument('--optimizer', choices=('adamw', 'adamw8bit', 'paged_adamw8bit', 'sgd'), default='adamw')
    out.add_argument('--critic', choices=('own', 'shared', 'none'), default='own')
    out.add_argument('--shared_trunk', action='store_true', help='all models are adapters on one base; with lora_rank')
    out.add_argument('--quantize', choices=('none', 'nf4'), default='none', help='of that base')
    out.add_argument('--gradient_checkpointing', action='store_true')
    out.add_argument('--logprob_kernel', choices=KERNELS, default='auto')
    out.add_argument('--stream_blocks', action='store_true')
    out.add_argument('--rollouts_elsewhere', action='store_true', help='responses come from rollout workers')
    out.add_argument('--offload', choices=('none', 'idle'), default='none')
    out.add_argument('--no_kl', action='store_true', help='no reference')
    for name in (
        'num_processes',
        'processes_per_machine',
        'lora_rank',
        'num_layers_unfrozen',
        'experience_batch_size',
        'num_samples_per_prompt',
        'train_batch_size',
        'max_tokens_per_batch',
        'max_prompt_tokens',
        'max_new_tokens',
    ):
        out.add_argument(f'--{name}', type=int, default=Setup.__dataclass_fields__[name].default)
    out.add_argument(
        '--tensor_parallel', type=int, default=1, help=f'processes that hold a model together ({that_cut_layers()})'
    )
    out.add_argument('--json', action='store_true', help='print numbers of bytes as JSON')
    return out


def main(argv: list[str] | None = None) -> int:
    args = vars(parser().parse_args(argv))
    as_json, on_cuda, kl = args.pop('json'), not args.pop('cpu'), not args.pop('no_kl')
    options = {'tensor_parallel': parts} if (parts := args.pop('tensor_parallel')) != 1 else {}
    try:
        setup = Setup(on_cuda=on_cuda, kl=kl, strategy_options=options, **args)
        plan = make_plan(setup)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if as_json:
        phases = {name: {'device': m.device, 'host': m.host} for name, m in plan.phases.items()}
        print(
            json.dumps(
                {
                    'phases': phases,
                    'peak': plan.peak,
                    'host_peak': plan.host_peak,
                    'fits': plan.fits,
                    'limit': plan.limit,
                }
            )
        )
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
