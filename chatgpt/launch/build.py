"""From a command line to tokenizer, prompts, reward and models of a PPO run.

Two halves: `check_ppo_args` and `build_ppo_inputs` find everything that can be wrong without weights (settings, files, columns,
tokenizer against config, reward functions, the run's folder), and `PPOInputs.build_models` then loads or makes the models, inside
the strategy's init context. Without a model of the user's own, `write_embedded_model` makes one to start from.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import check_reward_function, load_function
from chatgpt.launch.destination import check_not_replaced
from chatgpt.launch.rollouts import check_rollout_args
from chatgpt.launch.runs import PPORun, Run

FAMILIES = {'gpt2': 'GPT', 'opt': 'OPT', 'bloom': 'BLOOM', 'llama': 'Llama', 'auto': 'Auto'}
NUM_STORIES = 1600
"""that the embedded model learns its language from, twice"""


def quiet_transformers() -> None:
    """No bars for every file that is loaded: what a run shows is its own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def check_ppo_args(args: PPORun, world_size: int) -> Any:
    """The run's `PPOConfig`, with all flags checked that can be without reading a file; fills the defaults that depend on the model.

    Raises:
        ValueError: flags that are out of range or do not fit together.
    """
    from chatgpt.rollout import SamplingParams
    from chatgpt.trainer.config import PPOConfig

    if args.critic == 'shared' and args.critic_lr is not None:
        raise ValueError("critic_lr is of a critic with an optimizer of its own; with critic='shared' leave it out")
    args.fill_defaults()
    args.validate(world_size)
    args.apply_resources()
    config = args.only(PPOConfig)
    for name in ('num_episodes', 'max_timesteps', 'update_timesteps', 'max_prompt_tokens', 'sample_interval', 'epochs',
                 'training_iteration', 'eval_interval'):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f'{name}={value} must be at least 1')
    if args.critic_lr is not None and not 0 <= args.critic_lr < float('inf'):
        raise ValueError(f'critic_lr={args.critic_lr} must be a number of at least 0')
    if args.critic not in ('own', 'shared'):
        raise ValueError(f'critic={args.critic!r} is not one of own, shared')
    if args.critic == 'shared' and not config.estimator.needs_values:
        raise ValueError(f"critic='shared', but advantage_estimator={args.advantage_estimator!r} takes no critic; leave one out")
    if args.engine not in ('local', 'hf', 'vllm'):
        raise ValueError(f'engine={args.engine!r} is not one of local, hf, vllm')
    if args.lora_rank and args.num_layers_unfrozen > 0:
        raise ValueError('lora_rank and num_layers_unfrozen are two ways to share the trunk with the reference; choose one')
    if args.epochs is not None and args.training_iteration is not None:
        raise ValueError('epochs and training_iteration both say how long to train; give one')
    if args.temperature == 0:
        raise ValueError('temperature=0 draws nothing, and a policy learns from what it draws: give a number above 0')
    SamplingParams(
        max_new_tokens=args.max_new_tokens, min_new_tokens=args.min_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p,
    )  # fmt: skip
    if config.advantage_estimator == 'gdpo':
        raise ValueError(
            "advantage_estimator='gdpo' takes a list of rewards, which the command line cannot give; use PPOTrainer or chatgpt.train"
        )
    if args.reward_model and args.reward_fn:
        raise ValueError('give --reward_model or --reward_fn, not both')
    if args.prompt_path and not (args.reward_model or args.reward_fn):
        raise ValueError('nothing to learn from: give --reward_model FOLDER or --reward_fn module:function')
    if args.prompt_path and not args.pretrain:
        raise ValueError('prompts of your own need a model: give --pretrain NAME_OR_FOLDER')
    if bool(config.ptx_coef) != bool(args.ptx_data):
        raise ValueError('PPO-ptx needs both: --ptx_data FILE with text, and --ptx_coef above 0')
    check_rollout_args(args)
    check_resume(args)
    return config


def make_engine(name: str, pretrained: str) -> Any:
    """A rollout engine by its command-line name; `pretrained` is the policy's folder or hub name."""
    from chatgpt.rollout import HFEngine, LocalEngine, VLLMEngine

    if name == 'vllm':
        return VLLMEngine(pretrained)
    return HFEngine() if name == 'hf' else LocalEngine()


def check_resume(args: Run) -> None:
    """A run goes on when that was asked for, or its launcher has restarted it.

    It never mixes its checkpoints with an earlier one's, nor replaces that one's trained model.
    """
    from chatgpt.checkpoint import latest
    from chatgpt.launch.relaunch import is_restart

    if args.resume and args.resume != 'auto' and not Path(args.resume).is_dir():
        raise ValueError(f"--resume {args.resume}: there is no such folder; give a checkpoint's folder, or auto")
    found = latest(Path(args.save_path, 'checkpoints'))
    if is_restart(args.save_path) and (found is not None or not args.resume):
        args.resume = 'auto'
    if not args.resume and found is not None:
        raise ValueError(
            f'{args.save_path} holds checkpoints of an earlier run, up to {found.name}: go on with --resume auto, or choose another '
            '--save_path'
        )
    check_not_replaced(args)


@dataclass
class PPOInputs:
    """What a PPO run starts from."""

    tokenizer: Any
    prompts: Any
    reward_fn: Callable[..., Any] | None
    reward_tokenizer: Any
    reward_context: int | None
    """most tokens of one sequence that the reward model takes"""
    pretrain_data: Any
    model_config: Any
    args: PPORun
    eval_prompts: Any = None
    """held-back prompts, where there are any"""
    notes: SequenceOf[str] = ()
    """a line for each source that bad records were left out of, and one that shows the format of conversations, where there are any"""

    def build_models(self, pretrained: Any, *, with_critic: bool = True) -> tuple[Any, Any, Any, Any]:
        """Actor, critic, reward (a model or a function) and initial model; `pretrained` is the hub name or folder to start from.

        The critic starts from the reward model where there is one (arXiv 2403.17031), else from the actor's weights with a new
        head. With critic='shared' it is a new value head on the actor: one forward of its trunk gives policy and values.
        With LoRA the actor with its adapter off is the reference, and there is no initial model, unless biases are trained.
        """
        from chatgpt import nn

        a = self.args
        actor_class, critic_class = (getattr(nn, FAMILIES[a.model] + kind) for kind in ('Actor', 'Critic'))
        common = {**a.lora_keywords(), 'checkpoint': a.gradient_checkpointing, 'trust_remote_code': a.trust_remote_code}
        unfrozen = a.num_layers_unfrozen if a.num_layers_unfrozen > 0 else None
        in_actor = True if with_critic and a.critic == 'shared' else None
        actor = actor_class(pretrained=pretrained, num_layers_unfrozen=unfrozen, value_head=in_actor, **common)
        reward: Any = self.reward_fn
        if a.reward_model:
            reward = nn.RewardModel.from_pretrained(a.reward_model, trust_remote_code=a.trust_remote_code)
        if not with_critic or in_actor:
            critic = None
        elif a.reward_model and self.reward_tokenizer is None and reward.value_head is not None:
            critic = nn.Critic.from_reward_model(reward, **a.lora_keywords())
        else:
            critic = critic_class(pretrained=pretrained, **common)
        shared = unfrozen or (a.lora_rank and a.lora_train_bias == 'none')  # with trained biases the trunk is no longer the reference
        return actor, critic, reward, None if shared else deepcopy(actor)

    def scorer(self, reward: Any, max_tokens_per_batch: int | None) -> Any:
        """The prepared reward as the trainer takes it: a model that reads other tokens than the policy gets its tokenizer along."""
        from chatgpt.experience.scorers import RewardModelScorer

        if self.reward_tokenizer is None:
            return reward
        return RewardModelScorer(
            reward, tokenizer=self.reward_tokenizer, max_tokens_per_batch=max_tokens_per_batch, max_length=self.reward_context
        )


def read_config(run: Run) -> tuple[Any, Any]:
    """The config and tokenizer that a run starts from, checked against each other."""
    from chatgpt.dataset import embedded
    from chatgpt.dataset.tokenize import check_tokenizer
    from chatgpt.nn.loading import load_config, load_tokenizer

    quiet_transformers()
    if run.pretrain:
        config = load_config(run.pretrain, trust_remote_code=run.trust_remote_code)
        tokenizer = load_tokenizer(run.tokenizer or run.pretrain, trust_remote_code=run.trust_remote_code)
    else:
        config, tokenizer = embedded.demo_config(), embedded.demo_tokenizer()
    check_family(run, config)
    check_tokenizer(tokenizer, config)
    return config, tokenizer


def build_ppo_inputs(args: PPORun) -> PPOInputs:
    """Read and check what can be without weights; see `PPOInputs`."""
    from chatgpt.dataset import embedded, load_demonstrations
    from chatgpt.dataset.formats import shown_format
    from chatgpt.dataset.loading import left_out
    from chatgpt.dataset.prompts import load_prompts

    config, tokenizer = read_config(args)
    reward_fn = None
    if args.reward_fn:
        reward_fn = load_function(args.reward_fn)
        check_reward_function(reward_fn, args.reward_fn)
    reward_tokenizer, reward_context = _reward_model_inputs(args, tokenizer) if args.reward_model else (None, None)
    if args.prompt_path:
        prompts = _own_prompts(args, args.prompt_path, tokenizer)
    else:
        prompts = load_prompts(embedded.demo_prompts(200, seed=0), tokenizer, max_prompt_tokens=args.max_prompt_tokens)
        reward_fn = reward_fn or (None if args.reward_model else embedded_reward)
    read: list[tuple[Any, str, Any]] = [(args.prompt_path, 'prompts', prompts)]
    prompts, held_back = _held_back(args, prompts, tokenizer)
    _check_lengths(prompts, context_of(config), args.max_new_tokens or 0, 'the context')
    if args.epochs is not None:
        _set_length(args, 'epochs', args.epochs, -(-len(prompts) // args.experience_batch_size))
    elif args.training_iteration is not None:
        _set_length(args, 'training_iteration', args.training_iteration, 1)
    if args.reward_model and reward_tokenizer is None:
        _check_lengths(prompts, reward_context, args.max_new_tokens or 0, "the reward model's context")
    text = None
    if args.ptx_data:
        length, skip = context_of(config), args.skip_bad_records
        text = load_demonstrations(args.ptx_data, tokenizer, max_length=length, skip_bad_records=skip)[0]
        read.append((args.ptx_data, 'texts', text))
    if args.validation_file:
        read.append((args.validation_file, 'prompts held back', held_back))
    notes = [f'{source}: {len(data)} {what}{left_out(data)}' for source, what, data in read if data.num_skipped]
    if any(data.has_turns for _, _, data in read):
        notes.append(f'conversations read {shown_format(tokenizer)}, the chat template that is saved with the tokenizer')
    return PPOInputs(tokenizer, prompts, reward_fn, reward_tokenizer, reward_context, text, config, args, held_back, notes)


def _set_length(args: PPORun, why: str, episodes: int, timesteps: int) -> None:
    """Fill in how long to train. Raises ValueError where that was given too, and otherwise."""
    for name, value in (('num_episodes', episodes), ('max_timesteps', timesteps), ('update_timesteps', 1)):
        if name in args.said and getattr(args, name) != value:
            raise ValueError(f'{why}={getattr(args, why)} and {name}={getattr(args, name)} both say how long to train; give one')
        setattr(args, name, value)


def _own_prompts(args: PPORun, path: str, tokenizer: Any) -> Any:
    """The prompts of a file of the user's, read as the run says."""
    from chatgpt.dataset.prompts import load_prompts

    return load_prompts(
        path,
        tokenizer,
        column=args.prompt_column,
        max_prompt_tokens=args.max_prompt_tokens,
        skip_bad_records=args.skip_bad_records,
    )


def _held_back(args: PPORun, prompts: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Training prompts, and those to evaluate on (None where none are asked for)."""
    from chatgpt.dataset import PromptSet, split_examples

    if args.validation_file:
        return prompts, _own_prompts(args, args.validation_file, tokenizer)
    if not args.validation_percentage:
        return prompts, None
    kept, held_back = split_examples([prompts[i] for i in range(len(prompts))], args.validation_percentage, seed=args.seed)
    return PromptSet(kept), PromptSet(held_back)


def embedded_reward(prompts: list[str], responses: list[str]) -> list[float]:
    """The known truth of the embedded story world."""
    from chatgpt.dataset.embedded import true_score

    return [true_score(p, r) for p, r in zip(prompts, responses, strict=True)]


def write_embedded_model(folder: str | Path, seed: int) -> None:
    """A Hugging Face folder with a small GPT-2 that has learned the language of the story world (SFT), and its tokenizer.

    A policy that cannot write one sentence earns the same for everything it says, and has nothing to learn from. One process is
    enough, and the weights do not depend on how many there are.
    """
    import torch
    from torch.optim import AdamW

    from chatgpt.dataset import embedded, load_demonstrations
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.strategies import NaiveStrategy

    tokenizer = embedded.demo_tokenizer()
    stories = load_demonstrations(embedded.demo_corpus(NUM_STORIES, seed=0), tokenizer)[0]
    python_random = random.getstate()
    with torch.random.fork_rng(), NaiveStrategy(seed=seed) as strategy:
        actor = GPTActor(config=embedded.demo_config())
        model, optimizer = strategy.prepare((actor, AdamW(actor.parameters(), lr=3e-3)))
        SFTTrainer(strategy, model, optimizer, stories, train_batch_size=32, max_epochs=2, log_interval=25, tokenizer=tokenizer).fit()
        unfinished = Path(folder).with_name(f'.{Path(folder).name}.tmp')
        for old in (unfinished, Path(folder)):
            shutil.rmtree(old, ignore_errors=True)
        actor.save_pretrained(unfinished, tokenizer=tokenizer)
        unfinished.rename(folder)
    random.setstate(python_random)


def context_of(config: Any) -> int | None:
    """Most tokens of one sequence by a model's config; None where it sets no limit."""
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    return getattr(config, 'max_position_embeddings', None) or getattr(config, 'n_positions', None)


def check_family(args: Run, config: Any) -> None:
    if args.model != 'auto' and config.model_type != args.model:
        raise ValueError(f'--model {args.model}: the model is of the family {config.model_type!r}; use --model auto')


def _check_lengths(prompts: Any, limit: int | None, max_new_tokens: int, what: str) -> None:
    if limit is None:
        return
    for i in range(len(prompts)):
        length = len(prompts[i].ids)
        if length + max_new_tokens > limit:
            raise ValueError(
                f'prompt {i} has {length} tokens; with max_new_tokens={max_new_tokens} it passes {what} of {limit}. Use '
                '--max_prompt_tokens to cut prompts, or fewer new tokens'
            )


def _reward_model_inputs(args: PPORun, tokenizer: Any) -> tuple[Any, int | None]:
    """The reward model's tokenizer when its folder has one that differs from the policy's, and its context."""
    from chatgpt.nn.loading import load_config, load_tokenizer

    assert args.reward_model is not None
    config = load_config(args.reward_model, trust_remote_code=args.trust_remote_code)
    own = None
    if not Path(args.reward_model).is_dir() or Path(args.reward_model, 'tokenizer_config.json').is_file():
        own = load_tokenizer(args.reward_model, trust_remote_code=args.trust_remote_code)
    if own is not None and own.get_vocab() != tokenizer.get_vocab():
        return own, context_of(config)
    size = (config.get_text_config() if hasattr(config, 'get_text_config') else config).vocab_size
    if size <= max(tokenizer.get_vocab().values()):
        raise ValueError(
            f'the reward model {args.reward_model} knows {size} tokens, fewer than the tokenizer of the policy has, and brings no '
            'tokenizer of its own; save its tokenizer in its folder'
        )
    return None, context_of(config)
