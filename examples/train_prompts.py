"""PPO on prompts: `python examples/train_prompts.py`, or `torchrun --nproc_per_node 2 examples/train_prompts.py --strategy ddp`.

    python examples/train_prompts.py prompts.csv --pretrain gpt2 --reward_fn my_rewards.py:score --save_path outputs/run

With `--rollout_workers 2 --max_staleness 1 --tis_cap 2` two Ray actors generate while this process learns (docs/rollout.md).

Without arguments it trains a small model on the embedded story world, after it has learned to write there. Under --save_path it
leaves metrics.jsonl, samples.jsonl, settings.json, checkpoints/ and actor/, a Hugging Face folder with the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import run_main, strategy_of, world_size_from_env
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.destination import check_destination
from chatgpt.launch.planning import memory_advice, setup_of_ppo, show_plan
from chatgpt.launch.rollouts import rollout_engine
from chatgpt.launch.runs import PPORun
from chatgpt.trainer.config import PPOConfig


def main() -> None:
    args = parse_run(PPORun, description=__doc__, positional='prompt_path')
    from chatgpt.launch.build import build_ppo_inputs, check_ppo_args

    # Everything that can be wrong is found before any weight is loaded.
    config = check_ppo_args(args, world_size_from_env())
    inputs = build_ppo_inputs(args)
    if args.plan:
        show_plan(lambda: setup_of_ppo(args, inputs))
    check_destination(args, inputs.model_config, 'actor')
    with (
        memory_advice(lambda: setup_of_ppo(args, inputs)),
        strategy_of(args) as strategy,
        rollout_engine(args) as engine,
    ):
        train(args, config, strategy, inputs, engine)


def start_from(args: PPORun, strategy: Any) -> str:
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


def train(args: PPORun, config: PPOConfig, strategy: Any, inputs: Any, engine: Any) -> None:
    from chatgpt.launch import learning
    from chatgpt.launch.build import make_engine
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import EMA, Evaluator, SampleTable
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation

    callbacks = [SampleTable(every=args.sample_interval), *learning.make_callbacks(args)]
    if args.ema_decay is not None:
        callbacks.append(EMA(args.ema_decay))
    if inputs.eval_prompts is not None:
        evaluation = PromptEvaluation(
            inputs.eval_prompts, inputs.tokenizer, max_new_tokens=args.max_new_tokens, stop_strings=args.stop_string
        )
        callbacks.append(Evaluator(evaluation, args.eval_interval, metric='score_mean'))
    if strategy.is_rank_0 and inputs.notes:
        print(*inputs.notes, sep='\n', flush=True)
    pretrained = start_from(args, strategy)
    with strategy.model_init_context():
        actor, critic, reward, initial_model = inputs.build_models(
            pretrained, with_critic=config.estimator.needs_values
        )
    actor_optim = learning.make_optimizer(args, strategy, actor)
    critic_optim = learning.make_optimizer(args, strategy, critic, args.critic_lr) if critic is not None else None
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
        engine=engine or make_engine(args.engine, pretrained),
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
    learning.resume(args, trainer)
    write_settings(args, strategy, inputs)
    trainer.fit(inputs.prompts, args.num_episodes, args.max_timesteps, args.update_timesteps)
    learning.finish(args, trainer, 'actor')
    if args.need_optim_ckpt and critic is not None:
        strategy.save_optimizer(critic_optim, Path(args.save_path, 'critic_optim.pt'), only_rank0=False)


def write_settings(args: PPORun, strategy: Any, inputs: Any) -> None:
    """Every flag as it was used, and what it ran on."""
    import torch
    import transformers

    settings = args.to_dict() | {
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
