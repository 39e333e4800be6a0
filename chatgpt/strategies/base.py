"""`Strategy`: everything that depends on how many processes there are and where weights live.

The bodies here work for models that are whole on each rank. The public members come first; a subclass overrides what
its layout changes: the methods under "what a subclass overrides", `accumulate`, `backward`, `full_model`,
`full_state_dict`, the pieces, and `memory_model` for the planner.
"""

from __future__ import annotations

import math
import os
import random
import sys
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies import states
from chatgpt.strategies.checkpoint.files import save_object, save_tensors
from chatgpt.strategies.checkpoint.layout import Piece, RenamedReader, TensorReader
from chatgpt.strategies.copies import (
    KeptCopy,
    NarrowWeights,
    Offloaded,
    OffloadedWeights,
    cast_copy,
    lora_merged,
    product_weights,
)
from chatgpt.strategies.memory import MemoryModel, of_numerics
from chatgpt.strategies.pairs import Trained, check_items, is_pair, open_saved, rebuilt
from chatgpt.strategies.precision import Deterministic, LossScaler, Numerics, Precision, WideProducts, tf32
from chatgpt.strategies.ranks import OnRanks, Ranks
from chatgpt.strategies.sums import exact_norm


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What trainers ask of a strategy, in place of its class."""

    sharded: bool = False
    """no rank holds whole weights or optimizer states"""
    accumulation: bool = True
    """False: one micro-batch per optimizer step, and `accumulate(last=False)` is a ValueError"""
    unused: bool = True
    """False: every trained parameter must get a gradient in every step"""
    weights_in_place: bool = True
    """False: masters elsewhere replace what is written into a prepared module's parameters"""


class Strategy(OnRanks):
    """The hardware plug. `prepare` models once, then train with `accumulate`, `backward` and `optimizer_step`.

    ::

        with DDPStrategy(seed=1) as strategy:
            with strategy.model_init_context():
                actor = AutoActor(pretrained='gpt2')
            optimizer = AdamW(actor.parameters())
            (actor, optimizer), reward_model = strategy.prepare((actor, optimizer), reward_model)
            for number, batch in enumerate(micro_batches):
                with strategy.accumulate(actor, last=number == len(micro_batches) - 1):
                    with strategy.autocast():
                        loss = loss_sum(actor(batch)) / num_tokens_of_all_ranks
                    strategy.backward(loss, actor, optimizer)
            norm = strategy.optimizer_step(optimizer, max_norm=1.0)

    Args:
        seed: of weights built from scratch and of every draw; the same on every rank.
        precision: compute dtype, as in `Numerics`.
        ranks: the processes that it runs on. The members of `Ranks` are also the strategy's own: `strategy.rank`.
        numerics: the other fields of `Numerics`.
    """

    abilities: Abilities = Abilities()
    numerics: Numerics
    """with the precision that 'auto' came to"""
    seed: int

    _keeps_narrow: ClassVar[bool] = True
    """computes under autocast from fp32 weights, so what nothing trains can be kept in the compute dtype"""
    _fuses: ClassVar[bool] = True
    """`make_optimizer` makes torch's fused AdamW on CUDA"""
    _only_16_bits: bool = False
    """it has no fp32, so 'auto' is bf16 on any device"""
    _reduces_each_round: bool = False
    """in an exact run gradients are summed over ranks after every round, and not once per step"""

    def __init__(
        self, seed: int = 42, precision: Precision = 'auto', *, ranks: Ranks | None = None, **numerics: Any
    ) -> None:
        if ranks is None:
            if not isinstance(self, Ranks):
                name = type(self).__name__
                raise ValueError(
                    f'{name} does not say which processes it runs on: give Strategy.__init__ ranks=OneProcess(), '
                    f'ProcessGroup() or your own Ranks; where rank, all_reduce and the like are members of {name}, '
                    f'write class {name}(Ranks, Strategy)'
                )
            ranks = self
        self.ranks, self.seed = ranks, seed
        self.numerics = Numerics(precision=precision, **numerics).on(ranks.device, only_16_bits=self._only_16_bits)
        self.sums = self.numerics.sums(ranks, ranks_below=self._reduces_each_round)
        """how batches are cut and numbers added up"""
        self._deterministic = Deterministic() if self.numerics.deterministic or self.sums.exact else None
        self._warn_of_emulation()
        bf16_on_cuda = ranks.device.type == 'cuda' and self.numerics.precision == 'bf16'
        self._uses_tf32 = bf16_on_cuda and self._deterministic is None
        random.seed(seed)
        if (numpy := sys.modules.get('numpy')) is not None:
            numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # the same on every rank, so that models built from scratch are equal
        self._prepared: dict[int, tuple[nn.Module, nn.Module]] = {}
        """id of the user's and of the prepared module -> (user's, prepared)"""
        self._pairs: dict[int, Trained] = {}
        """id of the user's and of the prepared optimizer -> its pair"""
        self._keep: list[Any] = []  # objects whose ids are keys above must not be freed
        self._offloaded_models: dict[int, Offloaded] = {}
        """by id of the user's module"""
        self._narrow = NarrowWeights(self.numerics.dtype, self.autocast)
        self._kept_copy = KeptCopy()

    # ------------------------------------------------------------------ models

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Where modules are built. A sharded strategy may put them on the meta device here."""
        return nullcontext()

    def make_optimizer(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """An AdamW that this strategy can train with. On CUDA torch's fused one, which needs no temporary as large as
        the weights; not in an exact run, nor on a CPU, where it rounds otherwise."""
        fused = True if self._fuses and self.device.type == 'cuda' and not self.sums.exact else None
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def prepare(self, *items: Any) -> Any:
        """Make models and optimizers ready: same things, same order, same nesting; a single item comes back bare.

        A (model, optimizer) pair is trained. A bare module is frozen, in eval mode and moved. None and callables that
        are not modules (a reward function, a pipeline) pass through. A module given twice is prepared once, and trained
        if any pair holds it. A number may stand as the weight of a (weight, reward) pair.
        """
        pairs: list[tuple[nn.Module, Optimizer]] = []
        check_items(items, pairs)
        for model, optimizer in pairs:
            self._prepare_pair(model, optimizer)
        prepared = tuple(self._prepare_item(item) for item in items)
        return prepared[0] if len(prepared) == 1 else prepared

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module the user built."""
        return self._prepared[id(model)][0] if id(model) in self._prepared else model

    @contextmanager
    def full_model(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        whole: bool = False,
        read_only: bool = False,
        on_disk: str | os.PathLike[str] | None = None,
    ) -> Iterator[nn.Module]:
        """The unwrapped module with full weights, LoRA merged, in eval mode: for generation, and for writing it. A
        collective.

        In fp32 it is the very module, whose exact bits are restored after. In 16 bits it is a copy that is freed after,
        unless somebody asked with `keep_copy`.

        Args:
            dtype: None means `numerics.full_dtype`.
            whole: all weights also where a few processes would compute with parts of them (tensor parallelism), for a
                reader that has a model of its own.
            read_only: the reader computes nothing here, so that what is too large for the device may stay in host
                memory.
            on_disk: a folder in which a sharded strategy keeps the whole weights, so that no rank holds them in memory;
                such a copy is for writing, on rank 0.
        """
        module, dtype = self.unwrap(model), dtype or self.numerics.full_dtype
        if dtype is torch.float32:
            from chatgpt.nn.trunk import in_eval_mode

            with in_eval_mode(module), self._narrow.widened(module), lora_merged(module):
                yield module
            return
        with self._kept_copy.lent(module, dtype) as kept:
            kept.copied = cast_copy(module, dtype, kept.copied).eval()
            yield kept.copied

    def keep_copy(self, user: Any, keep: bool) -> None:
        """Keep the copy that `full_model` makes in 16 bits for `user`, or no longer; without users it is freed."""
        self._kept_copy.keep(user, keep)

    @classmethod
    def memory_model(cls, **options: Any) -> MemoryModel:
        """What a strategy that is built with these options keeps, for `chatgpt.plan`. Here: whole copies on each
        rank."""
        return MemoryModel(**of_numerics(options))

    def offload(self, model: nn.Module) -> None:
        """Let a frozen model's weights wait in host memory outside of `onload`. On a CPU nothing moves.

        Raises:
            ValueError: this strategy places frozen weights itself, or other models use the same weights.
        """
        module = self.unwrap(model)
        states.refuse_shared(module, 'offload moves weights to host memory')
        if id(module) not in self._offloaded_models and (offloaded := self._offloaded(module)) is not None:
            self._offloaded_models[id(module)] = offloaded

    def onload(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, a model given to `offload` is on the device; nothing for any other."""
        return self._offloaded_models.get(id(self.unwrap(model)), nullcontext())

    # ------------------------------------------------------------------ one optimizer step

    def autocast(self, *, scoring: bool = False) -> AbstractContextManager[Any]:
        """Around forward and loss: computes in `numerics.dtype`.

        Args:
            scoring: the numbers are compared with none of learning (scores, values, evaluation), so a CPU that emulates
                16 bits may compute them in fp32.
        """
        if self.numerics.precision == 'fp32' or (scoring and self.numerics.emulated and self._keeps_narrow):
            return nullcontext()
        return self._cast()

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; `last` marks the one before `optimizer_step`, and in an exact
        run the last one of each of `sums.rounds`."""
        return self._round(model) if last and self.sums.exact else nullcontext()

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        """Add this rank's share of the gradient. `loss` is a share of a sum: already divided by what counts on all
        ranks."""
        pair = self._pair(optimizer)
        pair.fed = True
        with self._products():
            (loss if pair.scaler is None else loss * pair.scaler.scale).backward()

    def optimizer_step(self, optimizer: Optimizer, max_norm: float | None = None) -> float:
        """Clip, step, clear the gradients; the global gradient norm before clipping.

        On a non-finite norm the weights and the optimizer's state stay as they are, and the gradients are cleared.
        """
        check_max_norm(max_norm)
        pair = self._pair(optimizer)
        if pair.tree is not None:
            pair.tree.give(pair.parameters())
        self._reduce_gradients(pair)
        parameters = [p for p in pair.parameters() if p.grad is not None]
        if pair.scaler is not None:
            pair.scaler.unscale([p.grad for p in parameters if p.grad is not None])
        norm = self._gradient_norm(parameters)
        finite = math.isfinite(norm)
        if finite:
            if max_norm is not None:
                self._scale_gradients(parameters, min(1.0, max_norm / (norm + 1e-6)))
            pair.optimizer.step()
        if pair.scaler is not None:
            pair.scaler.update(finite)
        self.discard_gradients(optimizer)
        return norm

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Forget what was accumulated since the last step, in every parameter of the model."""
        pair = self._pair(optimizer)
        pair.fed = False
        if pair.tree is not None:
            pair.tree.clear()
        pair.optimizer.zero_grad(set_to_none=True)
        for parameter in pair.user_model.parameters():
            parameter.grad = None

    # ------------------------------------------------------------------ weights and optimizer states in files

    def save_model(self, model: nn.Module, path: str | os.PathLike[str], only_rank0: bool = True) -> None:
        """One file with the full fp32 state dict that plain torch reads with `weights_only=True` (or .safetensors).

        `only_rank0=False` writes a folder in parallel under a sharded strategy, and the same one file otherwise.
        """
        if self.abilities.sharded and not only_rank0:
            self._save_folder(path, {'': self.model_pieces(model)}, {'kind': 'model'})
            return
        tensors = self.full_state_dict(model, Path(path).parent)
        self.run_on_rank0(lambda: save_tensors(tensors, path))

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Load what `save_model` wrote (file or folder, any strategy), before or after `prepare`. Unpickles nothing.

        A file of the bare `model` of an actor, such as a transformers state dict, is read too.

        Raises `CheckpointMismatch` naming the first missing, unexpected and wrongly shaped tensors. `strict=False`
        loads what is in both and warns with the names of the rest; wrong shapes, or nothing in common, are still an
        error.
        """
        reader, _ = open_saved(path, 'model')
        own, found = set(self.unwrap(model).state_dict(keep_vars=True)), reader.names()
        if own.isdisjoint(found) and any(f'model.{name}' in own for name in found):
            reader = RenamedReader(reader, {f'model.{name}': name for name in found})
        self.load_model_pieces(model, reader, strict=strict)

    def save_optimizer(self, optimizer: Optimizer, path: str | os.PathLike[str], only_rank0: bool = False) -> None:
        """States by parameter name and hyperparameters: one file, or under a sharded strategy a folder written in
        parallel."""
        meta, pieces = self.optimizer_state(optimizer)
        meta = {'kind': 'optimizer', **meta}
        if self.abilities.sharded:
            if only_rank0:
                raise ValueError(
                    f'{type(self).__name__} shards optimizer states, so no rank can write them alone; '
                    'use save_optimizer(..., only_rank0=False), which writes a folder at that path'
                )
            self._save_folder(path, {'': pieces}, meta)
            return
        pair = self._pair(optimizer)

        def write() -> None:
            slots = states.slots_of(pair.optimizer, pair.named_parameters())
            save_object({'meta': meta, 'state': {name: tensor.detach().cpu() for name, tensor in slots.items()}}, path)

        self.run_on_rank0(write)

    def load_optimizer(self, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
        """Load what `save_optimizer` wrote under any strategy. The optimizer must have been prepared with its model."""
        self._pair(optimizer)
        reader, meta = open_saved(path, 'optimizer')
        self.load_optimizer_state(optimizer, meta, reader)

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        """Whole tensors by name, floating ones in fp32; only rank 0's dict is used. Tied tensors share storage.

        A sharded strategy keeps them in a mapped file without a name in `folder`, not in memory.
        """
        if not self.is_rank_0:
            return {}
        tensors, aliases = states.named_tensors(self.unwrap(model))
        full = {n: (t.detach().float() if t.is_floating_point() else t.detach()).cpu() for n, t in tensors.items()}
        return full | {alias: full[name] for alias, name in aliases.items()}

    # ------------------------------------------------------------------ pieces for training checkpoints

    def model_pieces(self, model: nn.Module) -> Iterable[Piece]:
        """The pieces of weights and persistent buffers that this rank writes; over all ranks each tensor exactly once.

        Names are those of the module the user built; tied tensors come once. May be collective: every rank iterates to
        the end.
        """
        tensors, _ = states.named_tensors(self.unwrap(model))
        kept = self._narrow.ids(self.unwrap(model))
        return self._dealt(tensors, {name for name, tensor in tensors.items() if id(tensor) in kept})

    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        """Fill weights and buffers in place from any layout's pieces."""
        module = self.unwrap(model)
        learns = any(pair.user_model is module for pair in self._pairs.values())
        with self._narrow.widened(module, changes=True, learns=learns):
            tensors, aliases = states.named_tensors(module)
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for name, stored in states.match_names(shapes, aliases, reader, strict=strict).items():
                states.copy_from(reader, stored, tensors[name])

    def optimizer_state(self, optimizer: Optimizer) -> tuple[dict[str, Any], Iterable[Piece]]:
        """JSON (hyperparameters of the groups, the loss scale), and the pieces '<parameter>/<slot>' that this rank
        writes; numbers are tensors of shape ()."""
        pair = self._pair(optimizer)
        meta: dict[str, Any] = {'groups': states.groups_to_json(pair.optimizer, pair.names)}
        if pair.scaler is not None:
            meta['scaler'] = pair.scaler.to_json()
        return meta, self._optimizer_pieces(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, meta: Mapping[str, Any], reader: TensorReader) -> None:
        """Replace hyperparameters, loss scale and states by those of `optimizer_state`, under any layout. Groups are
        matched by their parameters' names; slots of a parameter's size must have its shape."""
        pair = self._pair(optimizer)
        states.groups_from_json(pair.optimizer, pair.names, meta['groups'])
        if pair.scaler is not None and 'scaler' in meta:
            pair.scaler.from_json(meta['scaler'])
        self._load_optimizer_pieces(optimizer, reader)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Forget prepared models; leave what was joined."""
        for kept in (self._prepared, self._pairs, self._keep, self._offloaded_models):
            kept.clear()
        self._narrow.release()
        self._kept_copy.free()
        if self._deterministic is not None:
            self._deterministic.restore()
            self._deterministic = None
        self.ranks.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what a subclass overrides

    def _setup_pair(
        self, model: nn.Module, optimizer: Optimizer, names: list[list[str]]
    ) -> tuple[nn.Module, Optimizer]:
        """Make a trained pair ready: `_setup_model`, then `_setup_optimizer`. `names` are the parameter names of each
        group."""
        if id(model) in self._prepared:
            model = self._prepared[id(model)][1]
        else:
            model = self._setup_model(model, trained=True)
        return model, self._setup_optimizer(optimizer, model, names)

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        """Move (shard, wrap) one module. Here: moved in place, so that optimizers keep pointing at its parameters."""
        return model.to(self.device)

    def _setup_optimizer(self, optimizer: Optimizer, model: nn.Module, names: list[list[str]]) -> Optimizer:
        """Make an optimizer fit the prepared model. Here: state it already has follows its parameters to their
        device."""
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[slot] = value.to(parameter.device)
        return optimizer

    def _offloaded(self, module: nn.Module) -> Offloaded | None:
        """Moves a frozen module to host memory and back; None on a CPU, ValueError where it cannot be moved."""
        return None if self.device.type == 'cpu' else OffloadedWeights(module, self.device)

    def _end_round(self, pair: Trained) -> None:
        """In an exact run: what `backward` has added up since the last round waits as one leaf of the tree of sums."""
        if pair.tree is not None:
            pair.tree.take(pair.parameters())

    def _reduce_gradients(self, pair: Trained) -> None:
        """Make every gradient the sum over ranks, where `backward` has not done so already."""

    def _gradient_norm(self, parameters: list[Tensor]) -> float:
        """L2 norm of all gradients together, over all ranks."""
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        if self.sums.exact:
            return exact_norm(gradients, self.device)
        if not gradients:
            return 0.0
        norms = torch._foreach_norm(gradients)
        return float(torch.linalg.vector_norm(torch.stack([n.double().to(norms[0].device) for n in norms])))

    def _scale_gradients(self, parameters: list[Tensor], factor: float) -> None:
        """Multiply all gradients by `factor`, in place."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _optimizer_pieces(self, optimizer: Optimizer) -> Iterable[Piece]:
        """See `optimizer_state`."""
        pair = self._pair(optimizer)
        return self._dealt(states.slots_of(pair.optimizer, pair.named_parameters()))

    def _load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        """See `load_optimizer_state`."""
        pair = self._pair(optimizer)
        states.load_slots(pair.optimizer, dict(pair.named_parameters()), reader)

    # ------------------------------------------------------------------ for the bodies above

    def _warn_of_emulation(self) -> None:
        if not self.numerics.emulated or self.ranks.rank:
            return
        what, instead = 'learning', "; generation, scores and values are in fp32. Give precision='fp32'"
        if self._only_16_bits:
            what, instead = 'all but generation', ", which this strategy has not: take another with precision='fp32'"
        warnings.warn(
            f'precision={self.numerics.precision!r}: this CPU has no instructions for matrix products of 16 bits, '
            f'which {what} imitates in fp32, slower than fp32 itself{instead}',
            stacklevel=3,
        )

    def _prepare_item(self, item: Any) -> Any:
        if is_pair(item):
            pair = self._pair(item[1])
            return rebuilt(item, [pair.model, pair.optimizer])
        if isinstance(item, (tuple, list)):
            return rebuilt(item, [self._prepare_item(part) for part in item])
        if not isinstance(item, nn.Module):
            return item
        if id(item) not in self._prepared:
            item.requires_grad_(False)
            self.sums.check_model(item)
            self._keep_narrow(item)
            self._remember(item, self._setup_model(item, trained=False).eval())
        return self._prepared[id(item)][1]

    def _prepare_pair(self, model: nn.Module, optimizer: Optimizer) -> None:
        user_model, user_optimizer = self.unwrap(model), optimizer
        if id(optimizer) in self._pairs:
            if self._pairs[id(optimizer)].user_model is not user_model:
                raise ValueError('prepare: this optimizer is already paired with another model')
            return
        names = states.parameter_names(user_model, optimizer)
        if id(model) not in self._prepared:
            self.sums.check_model(model)
            self._keep_narrow(model, optimizer)
        model, optimizer = self._setup_pair(model, optimizer, names)
        self.sums.check_optimizer(optimizer)
        self._remember(user_model, model)
        scaler = LossScaler() if self.numerics.scales_loss else None
        pair = Trained(user_model, model, optimizer, names, scaler, self.sums.tree())
        self._pairs[id(user_optimizer)] = self._pairs[id(optimizer)] = pair
        self._keep += [user_optimizer, optimizer]

    def _keep_narrow(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Keep what nothing trains in the compute dtype. In a model that learns (under LoRA, hydra) only weights that
        are numbers of that dtype anyway, as of a folder in bf16, so that what is saved is exact. Before the model goes
        to the device."""
        numerics = self.numerics
        if numerics.precision == 'fp32' or numerics.emulated or self.sums.exact or not self._keeps_narrow:
            return
        owned = {id(p) for group in optimizer.param_groups for p in group['params']} if optimizer is not None else set()
        from chatgpt.nn import lora

        elsewhere = {id(p) for pair in self._pairs.values() for p in pair.user_model.parameters()}
        frozen = [p for p in product_weights(module) if not p.requires_grad and id(p) not in owned | elsewhere]
        if optimizer is not None or lora.has_lora(module):  # what is folded or saved is exact
            lossless = self.broadcast_object([torch.equal(p.to(numerics.dtype).to(p.dtype), p) for p in frozen])
            frozen = [p for p, same in zip(frozen, lossless, strict=True) if same]
        self._narrow.keep(module, frozen)

    def _remember(self, user_model: nn.Module, model: nn.Module) -> None:
        self._prepared[id(user_model)] = self._prepared[id(model)] = (user_model, model)

    def _pair(self, optimizer: Optimizer) -> Trained:
        """The pair an optimizer belongs to; ValueError before `prepare`."""
        if id(optimizer) not in self._pairs:
            raise ValueError(
                f'this {type(optimizer).__name__} was not prepared, so its model is unknown; '
                'call strategy.prepare((model, optimizer)) first'
            )
        return self._pairs[id(optimizer)]

    @contextmanager
    def _cast(self) -> Iterator[None]:
        # A cast weight that is used again would add its gradients up in 16 bits, where it is not a gathered one.
        cast = torch.autocast(self.device.type, dtype=self.numerics.dtype, cache_enabled=not self.sums.exact)
        with cast, self._products():
            yield

    def _products(self) -> AbstractContextManager[Any]:
        """Around a forward and its backward: how matrices are multiplied, where torch would do it otherwise. In bf16 on
        CUDA what stays fp32 may use TF32."""
        if self.numerics.emulated:
            return WideProducts()
        return tf32() if self._uses_tf32 else nullcontext()

    @contextmanager
    def _round(self, model: nn.Module) -> Iterator[None]:
        yield
        module = self.unwrap(model)
        for pair in {id(pair): pair for pair in self._pairs.values()}.values():
            if pair.user_model is module and pair.fed:
                pair.fed = False
                self._end_round(pair)

    def _save_folder(
        self, path: str | os.PathLike[str], groups: Mapping[str, Iterable[Piece]], meta: dict[str, Any]
    ) -> None:
        from chatgpt.strategies.checkpoint.writer import write_checkpoint

        gather = self.processes.all_gather_object
        write_checkpoint(path, groups, meta=meta, rank=self.processes.rank, all_gather_object=gather)

    def _dealt(self, tensors: Mapping[str, Tensor], in_fp32: Container[str] = ()) -> Iterator[Piece]:
        """This rank's share of replicated tensors, so that all ranks write at once; its first process writes them."""
        owner = states.deal({n: t.numel() * t.element_size() for n, t in tensors.items()}, self.world_size)
        return (
            Piece.whole(name, tensor.detach().float() if name in in_fp32 else tensor)
            for name, tensor in tensors.items()
            if owner[name] == self.rank and self.ranks.leads and tensor.numel()
        )


def check_max_norm(max_norm: float | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f'max_norm={max_norm} must be positive; None turns clipping off')
