"""Runs: inputs, models, a trainer with its callbacks, fit, and the files written at the end.

Command lines and config files, under any launcher, and `chatgpt.train` all call `execute`.
"""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from chatgpt.data.formats import save_tokenizer, template_of, text_choice
from chatgpt.launch.arguments import strategy_of
from chatgpt.launch.config_file import write_resolved
from chatgpt.launch.demo_world import write_demo_model, write_game_model
from chatgpt.launch.destination import check_destination, final_folder
from chatgpt.launch.inputs import Inputs, read_inputs
from chatgpt.launch.models import (
    PPOModels,
    bins_head,
    build_model,
    build_ppo_models,
    build_ppo_on_trunk,
    make_trunk,
    set_kernels,
    trunk_role,
)
from chatgpt.launch.planning import memory_advice, planned, show_plan
from chatgpt.launch.relaunch import sign
from chatgpt.launch.rollouts import rollout_engine
from chatgpt.launch.runs import PPORun, Run, SFTRun
from chatgpt.monitor.learning_rate import BATCHES, recommended_lr
from chatgpt.monitor.publish import push_folder
from chatgpt.nn.heads import centred_head, save_head
from chatgpt.nn.loading import trained_dtype
from chatgpt.nn.peft_format import check_export, export_peft
from chatgpt.rollout.registry import ENGINES
from chatgpt.strategies.precision import DTYPES
from chatgpt.trainer.callbacks import EMA, TRACKERS, Evaluator, RunRecorder, SampleTable, SaveCheckpoint, StopOnPlateau
from chatgpt.trainer.callbacks.run_record import model_facts
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.experience.scorers import RewardModelScorer, Scorer
from chatgpt.trainer.objectives.config import ReferenceConfig
from chatgpt.trainer.policy import policy_class
from chatgpt.trainer.ppo import PPOTrainer
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.trainer.saving import write_card_of


def execute(run: Run, inputs: Inputs | None = None, strategy: Any = None) -> Any:
    """Executes a run, from its settings to the trained model in its folder, and returns the trainer.

    Args:
        inputs: objects given to `chatgpt.train`; None: reads what the settings name.
        strategy: None: makes the run's strategy, and closes it at the end.
    """
    inputs = read_inputs(run) if inputs is None else inputs
    if run.plan:
        show_plan(inputs)
    if inputs.by_name:
        check_destination(run, inputs.config, run.trained)
    made = strategy_of(run) if strategy is None else nullcontext(strategy)
    with memory_advice(inputs), made as strategy, rollout_engine(run, strategy) as engine:
        if strategy.is_rank_0 and inputs.notes:
            print(*inputs.notes, sep='\n', flush=True)
        inputs.callbacks += make_callbacks(run, inputs)
        if inputs.by_name:
            inputs.model = start_of(inputs, strategy)
        trainer = make_trainer(inputs, strategy, engine)
        if inputs.by_name:
            trainer.left_out = {}
        if isinstance(run, PPORun) and inputs.train is not None:
            trainer.set_prompts(inputs.train)  # before a checkpoint is loaded, which continues their order
        if inputs.by_name:
            resume(run, trainer)
        elif run.resume:
            trainer.load_checkpoint(run.resume)
        trainer.fit(*fit_arguments(inputs))
        finish(run, trainer, by_name=inputs.by_name)
    return trainer


def start_of(inputs: Inputs, strategy: Any) -> str | None:
    """Returns the initial model: the run's, a small one trained on stories or the game, or None for SFT."""
    run = inputs.run
    if run.base or isinstance(run, SFTRun):
        return run.base
    folder = Path(run.save_path, 'initial')
    if not (run.resume and strategy.run_on_rank0(folder.is_dir)):
        game = run.environment if isinstance(run, PPORun) else None
        if strategy.is_rank_0 and isinstance(run, PPORun):
            reason = f'pretrain: {run.pretrain}' if run.pretrain else 'no --pretrain'
            taught = 'write stories' if game is None else 'make moves that are allowed, from games of a random player,'
            print(f'{reason}: a small GPT-2 learns to {taught} first (SFT)', flush=True)
        if game is None:
            strategy.run_on_rank0(lambda: write_demo_model(folder, run.seed))
        else:
            strategy.run_on_rank0(lambda: write_game_model(folder, run.seed, inputs.environment))
    return str(folder)


# ---------------------------------------------------------------------- the trainer


def learning_rate(run: Run, strategy: Any, model: Any, setting: str = 'lr') -> float:
    """Returns the run's `lr` or `critic_lr`, by default one for the number of trained parameters, which is printed."""
    given: float | None = getattr(run, setting)
    if given is not None:
        return given
    facts = model_facts(model)
    trained, whole = facts['trained'], facts['parameters']
    learning = 'rm' if setting == 'critic_lr' else run.entry().learning
    batch: int | None = getattr(run, 'train_batch_size', None)
    rate = recommended_lr(whole, learning, trained, adapters=run.lora_rank > 0, batch=batch)
    if strategy.is_rank_0:
        share = '' if trained == whole else f' of {whole:,}'
        what = f'{trained:,}{share} parameters are trained{", as LoRA" if run.lora_rank else ""}'
        what += f', with batches of {batch}' if learning in BATCHES else ''
        print(f'{setting} {rate:g}, as {what}; --{setting} sets another (docs/learning_rates.md)', flush=True)
    return rate


def head_rate(run: Run, strategy: Any, model: Any, setting: str, lr: float, *, of_all: bool = False) -> float:
    """Returns the learning rate of a value head: the run's `setting`, else for a new head that of a critic with LoRA,
    which is printed, and for a learned one `lr`, the rate of the rest. `of_all`: the rest has the same setting."""
    given: float | None = getattr(run, setting)
    if given is not None:
        return given
    if run.optimizer == 'sgd' or not getattr(model.value_head, 'is_untrained', False):
        return lr
    rate = recommended_lr(model_facts(model)['parameters'], 'rm', adapters=True)
    if strategy.is_rank_0 and rate != lr:
        another = 'one rate for all' if of_all else 'another'
        print(f'{setting} {rate:g} for the new value head; --{setting} sets {another} (docs/critic.md)', flush=True)
    return rate


def make_optimizer(run: Run, strategy: Any, model: Any, setting: str = 'lr', head: str = '') -> Any:
    """Returns the run's optimizer of the trained parameters. The 8-bit optimizers quantise their states in blocks of
    256 (Dettmers et al. 2022, "8-bit optimizers").

    Args:
        setting: 'lr', or 'critic_lr' for a separate critic.
        head: the setting with the rate of a value head, which is then a group of its own.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    lr = learning_rate(run, strategy, model, setting)
    if head and model.value_head is not None:
        parameters = model.parameter_groups(head_rate(run, strategy, model, head, lr, of_all=head == setting))
    if run.optimizer == 'sgd':
        return torch.optim.SGD(parameters, lr=lr, weight_decay=run.weight_decay)
    if run.optimizer == 'adamw':
        return strategy.make_optimizer(parameters, lr=lr, eps=1e-5, weight_decay=run.weight_decay)
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise ImportError(f"{run.optimizer} needs bitsandbytes: pip install 'chatgpt-rlhf[nf4]'") from error
    make = optim.PagedAdamW8bit if run.optimizer == 'paged_adamw8bit' else optim.AdamW8bit
    return make(parameters, lr=lr, eps=1e-5, weight_decay=run.weight_decay)


def make_callbacks(run: Run, inputs: Inputs) -> list[Any]:
    """Returns the callbacks of a run's settings: checkpoints, trackers, samples, evaluation, ... With `chatgpt.train`
    some are made only if their setting is given, since the trainer has defaults."""

    def wanted(*names: str) -> bool:
        return inputs.by_name or any(name in run.given for name in names)

    callbacks: list[Any] = []
    if isinstance(run, PPORun) and wanted('sample_interval'):
        callbacks.append(SampleTable(every=run.sample_interval))
    if wanted('checkpoint_interval', 'checkpoint_minutes', 'keep_last', 'background_checkpoints'):
        interval, minutes = run.checkpoint_interval or None, run.checkpoint_minutes or None
        kept: dict[str, Any] = {'keep_last': run.keep_last, 'background': run.background_checkpoints}
        callbacks.append(SaveCheckpoint(interval=interval, minutes=minutes, **kept))
    if inputs.by_name:
        callbacks.append(RunRecorder(run.to_dict(), run_defaults(run), lambda: planned(inputs)))
    callbacks += [TRACKERS.find(name)() for name in run.trackers()]
    if isinstance(run, SFTRun) and run.early_stopping_patience is not None:
        callbacks.append(StopOnPlateau('sft/val_loss', mode='min', patience=run.early_stopping_patience))
    if isinstance(run, PPORun):
        if run.ema_decay is not None:
            callbacks.append(EMA(run.ema_decay, dtype=DTYPES.get(run.save_dtype)))
        if inputs.by_name and inputs.validation is not None:
            evaluation = PromptEvaluation(
                inputs.validation,
                inputs.tokenizer,
                environment=inputs.environment,
                environment_settings=inputs.environment_settings,
                max_new_tokens=run.max_new_tokens,
                stop_strings=run.stop_string,
            )
            callbacks.append(Evaluator(evaluation, run.eval_interval, metric='score_mean'))
    return callbacks


def run_defaults(run: Run) -> dict[str, Any]:
    """Returns the default settings of a run with this method and model."""
    plain = type(run)(pretrain=run.pretrain)  # some defaults depend on pretrain
    plain.method = run.method
    plain.fill_defaults()
    folder = {} if 'save_path' in run.given else {'save_path': run.save_path}  # it depends on the command
    return plain.to_dict() | dict(run.entry().settings) | {'pretrain': None} | folder


def make_trainer(inputs: Inputs, strategy: Any, engine: Any = None) -> Any:
    """Makes and prepares models and optimizers, and returns the trainer. `engine`: None: that of the run's settings."""
    if not isinstance(inputs.settings, PPOConfig):
        trainer = offline_trainer(inputs, strategy)
    else:
        policy_class(inputs.settings).check(strategy)
        if inputs.run.on_trunk:
            models = build_ppo_on_trunk(inputs, make_trunk(inputs, strategy.numerics.dtype, strategy.device))
        else:
            with strategy.model_init_context():
                models = build_ppo_models(inputs)
        trainer = ppo_trainer(inputs, strategy, models, engine)
    for model in trainer.models().values() if inputs.run.save_adapter else ():
        check_export(strategy.unwrap(model))
    return trainer


def ppo_trainer(inputs: Inputs, strategy: Any, models: PPOModels, engine: Any = None) -> PPOTrainer:
    run, settings = inputs.run, inputs.settings
    assert isinstance(run, PPORun) and isinstance(settings, PPOConfig)
    actor, critic, reward, initial_model, mask_model = models
    set_kernels(run, *models)
    actor_optim = make_optimizer(run, strategy, actor, head='critic_lr')
    critic_optim = make_optimizer(run, strategy, critic, 'critic_lr', 'critic_lr') if critic is not None else None
    scorer = (
        reward if isinstance(reward, Scorer) and not isinstance(reward, torch.nn.Module) else None
    )  # has no module for the strategy to prepare
    (actor, actor_optim), reward, initial_model, mask_model = strategy.prepare(
        (actor, actor_optim), None if scorer else reward, initial_model, mask_model
    )
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, critic_optim))
    if inputs.reward_tokenizer is not None:  # the reward model's tokenizer differs from the policy's
        reward = RewardModelScorer(
            reward,
            tokenizer=inputs.reward_tokenizer,
            max_tokens_per_batch=settings.max_tokens_per_batch,
            max_length=inputs.reward_context,
            packing=settings.packing,
        )
    return PPOTrainer(
        strategy,
        actor,
        critic,
        scorer or reward,
        initial_model,
        actor_optim,
        critic_optim,
        config=settings,
        tokenizer=inputs.tokenizer,
        pretrain_data=inputs.pretrain_data,
        mask_model=mask_model,
        engine=engine or ENGINES.find(run.engine).make(inputs.model),
        callbacks=inputs.callbacks,
        run_dir=inputs.run_dir,
        environment=inputs.environment,
        environment_settings=inputs.environment_settings,
        reward_weights=run.reward_weights,
        **inputs.generation,
    )


def offline_trainer(inputs: Inputs, strategy: Any) -> Any:
    """Returns the trainer of a run that does not collect. With LoRA the reference is the actor with its adapter off,
    unless biases are trained too."""
    run, settings = inputs.run, inputs.settings
    method = run.entry()
    if run.on_trunk:
        trunk = make_trunk(inputs, strategy.numerics.dtype, strategy.device)
        head = {'value_head': bins_head(inputs)} if method.model == 'Critic' else {}
        model = trunk_role(inputs, method.model, trunk, **head)
        initial = None
    else:
        with strategy.model_init_context():
            model = build_model(inputs, method.model)
            own = run.lora_rank and run.lora_train_bias == 'none'  # with the adapter off it is its own reference
            needs_copy = isinstance(settings, ReferenceConfig) and not own
            initial = deepcopy(model) if needs_copy else None
    set_kernels(run, model, initial)
    rate_of_head = 'lr' if method.model == 'Critic' else ''
    model, optimizer = strategy.prepare((model, make_optimizer(run, strategy, model, head=rate_of_head)))
    reference = {} if initial is None else {'initial_model': strategy.prepare(initial)}
    return method.part('trainer')(
        strategy,
        model,
        optimizer,
        inputs.train,
        inputs.validation,
        config=settings,
        callbacks=inputs.callbacks,
        tokenizer=inputs.tokenizer,
        run_dir=inputs.run_dir,
        **reference,
    )


def fit_arguments(inputs: Inputs) -> tuple[Any, ...]:
    """Returns the arguments of the trainer's `fit`."""
    run = inputs.run
    if isinstance(run, PPORun):
        return inputs.train, run.num_episodes, run.max_timesteps, run.update_timesteps
    return ()


# ---------------------------------------------------------------------- a run's folder


def resume(run: Run, trainer: Any) -> None:
    """Loads the checkpoint that the run names, if any, and writes the run's settings into its folder."""
    strategy = trainer.strategy
    sign(run.save_path, strategy)
    if run.resume:
        if not trainer.load_checkpoint(run.resume) and strategy.is_rank_0:
            print('nothing to resume yet: starting from the beginning', flush=True)
    lines = Path(run.save_path, 'metrics.jsonl')
    if trainer.phase == 0 and strategy.is_rank_0 and lines.is_file() and lines.stat().st_size:
        print(
            f'{run.save_path} holds an earlier run without checkpoints: its lines are kept in *.previous.jsonl',
            flush=True,
        )
    strategy.run_on_rank0(lambda: write_resolved(run, run.save_path))


def finish(run: Run, trainer: Any, *, by_name: bool = True) -> None:
    """Writes the trained model as a Hugging Face folder, and adapter and optimizer states if set; uploads the model.

    Raises:
        PushError: if the upload failed; says how to repeat it.
    """
    strategy, dtype = trainer.strategy, DTYPES.get(run.save_dtype)
    if by_name or run.model_path is not None:
        path = final_folder(run, run.trained)
        trainer.save_pretrained(path, card_samples=run.card_samples, dtype=dtype)
        if run.save_adapter:
            write_adapter(run, trainer, run.trained, 'adapter')
        if run.trained != 'critic' and 'critic' in trainer.models():
            write_critic(run, trainer)
        if run.need_optim_ckpt:
            for name, optimizer in trainer.optimizers().items():
                strategy.save_optimizer(optimizer, Path(run.save_path, f'{name}_optim.pt'), only_rank0=False)
        if strategy.is_rank_0:
            print(f'{run.trained} written to {path}; use it: {use_of(run, path, trainer.tokenizer)}', flush=True)
            if (
                dtype is None
                and not run.save_adapter
                and rounds_adapters(strategy.unwrap(trainer.models()[run.trained]))
            ):
                print(
                    'its adapters are rounded to the dtype of the base, which loses small changes; written exactly: '
                    "--resume auto with '--save_adapter true', or with '--save_dtype fp32' for the sum",
                    flush=True,
                )
        if run.push_to_hub:
            private = run.hub_private or None
            address = strategy.run_on_rank0(lambda: push_folder(path, str(run.push_to_hub), private=private))
            if strategy.is_rank_0:
                print(f'{run.trained} uploaded to {address}', flush=True)
    elif run.push_to_hub:
        private = run.hub_private or None
        trainer.push_to_hub(run.push_to_hub, private=private, card_samples=run.card_samples, dtype=dtype)


def rounds_adapters(model: Any) -> bool:
    """Returns True if a trained model's adapters are rounded to 16 bits when they are folded in."""
    source = getattr(getattr(model, 'model', None), 'weights_source', None)
    kept = getattr(source, 'dtype', None)
    return trained_dtype(model) is None and kept is not None and kept.itemsize < 4


def use_of(run: Run, path: Path, tokenizer: Any) -> str:
    """Returns a command that uses the trained model."""
    place = shlex.quote(str(path))
    if run.trained == 'reward_model':
        return f'python -m chatgpt ppo PROMPTS --pretrain {shlex.quote(run.base or "MODEL")} --reward_model {place}'
    if run.trained == 'critic':
        return f'python -m chatgpt ppo PROMPTS --pretrain MODEL --critic_from {place}'
    if isinstance(run, PPORun) and run.environment is not None:
        options = f" --environment_options '{json.dumps(run.environment_options)}'" if run.environment_options else ''
        return f'python -m chatgpt evaluate {place} --environment {shlex.quote(run.environment)}{options}'
    chats = template_of(tokenizer) is not None and text_choice(tokenizer) is not False
    return f'python -m chatgpt chat {place}' if chats else f'python -m chatgpt generate {place} "your prompt"'


def write_critic(run: Run, trainer: Any) -> None:
    """Writes a separate critic beside the actor, as a folder that `critic_from` takes, and its adapters if set."""
    path = final_folder(run, 'critic')
    trainer.save_pretrained(path, model='critic', card_samples=0, dtype=DTYPES.get(run.save_dtype))
    if trainer.strategy.is_rank_0:
        words = f'start another run from it: --critic_from {shlex.quote(str(path))}'
        if run.on_trunk:
            words = 'for a run without shared_trunk; one with it starts from critic_adapter/, which save_adapter writes'
        print(f'critic written to {path}; {words}', flush=True)
    if run.save_adapter:
        write_adapter(run, trainer, 'critic', 'critic_adapter')


def write_adapter(run: Run, trainer: Any, name: str, folder: str) -> None:
    """Writes the adapters of a model, and its head if it has one, to a folder in `save_path`, which PEFT loads onto
    the model that it began with."""
    path, strategy, model = Path(run.save_path, folder), trainer.strategy, trainer.models()[name]
    # a critic of its own may start from another model: that of its weights
    base = run.base if name == run.trained or run.on_trunk else None
    weights = strategy.full_state_dict(model, run.save_path)

    def write() -> None:
        bare: Any = strategy.unwrap(model)
        export_peft(bare, path, base_model=base, state=weights)
        if getattr(bare, 'value_head', None) is not None:
            save_head(bare.value_head, centred_head(weights), path)
        if trainer.tokenizer is not None:  # with the choice of the chat template
            save_tokenizer(trainer.tokenizer, path)

    strategy.run_on_rank0(write)
    facts = {'rank': run.lora_rank} | ({'source': base} if base else {})
    write_card_of(trainer, path, model=name, card_samples=run.card_samples if name == run.trained else 0, **facts)
    if strategy.is_rank_0:
        print(f'{folder.replace("_", " ")} written to {path}', flush=True)
