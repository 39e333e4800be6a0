"""Hydra: policy and reference share one frozen trunk and differ only in their top k blocks.

`make_hydra(owner, k)` freezes a causal LM below its top k blocks and keeps a frozen copy of the trainable part: the k
blocks (of an encoder-decoder those of the decoder), the final norm, and the output head if it is not tied to the
embeddings. Inside `reference_branch(owner)` copy and trained part are exchanged in the module tree, so the model's own
forward computes the reference. `recorded_trunk(owner)` records the inputs of the top blocks during an ordinary forward,
so that the reference needs no second pass through the trunk. `check_hydra` finds unsupported models: it compares
reference and policy on a few tokens, for a model on the meta device after loading (`check_loaded_hydra`).

Source: the hydra of trlX (Havrilla et al. 2023, "trlX: A Framework for Large Scale RLHF").
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from chatgpt.nn.layouts import layout_of
from chatgpt.nn.lora import has_lora
from chatgpt.nn.packing import check_batch, close, reshard
from chatgpt.nn.trunk import base_model, in_eval_mode, is_meta, text_config

_NORMS = 'ln_f norm final_layer_norm final_layernorm final_norm norm_f layer_norm layernorm ln_out'.split()
"""names of final norms, tried first"""
_UNSUPPORTED_ERRORS = (TypeError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""errors of a model whose blocks cannot be called separately"""


def _refused(why: str) -> ValueError:
    return ValueError(
        f'num_layers_unfrozen: {why}; supported are decoders that run their blocks one after another with nothing but '
        'a norm above them (docs/models.md)'
    )


class _Slot(NamedTuple):
    """A module with a copy: `parent.name` in the model, `own.own_name` in the branch."""

    parent: nn.Module
    name: str
    own: nn.Module
    own_name: str


RecordedTrunk = dict[int, tuple[tuple[Any, ...], dict[str, Any]]]
"""the inputs of each top block in the last forward, by number: positional arguments, with the hidden state first, and
keyword arguments"""


class TopBranch(nn.Module):
    """A frozen copy of a causal LM's top `num_blocks` blocks, final norm and untied head; it stays in eval mode.

    Parameters are named `blocks.<i>...`, `norm...` and `head...`.
    """

    is_reference_branch = True

    def __init__(self, parts: _Parts, num_blocks: int, config: Any) -> None:
        super().__init__()
        self.num_blocks, self.first_block = num_blocks, len(parts.blocks) - num_blocks
        places: list[tuple[nn.Module, str]] = [(parts.blocks, str(self.first_block + i)) for i in range(num_blocks)]
        places += [(parent, name) for _, parent, name in parts.above]
        # One deepcopy, so that modules shared by blocks stay shared; the config is the model's own, with its attention
        # setting.
        copied: list[Any] = copy.deepcopy([parent._modules[name] for parent, name in places], {id(config): config})
        self.blocks = nn.ModuleList(copied[:num_blocks])
        self.norm: nn.Module | None = None
        self.head: nn.Module | None = None
        for (name, *_), module in zip(parts.above, copied[num_blocks:], strict=True):
            setattr(self, name, module)
        own = [(self.blocks, str(i)) for i in range(num_blocks)] + [(self, name) for name, *_ in parts.above]
        # In tuples, so that the model's modules are not registered below this module.
        self._blocks, self._after_norm = (parts.blocks,), parts.after_norm
        self._slots = [_Slot(*place, *mine) for place, mine in zip(places, own, strict=True)]
        self.depth = 0
        self._never_trained = {n for n, p in self.named_parameters() if not p.requires_grad}
        """copies of untrained parameters, which the trunk may read as well: T5's position biases"""
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> TopBranch:
        super().train(False)
        return self

    def exchange(self) -> None:
        """Swaps every copied module with its original, in place."""
        for parent, name, own, own_name in self._slots:
            parent._modules[name], own._modules[own_name] = own._modules[own_name], parent._modules[name]

    def forward(self, trunk: RecordedTrunk) -> Tensor:
        """Returns hidden states (B, S, D) for the head, from a forward that `recorded_trunk` has recorded."""
        if len(trunk) != self.num_blocks:
            raise ValueError(
                f'hydra: {len(trunk)} of {self.num_blocks} block inputs recorded; run the model in recorded_trunk'
            )
        hidden = trunk[0][0][0]
        for i, block in enumerate(self.blocks):
            args, kwargs = trunk[i]
            output = block(hidden, *args[1:], **kwargs)
            hidden = output[0] if isinstance(output, (tuple, list)) else output
        if self.norm is not None:
            hidden = self.norm(hidden)
        for module in self._after_norm:
            hidden = module(hidden)
        return hidden

    @contextmanager
    def negated(self) -> Iterator[None]:
        """Inside this context the copy's numbers differ from the policy's: each sign is flipped, which is exact and
        needs no memory."""
        weights = [
            p
            for name, p in self.named_parameters()
            if name not in self._never_trained and p.is_floating_point() and p.dtype.itemsize > 1
        ]
        for weight in weights:
            weight.data.neg_()
        try:
            yield
        finally:
            for weight in weights:
                weight.data.neg_()

    def _check_outside(self, what: str) -> None:
        if self.depth:
            raise RuntimeError(
                f'hydra: {what} inside reference_branch would mix up policy and reference; leave the context first'
            )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._check_outside('state_dict')
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._check_outside('load_state_dict')
        super()._load_from_state_dict(state_dict, prefix, *args)


# --- construction ---------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    blocks: nn.ModuleList
    above: list[tuple[str, nn.Module, str]]
    """'norm' and 'head', if they have weights of their own: the parent module of each, and its name there"""
    after_norm: tuple[nn.Module, ...]
    """frozen, shared modules between final norm and head; a norm without weights is one"""


def make_hydra(owner: nn.Module, num_layers_unfrozen: int) -> None:
    """Adds a frozen `ref_branch` to `owner`, a transformers causal LM or an object with one as `.model`, and freezes
    all but the top `num_layers_unfrozen` blocks, the final norm and an untied head. -1 changes nothing. Parameters of
    `owner` outside the model do not change.

    Raises ValueError for a number that is neither -1 nor in 1..number of blocks, an unsupported architecture, adapters
    in the model, or a reference that differs from the policy on a few tokens.
    """
    k = num_layers_unfrozen
    _check_number(k)
    if k == -1:
        return
    model = _model_of(owner)
    if any(isinstance(m, TopBranch) for m in owner.modules()):
        raise ValueError('make_hydra: the module already has a reference branch; call it once')
    if has_lora(model):
        raise ValueError('make_hydra: the model has adapters; use LoRA or num_layers_unfrozen, not both')
    trainable = {p: p.requires_grad for p in model.parameters()}
    errors: list[ValueError] = []
    for parts in _candidates(model, k):
        _freeze_below(model, parts, k)
        owner.ref_branch = TopBranch(parts, k, model.config)
        try:
            if not is_meta(model):
                check_hydra(owner)
            return
        except ValueError as error:
            errors.append(error)
            owner._modules.pop('ref_branch', None)
            for parameter, flag in trainable.items():
                parameter.requires_grad_(flag)
    raise errors[0]


def _check_number(k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < -1 or k == 0:
        raise ValueError(
            f'num_layers_unfrozen: {k!r} given; give -1 (train everything) or the number of top blocks to train'
        )


def freeze_below(model: PreTrainedModel, num_layers_unfrozen: int) -> None:
    """Freezes a causal LM except the top blocks, the final norm and an untied head; -1 freezes nothing.

    Raises ValueError for a number that is neither -1 nor in 1..number of blocks, and for an unsupported architecture.
    """
    _check_number(num_layers_unfrozen)
    if num_layers_unfrozen != -1:
        _freeze_below(model, next(iter(_candidates(model, num_layers_unfrozen))), num_layers_unfrozen)


def _freeze_below(model: PreTrainedModel, parts: _Parts, num_blocks: int) -> None:
    top = {id(p) for block in list(parts.blocks)[-num_blocks:] for p in block.parameters()}
    if any(id(p) in top for block in list(parts.blocks)[:-num_blocks] for p in block.parameters()):
        raise ValueError(
            f'num_layers_unfrozen: the top blocks of {type(model).__name__} share weights with those below, so that '
            f'{num_blocks} cannot be trained alone; use LoRA, or -1'
        )
    model.requires_grad_(False)
    for part in (*list(parts.blocks)[-num_blocks:], *(parent._modules[name] for _, parent, name in parts.above)):
        cast(nn.Module, part).requires_grad_(True)
    biases = [[m for n, m in b.named_modules() if n.endswith('relative_attention_bias')] for b in parts.blocks]
    if biases[0] and not any(biases[1:]):  # T5: all blocks read those of the first, in the reference too
        for bias in biases[0]:
            bias.requires_grad_(False)


def _model_of(owner: nn.Module) -> PreTrainedModel:
    for candidate in (owner, getattr(owner, 'model', None)):
        if isinstance(candidate, PreTrainedModel):
            return candidate
    raise ValueError(f'hydra: {type(owner).__name__} is no transformers model and has none as .model')


def _candidates(model: PreTrainedModel, num_blocks: int) -> list[_Parts]:
    """Returns the possible places of the parts, the most likely first: there may be several norms beside the blocks."""
    layout, name = layout_of(model), type(model).__name__
    base = layout.blocks_in(base_model(model))
    lists = {path: m for path, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {p: m for p, m in lists.items() if not any(p.startswith(f'{other}.') for other in lists)}
    count = getattr(text_config(model.config), 'num_hidden_layers', None)
    found = [p for p, m in outer.items() if len(m) == count] or sorted(outer, key=lambda p: len(outer[p]))
    if not found:
        raise _refused(f'{name} is not supported')
    blocks = outer[found[-1]]
    if num_blocks > len(blocks):
        raise ValueError(f'num_layers_unfrozen: {num_blocks} given, but {name} has {len(blocks)} blocks')
    head = model.get_output_embeddings()
    if head is not None and sum(p is head.weight for _, p in model.named_parameters(remove_duplicate=False)) > 1:
        head = None  # tied to the embeddings, of an encoder-decoder to the decoder's
    path = next((n for n, m in model.named_modules() if m is head), '') if head is not None else ''
    heads = [('head', model.get_submodule(path.rpartition('.')[0]), path.rpartition('.')[2])] if path else []
    parent = base.get_submodule(found[-1].rpartition('.')[0])
    beside = [n for n, m in parent.named_children() if 'norm' in type(m).__name__.lower()]
    if layout.is_encoder_decoder:  # BART has it below the blocks; in LFM2 this name is that of the final norm
        beside = [n for n in beside if 'embed' not in n]
    names = [n for n in _NORMS if n in beside] + [n for n in beside if n not in _NORMS] + ['']
    after = parent._modules.get('project_out')  # OPT's

    def parts(norm_name: str) -> _Parts:
        norm = parent._modules[norm_name] if norm_name else None
        own = norm is not None and next(norm.parameters(), None) is not None
        above = [('norm', parent, norm_name), *heads] if own else heads
        return _Parts(blocks, above, tuple(m for m in (None if own else norm, after) if m is not None))

    return [parts(name) for name in names]


# --- use ------------------------------------------------------------------------------------------------------------


def has_hydra(module: nn.Module) -> bool:
    return any(isinstance(m, TopBranch) for m in module.modules())


def _reference_of(module: nn.Module) -> TopBranch:
    found = [m for m in module.modules() if isinstance(m, TopBranch)]
    if len(found) != 1:
        raise ValueError(
            f'hydra: {type(module).__name__} has {len(found)} reference branches, one is needed; call make_hydra first'
        )
    return found[0]


@contextmanager
def reference_branch(module: nn.Module) -> Iterator[None]:
    """Inside this context the forward of the model in `module`, which may be wrapped (DDP, FSDP2), is the reference's.
    Contexts may be nested. The copies are in eval mode; dropout of the shared trunk follows the model's mode."""
    branch = _reference_of(module)
    if branch.depth == 0:
        branch.exchange()
    branch.depth += 1
    try:
        yield
    finally:
        branch.depth -= 1
        if branch.depth == 0:
            branch.exchange()


@contextmanager
def recorded_trunk(module: nn.Module) -> Iterator[RecordedTrunk]:
    """Records the inputs of the top blocks in a forward inside this context, for `branch(record)` afterwards. Raises
    ValueError for a forward with a key-value cache, to which the branch would append a second time."""
    branch = _reference_of(module)
    record: RecordedTrunk = {}

    def note(i: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
                raise ValueError('recorded_trunk: the model runs with a key-value cache; call it with use_cache=False')
            if not args and 'hidden_states' in kwargs:
                args, kwargs = (kwargs['hidden_states'],), {k: v for k, v in kwargs.items() if k != 'hidden_states'}
            record[i] = (args, kwargs)

        return hook

    tops = list(branch._blocks[0])[branch.first_block :]
    handles = [block.register_forward_pre_hook(note(i), with_kwargs=True) for i, block in enumerate(tops)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def check_hydra(owner: nn.Module) -> None:
    """Raises ValueError unless, on a few tokens, the reference is used and equals the policy, and with other weights
    both ways of computing it agree up to rounding (in 16 bits 2 % of the largest number). Call it before the first
    training step."""
    model, branch = _model_of(owner), _reference_of(owner)
    device, name = next(model.parameters()).device, type(model).__name__
    ids = (torch.arange(6, device=device) * 7 + 1).remainder(text_config(model.config).vocab_size).view(1, 6)
    copies = [m for _, _, own, slot in branch._slots if (m := own._modules[slot]) is not None]
    calls: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, *_: calls.append(m)) for m in copies]
    layout = layout_of(model)
    given = layout.inputs(ids)
    try:
        with in_eval_mode(owner):
            policy = model(**given)[0]
            used_by_policy = list(calls)
            with reference_branch(owner):
                reference = model(**given)[0]
                used_by_reference = list(calls)
            with recorded_trunk(owner) as trunk:
                layout.states(model, ids)
            with branch.negated():
                with reference_branch(owner):
                    hidden = layout.states(model, ids)
                from_trunk = branch(trunk)
    except torch.OutOfMemoryError:
        raise
    except (*_UNSUPPORTED_ERRORS, ValueError) as error:
        line = (str(error).splitlines() or [''])[0]
        why = f'the top blocks of {name} cannot be computed apart ({type(error).__name__}: {line})'
        raise _refused(why) from None
    finally:
        for handle in handles:
            handle.remove()
    if used_by_policy or sorted(map(id, used_by_reference)) != sorted(map(id, copies)):  # each copy exactly once
        raise _refused(f'{name} does not run its blocks from its module tree')
    rounding = min(64 * torch.finfo(policy.dtype).eps, 2e-2)
    if not _same(reference, policy, rounding):
        worst = (policy - reference).abs().max().item()
        raise _refused(f'policy and reference of {name} differ by {worst:g}')
    if from_trunk.shape != hidden.shape or not _same(from_trunk, hidden, rounding):
        raise _refused(f'{name} does more above its blocks than a norm, or they hand on more than hidden states')


def _same(got: Tensor, want: Tensor, rounding: float) -> bool:
    """Compares finite numbers up to rounding, and others exactly."""
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite], want[~finite]):
        return False
    return not finite.any() or close(got[finite], want[finite], rounding)


@torch.no_grad()
def check_loaded_hydra(module: nn.Module, device: torch.device) -> None:
    """`check_hydra` for an actor that was built on the meta device, after a strategy has loaded its weights: runs its
    own forward, on all ranks that hold a part of it. Does nothing without a hydra."""
    if not has_hydra(module):
        return
    branch, batch = _reference_of(module), check_batch(module, device)

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probs of the policy, of the reference, and of the reference from the policy's pass."""
        with reference_branch(module):
            direct = module(batch).logprobs
        both = module(batch, with_reference=True)
        return both.logprobs, direct, both.reference.logprobs

    with in_eval_mode(module):
        policy, reference, from_trunk = outputs()
        reshard(module)
        with branch.negated():
            still, other, other_from_trunk = outputs()
            reshard(module)
    pairs = ((reference, policy), (from_trunk, policy), (still, policy), (other_from_trunk, other))
    if not all(close(a, b) for a, b in pairs) or close(other, policy):
        raise _refused(f'the reference of {type(_model_of(module)).__name__} is not what its policy was')
