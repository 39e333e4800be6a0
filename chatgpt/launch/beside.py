"""Checks of the models beside the policy, reward model and critic, before any weight is loaded: their tokenizer,
context and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatgpt.data.formats import copy_tokenizer, is_for_encoder_decoder, note_model
from chatgpt.launch.rules import same_file
from chatgpt.launch.runs import CriticRun, PPORun
from chatgpt.nn.heads import head_width, load_head, stored_support
from chatgpt.nn.layouts import layout_of, longest_side
from chatgpt.nn.loading import load_config, load_tokenizer
from chatgpt.nn.peft_format import adapter_base
from chatgpt.nn.reward_model import is_scorer
from chatgpt.nn.tensor_files import HEAD_FILE
from chatgpt.nn.trunk import text_config, width_of

TRAINED_BY = {
    'reward model': 'train one with reward-model --lora_rank 16 --save_adapter, and give its adapter/ folder',
    'critic': 'train one with ppo --shared_trunk --lora_rank 16 --save_adapter, and give its critic_adapter/ folder',
}


def check_lengths(
    prompts: Any, limit: int | None, max_new_tokens: int, what: str, tokenizer: Any, noun: str = 'prompt'
) -> None:
    if limit is None:
        return
    if is_for_encoder_decoder(tokenizer):
        longest = max(len(prompt.ids) for prompt in prompts)
        for name, flag, length in (
            (f'{noun}s', 'max_prompt_tokens', longest),
            ('responses', 'max_new_tokens', max_new_tokens),
        ):
            if length > limit:
                raise ValueError(f'{name} have up to {length} tokens, past {what} of {limit}; give --{flag} {limit}')
        return
    for i in range(len(prompts)):
        length = len(prompts[i].ids)
        if length + max_new_tokens > limit:
            raise ValueError(
                f'{noun} {i} has {length} tokens; with max_new_tokens={max_new_tokens} it passes {what} of {limit}. '
                'Use --max_prompt_tokens to cut prompts, or fewer new tokens'
            )


def check_adapter(what: str, folder: str, pretrain: str | None) -> None:
    """Raises ValueError unless the folder of a reward model or critic is an adapter of the trunk's base, with a
    head."""
    base = adapter_base(folder)
    if base is None or not Path(folder, HEAD_FILE).is_file():
        raise ValueError(
            f'shared_trunk takes a {what} that is an adapter with its head, and {folder} is none; {TRAINED_BY[what]}'
        )
    if base != pretrain and not (pretrain and Path(base).exists() and same_file(base, pretrain)):
        raise ValueError(f'the {what} {folder} is an adapter on {base}; the trunk is {pretrain}')


def reward_model_inputs(
    folder: str, tokenizer: Any, *, what: str = 'reward model', trust_remote_code: bool = False
) -> tuple[Any, int | None]:
    """Returns the tokenizer of a reward model, or of a critic, None if it equals the policy's, and its context.

    With one tokenizer, decoders and encoder-decoders expect different special tokens."""
    config = load_config(folder, trust_remote_code=trust_remote_code)
    other_kind = is_for_encoder_decoder(tokenizer) != layout_of(config).is_encoder_decoder
    own = None
    if not Path(folder).is_dir() or Path(folder, 'tokenizer_config.json').is_file():
        own = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if own is None and other_kind:
        own = copy_tokenizer(tokenizer)
    if own is not None and (other_kind or own.get_vocab() != tokenizer.get_vocab()):
        note_model(own, config)
        return own, longest_side(config)
    size = text_config(config).vocab_size
    if size <= max(tokenizer.get_vocab().values()):
        raise ValueError(
            f'the {what} {folder} knows {size} tokens, fewer than the tokenizer of the policy has, and brings no '
            'tokenizer of its own; save its tokenizer in its folder'
        )
    return None, longest_side(config)


def critic_source(run: PPORun) -> str | None:
    """Returns the folder or hub name that `critic_from` gives; None for the reward model, the actor, or no critic."""
    return run.critic_from if run.estimator.needs_values and run.critic_from not in ('reward_model', 'actor') else None


def takes_reward_model(run: PPORun, reward_tokenizer: Any) -> bool:
    """Returns True if a separate critic starts from the reward model, where that has a head."""
    own = run.estimator.needs_values and run.critic == 'own'
    return own and run.critic_from == 'reward_model' and reward_tokenizer is None


def check_critic(run: PPORun, source: str, policy_config: Any, tokenizer: Any) -> Any:
    """Checks the model that a critic starts from, and returns its config; None if only its head is taken.

    Raises:
        ValueError: another tokenizer than the policy's; a head for another `critic_loss`; with critic='shared' no head,
            or one of another width; with a shared trunk no adapter.
    """
    name = f'critic_from={source}'
    try:
        support = stored_support(source)
        config = None
        if run.critic != 'shared':
            config = load_config(source, trust_remote_code=run.trust_remote_code)
    except ValueError as error:
        raise ValueError(f'critic_from is reward_model, actor, a folder or a hub name: {error}') from None
    if run.critic == 'shared':
        width = width_of(policy_config)
        if support is None or head_width(load_head(source)) != width:
            raise ValueError(
                f"{name} has no {HEAD_FILE} for states of width {width}, and with critic='shared' only a head is "
                "taken: give the actor's folder of such a run, or leave it out"
            )
        check_support(run, name, support)
        return None
    if run.shared_trunk:
        check_adapter('critic', source, run.pretrain)
    own, _ = reward_model_inputs(source, tokenizer, what='critic', trust_remote_code=run.trust_remote_code)
    if own is not None:
        raise ValueError(
            f"{name} has another tokenizer than the policy, and a critic reads the policy's tokens: give a model with "
            'the same tokenizer'
        )
    if support is not None and not is_scorer(source, config):  # a score says nothing of bins
        check_support(run, name, support)
    return config


def check_support(run: PPORun | CriticRun, name: str, found: dict[str, float]) -> None:
    if found == run.critic_support:
        return
    needed = f"critic_loss='categorical', critic_loss_settings={found}" if found else "critic_loss='mse' or 'huber'"
    raise ValueError(
        f'{name} has a head for {needed}, and this run has critic_loss={run.critic_loss!r}'
        + (f' with {run.critic_support}' if run.critic_support else '')
        + ': give the same loss, or a model without a head'
    )
