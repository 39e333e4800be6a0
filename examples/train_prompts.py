"""PPO on prompts: `python examples/train_prompts.py`, or `torchrun --nproc_per_node 2 examples/train_prompts.py --strategy ddp`.

    python examples/train_prompts.py prompts.csv --pretrain gpt2 --reward_fn my_rewards.py:score --save_path outputs/run

Without arguments it trains a small model on the embedded story world, after it has learned to write there. Under --save_path it
leaves metrics.jsonl, samples.jsonl, settings.json, checkpoints/ and actor/, a Hugging Face folder with the tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import (
    Parser,
    add_settings,
    add_strategy,
    check_run_folder,
    make_strategy,
    run_main,
    world_size_from_env,
)
from chatgpt.trainer.config import NEEDS_CRITIC, PPOConfig


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        'prompt_path', nargs='?', help='csv, json, jsonl, parquet or hub data set with a prompt column; default: embedded'
    )
    parser.add_argument('--prompt_column', default='prompt')
    parser.add_argument(
        '--model', choices=('auto', 'gpt2', 'opt', 'bloom', 'llama'), default='auto', help='auto reads it from the config'
    )
    parser.add_argument('--pretrain', help='hub name or folder of the model to start from')
    parser.add_argument('--tokenizer', help='hub name or folder; default: --pretrain')
    parser.add_argument('--reward_model', help='folder of a reward model, or of any sequence-classification model')
    parser.add_argument('--reward_fn', help='module:function or file.py:function, fn(prompts, responses, **columns) -> scores')
    parser.add_argument('--save_path', default='outputs/train_prompts', help='folder of this run')
    parser.add_argument('--num_episodes', type=int, default=10)
    parser.add_argument('--max_timesteps', type=int, default=10, help='timesteps of an episode')
    parser.add_argument('--update_timesteps', type=int, default=10, help='timesteps between learning phases')
    parser.add_argument('--lr', type=float, help='learning rate of the actor (default: 1e-5; embedded model: 3e-4)')
    parser.add_argument('--critic_lr', type=float, help='(default: 1e-5; embedded model: 1e-3)')
    parser.add_argument('--lora_rank', type=int, default=0)
    parser.add_argument('--gradient_checkpointing', action='store_true')
    parser.add_argument('--max_new_tokens', type=int, help='(default: 64; embedded model: 32)')
    parser.add_argument('--max_prompt_tokens', type=int, help='cut longer prompts on the left')
    parser.add_argument('--temperature', type=float, default=1.0)
    parser.add_argument('--top_k', type=int, default=0)
    parser.add_argument('--top_p', type=float, default=1.0)
    parser.add_argument('--min_new_tokens', type=int, default=0)
    parser.add_argument(
        '--stop_string', action='append', help='end a response where this text appears; may be given several times'
    )
    parser.add_argument('--engine', choices=('local', 'hf'), default='local', help='who generates')
    parser.add_argument('--ptx_data', help='text or demonstrations for PPO-ptx, with --ptx_coef')
    parser.add_argument('--trust_remote_code', action='store_true')
    parser.add_argument('--skip_bad_records', action='store_true')
    parser.add_argument('--resume', help="a checkpoint folder, or 'auto' for the newest of --save_path")
    parser.add_argument(
        '--checkpoint_interval',
        type=int,
        default=0,
        help='phases between checkpoints; 0 writes one only when the run is interrupted',
    )
    parser.add_argument('--keep_last', type=int, default=2, help='checkpoints to keep')
    parser.add_argument('--sample_interval', type=int, default=5, help='learning phases between tables of samples')
    parser.add_argument('--tensorboard', action='store_true')
    parser.add_argument('--need_optim_ckpt', action='store_true', help="also write the optimizers' states with the final model")
    add_strategy(parser)
    add_settings(parser, PPOConfig, max_epochs=5)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from chatgpt.launch.build import build_ppo_inputs, check_ppo_args

    # Everything that can be wrong is found before any weight is loaded.
    config = check_ppo_args(args, world_size_from_env())
    inputs = build_ppo_inputs(args)
    check_run_folder(args.save_path)
    with make_strategy(args.strategy, seed=args.seed, precision=args.precision) as strategy:
        train(args, config, strategy, inputs)


def start_from(args: argparse.Namespace, strategy: Any) -> str:
    """The model to start from: --pretrain, or a small one made here."""
    from chatgpt.launch.build import write_embedded_model

    if args.pretrain:
        return args.pretrain
    folder = Path(args.save_path, 'initial')
    if args.resume and strategy.run_on_rank0(folder.is_dir):
        return str(folder)
    if strategy.is_rank_0:
        print('no --pretrain: a small GPT-2 learns to write stories first (SFT)', flush=True)
    strategy.run_on_rank0(lambda: write_embedded_model(folder, args.seed))
    return str(folder)


def train(args: argparse.Namespace, config: PPOConfig, strategy: Any, inputs: Any) -> None:
    from chatgpt.rollout import HFEngine, LocalEngine
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import SampleTable, SaveCheckpoint, TensorBoard
    from chatgpt.trainer.saving import save_pretrained

    callbacks = [SampleTable(every=args.sample_interval)]
    if args.checkpoint_interval:
        callbacks.append(SaveCheckpoint(interval=args.checkpoint_interval, keep_last=args.keep_last))
    if args.tensorboard:
        callbacks.append(TensorBoard())
    pretrained = start_from(args, strategy)
    with strategy.model_init_context():
        actor, critic, reward, initial_model = inputs.build_models(
            pretrained, with_critic=config.advantage_estimator in NEEDS_CRITIC
        )
    actor_optim = make_optimizer(strategy, actor, args.lr)
    critic_optim = make_optimizer(strategy, critic, args.critic_lr) if critic is not None else None
    (actor, actor_optim), reward, initial_model = strategy.prepare((actor, actor_optim), reward, initial_model)
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, critic_optim))
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        inputs.scorer(reward, config.max_tokens_per_batch),
        initial_model,
        actor_optim,
        critic_optim,
        config=config,
        tokenizer=inputs.tokenizer,
        pretrain_data=inputs.pretrain_data,
        engine=HFEngine() if args.engine == 'hf' else LocalEngine(),
        callbacks=callbacks,
        run_dir=args.save_path,
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop_strings=args.stop_string,
    )
    trainer.set_prompts(inputs.prompts)
    if args.resume and not trainer.load_checkpoint(args.resume) and strategy.is_rank_0:
        print('nothing to resume yet: starting from the beginning', flush=True)
    write_settings(args, strategy, inputs)
    trainer.fit(inputs.prompts, args.num_episodes, args.max_timesteps, args.update_timesteps)
    save_pretrained(strategy, actor, Path(args.save_path, 'actor'), tokenizer=inputs.tokenizer)
    if args.need_optim_ckpt:
        strategy.save_optimizer(actor_optim, Path(args.save_path, 'actor_optim.pt'), only_rank0=False)
        if critic is not None:
            strategy.save_optimizer(critic_optim, Path(args.save_path, 'critic_optim.pt'), only_rank0=False)
    if strategy.is_rank_0:
        print(f'actor written to {Path(args.save_path, "actor")}', flush=True)


def make_optimizer(strategy: Any, model: Any, lr: float) -> Any:
    return strategy.make_optimizer([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-5, weight_decay=0.0)


def write_settings(args: argparse.Namespace, strategy: Any, inputs: Any) -> None:
    """Every flag as it was used, and what it ran on."""
    import torch
    import transformers

    settings = vars(args) | {
        'model': inputs.model_config.model_type,
        'tokenizer': args.tokenizer or args.pretrain,
        'num_prompts': len(inputs.prompts),
        'world_size': strategy.world_size,
        'device': str(strategy.device),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
    }
    if strategy.is_rank_0:
        Path(args.save_path).mkdir(parents=True, exist_ok=True)
        Path(args.save_path, 'settings.json').write_text(json.dumps(settings, indent=1, default=str) + '\n')


if __name__ == '__main__':
    run_main(main)
