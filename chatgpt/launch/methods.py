"""The table of methods: settings, trainer, model and reader of each, by name.

Flags, config files, recipes and the command read it. To add a method:

    METHODS['mine'] = Recipe(about='...', config=MyConfig, trainer=MyTrainer, reader=read_mine)

or name such an object by `module:name` on the command line. Entries of the library name their parts as 'module:name';
these are imported at their first use, so that listing the methods imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chatgpt.registry import Registry, imported

OBJECTIVES = 'chatgpt.trainer.objectives'
PAIRS, CONFIGS = f'{OBJECTIVES}.pairs', f'{OBJECTIVES}.config'


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A method of training.

    Args:
        about: description in one line.
        config: class of the trainer's settings, a `LearningSettings`.
        trainer: called as `trainer(strategy, model, optimizer, train, validation, config=..., callbacks=...,
            tokenizer=..., run_dir=...)`, as the trainers of `chatgpt.trainer.objectives`; PPO's has other arguments.
        run: class of the settings of a command line, a `runs.Run`; None: `runs.DataRun`, or `runs.PreferenceRun` for a
            `PreferenceConfig`, with the fields of `config`.
        model: class of the trained model: 'Actor', 'RM', 'Critic' or 'ILQLModel'.
        reader: function of (run, inputs) that sets `inputs.train` and `inputs.validation`.
        positional: the setting that a plain word of the command line sets, or several words if it is a list.
        defaults: values of settings that are None; a learning rate of None follows from the model's size.
        learning: key of `SHARES` in `chatgpt.monitor.learning_rate`, which gives that rate.
        settings: defaults that differ from the class's, such as the advantage estimator of GRPO.
    """

    about: str
    config: type | str
    trainer: Callable[..., Any] | str
    run: type | str | None = None
    model: str = 'Actor'
    reader: Callable[[Any, Any], None] | str = 'chatgpt.launch.inputs:read_sft'
    positional: str = 'dataset'
    defaults: Mapping[str, Any] = field(default_factory=lambda: {'lr': None})
    settings: Mapping[str, Any] = field(default_factory=dict)
    learning: str = 'sft'

    def part(self, name: str) -> Any:
        """Returns `config`, `trainer`, `run` or `reader`, imported if given by name."""
        found = getattr(self, name)
        return imported(found) if isinstance(found, str) else found


def _online(about: str, **settings: Any) -> Recipe:
    return Recipe(
        about=about,
        run='chatgpt.launch.runs:PPORun',
        config='chatgpt.trainer.config:PPOConfig',
        trainer='chatgpt.trainer.ppo:PPOTrainer',
        reader='chatgpt.launch.inputs:read_ppo',
        positional='prompt_path',
        defaults={'lr': None, 'critic_lr': None, 'max_new_tokens': 64},
        settings=settings,
        learning='ppo',
    )


def _preference(about: str, config: str, trainer: str, learning: str) -> Recipe:
    reader = 'chatgpt.launch.inputs:read_preferences'
    return Recipe(about=about, config=config, trainer=trainer, reader=reader, learning=learning)


_GROUP: dict[str, Any] = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 8}
METHODS: Registry[Recipe] = Registry(
    'method',
    Recipe,
    {
        'sft': Recipe(
            about='supervised fine-tuning on demonstrations, chats or text',
            run='chatgpt.launch.runs:SFTRun',
            config='chatgpt.trainer.objectives.config:SFTConfig',
            trainer=f'{OBJECTIVES}.sft:SFTTrainer',
        ),
        'reward-model': Recipe(
            about='a reward model from preferences or labelled text',
            run='chatgpt.launch.runs:RewardRun',
            config=f'{CONFIGS}:RewardModelConfig',
            trainer=f'{OBJECTIVES}.reward_model:RewardModelTrainer',
            model='RM',
            reader='chatgpt.launch.inputs:read_preferences',
            learning='rm',
        ),
        'critic': Recipe(
            about='a critic from the recorded responses of earlier runs',
            run='chatgpt.launch.runs:CriticRun',
            config=f'{CONFIGS}:CriticConfig',
            trainer=f'{OBJECTIVES}.critic:CriticTrainer',
            model='Critic',
            reader='chatgpt.launch.recorded:read_recorded',
            positional='rollouts',
            learning='critic',
        ),
        'ppo': _online('PPO with a critic, on prompts and a reward'),
        'grpo': _online(
            'GRPO: advantages within a group of responses, no critic', **_GROUP, kl_in='loss', kl_coef=0.04
        ),
        'dr_grpo': _online(
            'Dr. GRPO: GRPO without division by deviation and length',
            advantage_estimator='dr_grpo',
            num_samples_per_prompt=8,
            kl_coef=0.0,
        ),
        'rloo': _online(
            'RLOO: the baseline is the mean of the other responses',
            advantage_estimator='rloo',
            num_samples_per_prompt=4,
        ),
        'reinforce++': _online('REINFORCE++: no critic and no group', advantage_estimator='reinforce++'),
        'reinforce++_baseline': _online(
            'REINFORCE++ with the mean of the group subtracted',
            advantage_estimator='reinforce++_baseline',
            num_samples_per_prompt=4,
            kl_in='loss',
            kl_loss_kind='k2',
        ),
        'dapo': _online(
            'DAPO: GRPO with a higher upper clip, dynamic sampling and a length penalty',
            advantage_estimator='grpo',
            num_samples_per_prompt=16,
            eps_clip_high=0.28,
            loss_aggregation='token',
            kl_coef=0.0,
            dynamic_sampling_rounds=4,
        ),
        'gspo': _online(
            'GSPO: GRPO with one ratio per sequence',
            **_GROUP,
            policy_loss='gspo',
            eps_clip=3e-4,
            eps_clip_high=4e-4,
            kl_coef=0.0,
        ),
        'cispo': _online(
            'CISPO: GRPO with clipped weights instead of clipped updates',
            **_GROUP,
            policy_loss='cispo',
            eps_clip_high=4.0,
            kl_coef=0.0,
        ),
        'a2c': _online(
            'A2C: a critic, no probability ratio, one pass',
            advantage_estimator='a2c',
            policy_loss='reinforce',
            max_epochs=1,
        ),
        'vc-ppo': _online(
            'VC-PPO: a critic that is learned first and from whole returns', value_lam=1.0, critic_warmup_phases=3
        ),
        'vapo': _online(
            'VAPO: VC-PPO with a λ that follows the length, a higher upper clip and groups',
            value_lam=1.0,
            lam_length=0.05,
            critic_warmup_phases=3,
            eps_clip_high=0.28,
            num_samples_per_prompt=16,
            kl_coef=0.0,
            positive_coef=0.1,
        ),
        'dpo': _preference(
            'DPO, IPO, cDPO, robust and hinge: from preferences', f'{CONFIGS}:DPOConfig', f'{PAIRS}:DPOTrainer', 'dpo'
        ),
        'kto': _preference(
            'KTO: from answers labelled good or bad', f'{CONFIGS}:KTOConfig', f'{OBJECTIVES}.kto:KTOTrainer', 'kto'
        ),
        'orpo': _preference(
            'ORPO: SFT and preferences in one loss, no reference',
            f'{CONFIGS}:ORPOConfig',
            f'{PAIRS}:ORPOTrainer',
            'orpo',
        ),
        'simpo': _preference(
            'SimPO: from preferences, no reference', f'{CONFIGS}:SimPOConfig', f'{PAIRS}:SimPOTrainer', 'simpo'
        ),
        'ilql': Recipe(
            about='ILQL: from responses with rewards, without generating',
            config=f'{CONFIGS}:ILQLConfig',
            trainer=f'{OBJECTIVES}.ilql:ILQLTrainer',
            model='ILQLModel',
            reader='chatgpt.launch.inputs:read_rewarded',
            learning='ilql',
        ),
    },
)
