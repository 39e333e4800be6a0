"""Checks before training: models of the wrong class, shared models and optimizers, records that a model cannot read,
and a loss of the model's config that no trainer adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.layouts import layout_of
from chatgpt.nn.packing import check_parts_learn
from chatgpt.nn.trunk import base_model, position_limit, positions_of, text_config
from chatgpt.strategies.base import Strategy
from chatgpt.types import Sequence


def check_records(what: str, records: Iterable[SequenceOf[Sequence]], model: nn.Module) -> None:
    """Checks that an actor, critic or reward model can read these sequences, (P,) and (A,) int64 ids each, by record.

    Raises:
        ValueError: an id outside of the vocabulary, or a sequence longer than the model's positions; names the record.
    """
    config = getattr(getattr(model, 'model', None), 'config', None)
    if config is None:
        return
    size: int | None = getattr(text_config(config), 'vocab_size', None)
    limit = position_limit(config)
    layout = layout_of(config)
    for i, sequences in enumerate(records):
        for s in sequences:
            for ids in (s.prompt_ids, s.response_ids):
                if size is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                    outside = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
                    raise ValueError(
                        f"{what}[{i}] has the token id {outside}, outside of the model's vocabulary of {size} tokens; "
                        'make it with the tokenizer of this model'
                    )
            length = layout.length(len(s.prompt_ids), len(s.response_ids))
            if limit is not None and length > limit:
                raise ValueError(
                    f'{what}[{i}] has {length} tokens{layout.counted}, more than {positions_of(config)}; cut it '
                    f'(max_length={layout.most(limit)} where text is loaded) or leave it out'
                )


def check_dropout(model: nn.Module) -> None:
    """Raises ValueError for a model that learns with dropout under sequence_parallel."""
    inner: Any = getattr(model, 'model', None)
    if hasattr(inner, 'config'):
        check_parts_learn(base_model(inner))


def check_router_loss(config: Any) -> None:
    """Raises ValueError if the config of a trained model requests the auxiliary loss that balances experts (Fedus et
    al. 2021, "Switch Transformers"), which no trainer adds."""
    text = None if config is None else text_config(config)
    if getattr(text, 'output_router_logits', False):
        raise ValueError(
            f'the config of this {config.model_type} has output_router_logits=True, but the auxiliary loss that '
            f'balances experts (router_aux_loss_coef={getattr(text, "router_aux_loss_coef", None)}) is not added here; '
            'set output_router_logits to false in its config.json to train without it'
        )


def check_apart(
    strategy: Strategy,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    **frozen: nn.Module | None,
) -> None:
    """Raises ValueError if two models have the same optimizer, or if a frozen model is or shares weights with a trained
    one: it would be trained too, and the difference between them would stay 0."""
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        if (other := owners.setdefault(id(optimizer), name)) != name:
            raise ValueError(
                f'{other} and {name} have the same optimizer, which moves the weights of one of them only: make one of '
                f'{name}.parameters() for {name}'
            )
    groups = {
        name: [getattr(p, 'master_of', p) for group in optimizer.param_groups for p in group['params']]
        for name, optimizer in optimizers.items()
    }
    trained = {id(p): name for name, parameters in groups.items() for p in parameters}
    moving = {id(p) for parameters in groups.values() for p in parameters if p.requires_grad}
    for role, model in frozen.items():
        if model is None:
            continue
        bare = strategy.unwrap(model)
        same = next((name for name, other in models.items() if strategy.unwrap(other) is bare), None)
        weights = list(map(id, getattr(bare, 'model', bare).parameters()))
        shared = [each for each in weights if each in trained]
        # Frozen layers may be shared. If all are, `prepare` has frozen a model that was to be trained.
        if same is None and shared and (len(shared) == len(weights) or not moving.isdisjoint(shared)):
            same = trained[shared[0]]
        if same is not None:
            raise ValueError(
                f'{role} shares its weights with the {same} that is trained, and would move along with it: make it '
                f'with deepcopy({same}) before strategy.prepare'
                + ('; with LoRA or hydra pass None' if role == 'initial_model' else '')
            )


ROLES: dict[str, type[nn.Module]] = {
    'actor': Actor,
    'initial_model': Actor,
    'critic': Critic,
    'reward_model': RewardModel,
}
"""class of each model of a trainer; a user's own module is accepted as well"""


def check_models(
    owner: str, strategy: Strategy, trained: Mapping[str, Any], frozen: Mapping[str, Any] | None = None
) -> None:
    """Checks that each prepared model has the class of its role; objects that are no modules are skipped.

    Raises:
        ValueError: an unwrapped transformers model, a model for another role, or a trained one without a parameter that
            requires a gradient.
    """
    for role, prepared in {**trained, **(frozen or {})}.items():
        if not isinstance(prepared, nn.Module):
            continue
        model = strategy.unwrap(prepared)
        kind, name = ROLES.get(role), type(model).__name__
        if isinstance(model, PreTrainedModel):
            wrapped = f'{kind.__name__}({role})' if kind else 'the class of this package'
            raise ValueError(f'{owner}: {role} is a {name} of transformers; wrap it as {wrapped}, from chatgpt.nn')
        if kind and isinstance(model, tuple(ROLES.values())) and not isinstance(model, kind):
            raise ValueError(
                f'{owner}: {role} is a {name}, and {kind.__name__} is needed; look at the order of the arguments'
            )
        if role in trained and not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                f'{owner}: no parameter of the {role} requires a gradient, so nothing would be learned; prepare it '
                'with its optimizer, as (model, optimizer), and do not freeze it'
            )


def check_one_process_per_rank(strategy: Strategy) -> None:
    """Raises ValueError if several processes compute a rank together: each would step an environment of its own."""
    if strategy.processes.world_size != strategy.world_size:
        raise ValueError(
            'environment does not go with tensor_parallel or sequence_parallel: each of the processes that compute a '
            'rank together would ask an environment of its own, and need not hear the same; leave one of them out'
        )
