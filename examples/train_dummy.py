"""PPO on random prompts with a random reward, to check that a machine, a strategy and a model work together, and how
fast.

    torchrun --nproc-per-node=2 examples/train_dummy.py --strategy ddp
    python examples/train_dummy.py --pretrain gpt2 --lora_rank 4

Prints the cost of each phase and the averages at the end. Writes only to --save_path and --save_ckpt_path.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config

from chatgpt.launch.arguments import Parser, add_strategy, run_main, strategy_of
from chatgpt.launch.config_values import parse_bool
from chatgpt.launch.inputs import Inputs, quiet_transformers
from chatgpt.launch.models import build_ppo_models
from chatgpt.launch.recipes import fit_arguments, ppo_trainer
from chatgpt.launch.runs import PPORun
from chatgpt.nn import load_config
from chatgpt.nn.kinds import MODELS
from chatgpt.nn.trunk import position_limit
from chatgpt.trainer.callbacks import PerformanceEvaluator, ProgressBar, SaveCheckpoint, num_parameters
from chatgpt.trainer.config import PPOConfig


def parse_args() -> Any:
    parser = Parser(description=__doc__)
    add_strategy(parser)
    families = [name for name, kind in MODELS.items() if kind.actor is not None]
    parser.add_argument('--model', choices=families, default='auto', help='model family; auto reads it from the config')
    parser.add_argument('--pretrain', help='hub name or folder; default: a GPT-2 of 2 layers x 64 with new weights')
    parser.add_argument('--lora_rank', type=int, default=0)
    parser.add_argument('--num_episodes', type=int, default=3)
    parser.add_argument('--max_timesteps', type=int, default=4)
    parser.add_argument('--update_timesteps', type=int, default=4)
    parser.add_argument('--max_epochs', type=int, default=1)
    parser.add_argument('--train_batch_size', type=int, default=8)
    parser.add_argument('--experience_batch_size', type=int, default=8)
    parser.add_argument('--prompt_tokens', type=int, default=16)
    parser.add_argument('--max_new_tokens', type=int, default=16)
    parser.add_argument('--save_path', help="a file for the actor's weights")
    parser.add_argument(
        '--need_optim_ckpt',
        type=parse_bool,
        default=False,
        metavar='true|false',
        help='with --save_path, also optim_*.pt',
    )
    parser.add_argument('--save_ckpt_path', help='a folder for checkpoints; this script cannot resume from them')
    parser.add_argument('--save_ckpt_interval', type=int, default=1, help='episodes between checkpoints')
    args = parser.parse_args()
    if args.need_optim_ckpt and not args.save_path:
        parser.error('--need_optim_ckpt needs --save_path')
    return args


def main() -> None:
    args = parse_args()
    with strategy_of(args) as strategy:
        train(args, strategy)


def train(args: Any, strategy: Any) -> None:
    quiet_transformers()
    small = GPT2Config(
        vocab_size=512,
        n_positions=max(64, args.prompt_tokens + args.max_new_tokens),
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config = load_config(args.pretrain) if args.pretrain else small
    limit = position_limit(config)
    if limit is not None and args.prompt_tokens + args.max_new_tokens > limit:
        raise ValueError(
            f'--prompt_tokens and --max_new_tokens make {args.prompt_tokens + args.max_new_tokens}, the context is '
            f'{limit}'
        )
    length = {name: getattr(args, name) for name in ('num_episodes', 'max_timesteps', 'update_timesteps')}
    run = PPORun(model=args.model, lora_rank=args.lora_rank, lr=1e-5, critic_lr=1e-5, **length)
    settings = PPOConfig(
        experience_batch_size=args.experience_batch_size,
        train_batch_size=args.train_batch_size,
        max_epochs=args.max_epochs,
    )
    generator = torch.Generator().manual_seed(args.seed)
    prompts = list(torch.randint(config.get_text_config().vocab_size, (64, args.prompt_tokens), generator=generator))
    inputs = Inputs(
        run=run,
        settings=settings,
        tokenizer=None,
        train=prompts,
        model=args.pretrain,
        config=config,
        reward=RandomScores(args.seed),
        generation={'max_new_tokens': args.max_new_tokens},
    )
    with strategy.model_init_context():
        models = build_ppo_models(inputs)
    sizes = [num_parameters(m) if m is not None else 0 for m in (models.actor, models.critic, models.initial_model)]
    shown = {'score': 'rollout/score_mean', 'kl': 'rollout/kl_mean'}
    inputs.callbacks = [PerformanceEvaluator(*sizes, 0), ProgressBar(shown=shown)]
    if args.save_ckpt_path:
        phases = -(-args.save_ckpt_interval * args.max_timesteps // args.update_timesteps)
        inputs.callbacks.append(SaveCheckpoint(args.save_ckpt_path, phases))
    trainer = ppo_trainer(inputs, strategy, models)
    start = time.perf_counter()
    trainer.fit(*fit_arguments(inputs))
    if args.save_path:
        strategy.save_model(trainer.actor, args.save_path, only_rank0=True)
    if args.need_optim_ckpt:
        for name, optimizer in trainer.optimizers().items():
            strategy.save_optimizer(optimizer, Path(args.save_path).parent / f'optim_{name}.pt')
    samples = args.num_episodes * args.max_timesteps * args.experience_batch_size
    if strategy.is_rank_0:
        seconds = time.perf_counter() - start
        print(
            f'{samples} samples in {seconds:.1f} s, {samples / seconds:.2f} samples/s on {strategy.world_size} '
            'process(es)'
        )


class RandomScores:
    """A random reward, N(0, 1) by sample index."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [
            float(torch.randn((), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + s.index)))
            for s in samples
        ]


if __name__ == '__main__':
    run_main(main)
