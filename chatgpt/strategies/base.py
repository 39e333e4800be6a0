"""`Strategy`: everything that depends on how many processes there are and where weights live.

The implementations here are for models that are whole on each rank. The public members come first. A subclass overrides
what its layout changes: the methods under "for subclasses to override", `accumulate`, `backward`, `full_model`,
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

from chatgpt.strategies import copies, states
from chatgpt.strategies.checkpoint.files import save_object, save_tensors
from chatgpt.strategies.checkpoint.layout import Piece, RenamedReader, TensorReader
from chatgpt.strategies.memory import MemoryModel, of_numerics
from chatgpt.strategies.pairs import Trained, check_items, check_max_norm, is_pair, open_saved, rebuilt
from chatgpt.strategies.precision import Deterministic, LossScaler, Numerics, Precision, WideProducts, tf32
from chatgpt.strategies.ranks import OnRanks, Ranks
from chatgpt.strategies.sums import exact_norm, local_part


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The abilities of a strategy, which trainers read instead of its class."""

    sharded: bool = False
    """no rank holds whole weights or optimizer states"""
    accumulation: bool = True
    """False: one micro-batch per optimizer step, and `accumulate(last=False)` is a ValueError"""
    unused: bool = True
    """False: every trained parameter must get a gradient in every step"""
    weights_in_place: bool = True
    """False: masters elsewhere replace what is written into a prepared module's parameters"""


class Strategy(OnRanks):
    """Base class of strategies. `prepare` models once, then train: `accumulate`, `backward`, `optimizer_step`.

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
        seed: seed of weights built from scratch and of sampling; the same on every rank.
        precision: compute dtype, see `Numerics`.
        ranks: the processes to run on. The members of `Ranks` are members of the strategy too: `strategy.rank`.
        numerics: the other fields of `Numerics`.
    """

    abilities: Abilities = Abilities()
    numerics: Numerics
    """with 'auto' resolved to a precision"""
    seed: int

    _keeps_narrow: ClassVar[bool] = True
    """True: models are whole and compute under autocast, so weights can be kept in the compute dtype"""
    _fuses: ClassVar[bool] = True
    """True: `make_optimizer` returns torch's fused AdamW on CUDA"""
    _only_16_bits: bool = False
    """True: fp32 is not supported, so 'auto' is bf16 on any device"""
    _reduces_each_round: bool = False
    """True: an exact run sums gradients over ranks after every round instead of once per step"""

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
        given = Numerics.of(type(self), {'precision': precision, **numerics})
        self.numerics = given.on(ranks.device, only_16_bits=self._only_16_bits)
        self.sums = self.numerics.sums(ranks, ranks_below=self._reduces_each_round)
        """how batches are split and numbers summed"""
        self._deterministic = Deterministic() if self.numerics.deterministic or self.sums.exact else None
        self._warn_of_emulation()
        bf16_on_cuda = ranks.device.type == 'cuda' and self.numerics.precision == 'bf16'
        self._uses_tf32 = bf16_on_cuda and self._deterministic is None
        random.seed(seed)
        if (numpy := sys.modules.get('numpy')) is not None:
            numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # the same on every rank, so that models built from scratch are equal
        self._prepared: dict[int, tuple[nn.Module, nn.Module]] = {}  # (user's, prepared) by the id of either module
        self._pairs: dict[int, Trained] = {}  # by the id of the user's and of the prepared optimizer
        self._keep: list[Any] = []  # keeps alive the objects with the ids above
        self._offloaded_models: dict[int, AbstractContextManager[None]] = {}  # by id of the user's module
        self._narrow = copies.NarrowWeights(self.numerics.dtype, self.autocast)
        self._kept_copy = copies.KeptCopy()

    # ------------------------------------------------------------------ models

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Returns the context in which to build modules. A sharded strategy may put them on the meta device."""
        return nullcontext()

    def make_optimizer(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """Returns an AdamW that this strategy can train with. It is fused on CUDA, which saves a temporary as large as
        the weights, but not in an exact run, nor on a CPU, where the fused kernel rounds differently."""
        fused = True if self._fuses and self.device.type == 'cuda' and not self.sums.exact else None
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def prepare(self, *items: Any) -> Any:
        """Prepares models and optimizers and returns them in the same order and nesting, a single item bare.

        A (model, optimizer) pair is trained. A bare module is frozen, put in eval mode and moved to the device. None
        and callables that are not modules (a reward function, a pipeline) are returned unchanged, as are numbers in
        (weight, reward) pairs. A module given twice is prepared once, and trained if any pair holds it.
        """
        pairs: list[tuple[nn.Module, Optimizer]] = []
        check_items(items, pairs)
        for model, optimizer in pairs:
            self._prepare_pair(model, optimizer)
        prepared = tuple(self._prepare_item(item) for item in items)
        return prepared[0] if len(prepared) == 1 else prepared

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the module that the user built."""
        return self._prepared[id(model)][0] if id(model) in self._prepared else model

    @contextmanager
    def full_model(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        whole: bool = False,
        read_only: bool = False,
        folded: bool = True,
        on_disk: str | os.PathLike[str] | None = None,
    ) -> Iterator[nn.Module]:
        """Yields the unwrapped module with full weights, LoRA merged, in eval mode, to generate or save. Collective.

        In fp32 it is the module itself, and its exact bits are restored on exit. In 16 bits it is a copy, freed on exit
        unless `keep_copy` keeps it.

        Args:
            dtype: dtype of the weights; None means `numerics.full_dtype`.
            whole: yield all weights also under tensor parallelism, instead of this process's part of them.
            read_only: nothing is computed with the module, so weights too large for the device may stay in host memory.
            folded: False yields the module itself, LoRA unmerged; ValueError from strategies that shard weights.
            on_disk: folder in which a sharded strategy keeps the whole weights, not in memory, to save them on rank 0.
        """
        from chatgpt.nn.trunk import in_eval_mode

        module, dtype = self.unwrap(model), dtype or self.numerics.full_dtype
        if dtype is torch.float32 or not folded:
            wide, merged = (self._narrow.widened, copies.lora_merged) if folded else (nullcontext, nullcontext)
            with in_eval_mode(module), wide(module), merged(module):
                yield module
            return
        with self._kept_copy.reused(module, dtype) as kept:
            kept.copied = copies.cast_copy(module, dtype, kept.copied).eval()
            yield kept.copied

    def keep_copy(self, user: Any, keep: bool) -> None:
        """Keeps the copy that `full_model` makes in 16 bits for `user`, or releases it; it is freed without users."""
        self._kept_copy.keep(user, keep)

    @classmethod
    def memory_model(cls, **options: Any) -> MemoryModel:
        """Returns the memory model of a strategy built with these options, for `chatgpt.plan`."""
        return MemoryModel(**of_numerics(options))

    def offload(self, model: nn.Module) -> None:
        """Keeps a frozen model's weights in host memory outside of `onload`. Does nothing on a CPU.

        Raises:
            ValueError: if this strategy places frozen weights itself, other models share them, or they are trained.
        """
        module = self.unwrap(model)
        if any(pair.user_model is module for pair in self._pairs.values()):
            raise ValueError('offload: this model is trained, and only frozen weights can wait in host memory')
        states.refuse_shared(module, 'offload moves weights to host memory')
        if id(module) not in self._offloaded_models and (offloaded := self._offloaded(module)) is not None:
            self._offloaded_models[id(module)] = offloaded

    def onload(self, model: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which a model given to `offload` is on the device; empty for other models."""
        return self._offloaded_models.get(id(self.unwrap(model)), nullcontext())

    # ------------------------------------------------------------------ one optimizer step

    def autocast(self, *, scoring: bool = False) -> AbstractContextManager[Any]:
        """Returns the context for forward and loss, which computes in `numerics.dtype`.

        Args:
            scoring: True for results that are not compared with results of learning (scores, values, evaluation), which
                a CPU that emulates 16 bits may compute in fp32.
        """
        if self.numerics.precision == 'fp32' or (scoring and self.numerics.emulated and self._keeps_narrow):
            return nullcontext()
        return self._cast()

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Returns the context for forward and backward of one micro-batch. `last` is True for the one before
        `optimizer_step`, and in an exact run for the last one of each of `sums.rounds`."""
        return self._round(model) if last and self.sums.exact else nullcontext()

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        """Adds this rank's share of the gradient. `loss` is a share of a sum: divided by the number of tokens or
        sequences of all ranks."""
        pair = self._pair(optimizer)
        pair.ran_backward = True
        with self._products():
            (loss if pair.scaler is None else loss * pair.scaler.scale).backward()

    def optimizer_step(self, optimizer: Optimizer, max_norm: float | None = None) -> float:
        """Clips, steps, clears the gradients and returns the global gradient norm before clipping.

        A non-finite norm leaves weights and optimizer state unchanged; gradients are cleared.
        """
        check_max_norm(max_norm)
        pair = self._pair(optimizer)
        if pair.tree is not None:
            pair.tree.set_gradients(pair.parameters())
        self._reduce_gradients(pair)
        parameters = [p for p in pair.parameters() if p.grad is not None]
        if pair.scaler is not None:
            pair.scaler.unscale([p.grad for p in parameters if p.grad is not None])
        norm = self._gradient_norm(parameters)
        finite = math.isfinite(norm)
        if finite:
            if max_norm is not None:
                self._scale_gradients(parameters, min(1.0, max_norm / (norm + 1e-6)))
            self._step(pair.optimizer)
            self._narrow.store(pair.user_model)
        if pair.scaler is not None:
            pair.scaler.update(finite)
        self.discard_gradients(optimizer)
        return norm

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Clears what was accumulated since the last step in every parameter of the model."""
        pair = self._pair(optimizer)
        pair.ran_backward = False
        if pair.tree is not None:
            pair.tree.clear()
        pair.optimizer.zero_grad(set_to_none=True)
        for parameter in pair.user_model.parameters():
            parameter.grad = self._narrow.exact(parameter).grad = None

    # ------------------------------------------------------------------ weights and optimizer states in files

    def save_model(self, model: nn.Module, path: str | os.PathLike[str], only_rank0: bool = True) -> None:
        """Writes the full fp32 state dict to one file, .safetensors or one that torch reads with `weights_only=True`.

        `only_rank0=False` writes a folder in parallel under a sharded strategy, and the same file under others.
        """
        if self.abilities.sharded and not only_rank0:
            self._save_folder(path, {'': self.model_pieces(model)}, {'kind': 'model'})
            return
        tensors = self.full_state_dict(model, Path(path).parent)
        self.run_on_rank0(lambda: save_tensors(tensors, path))

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Loads what `save_model` wrote (file or folder, any strategy), before or after `prepare`. Unpickles nothing.

        Also reads a file of an actor's bare `model`, such as a transformers state dict. `strict=False` loads the
        tensors that are in both and warns with the names of the others.

        Raises:
            CheckpointMismatch: with the first missing, unexpected and wrongly shaped tensors; with `strict=False` only
                for wrong shapes, or if no tensor is in both.
        """
        reader, _ = open_saved(path, 'model')
        own, found = set(self.unwrap(model).state_dict(keep_vars=True)), reader.names()
        if own.isdisjoint(found) and any(f'model.{name}' in own for name in found):
            reader = RenamedReader(reader, {f'model.{name}': name for name in found})
        self.load_model_pieces(model, reader, strict=strict)

    def save_optimizer(self, optimizer: Optimizer, path: str | os.PathLike[str], only_rank0: bool = False) -> None:
        """Writes hyperparameters, and states by parameter name, to one file, or under a sharded strategy to a folder in
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
        """Loads what `save_optimizer` wrote under any strategy, into an optimizer that was prepared with its model."""
        self._pair(optimizer)
        reader, meta = open_saved(path, 'optimizer')
        self.load_optimizer_state(optimizer, meta, reader)

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        """Returns whole tensors by name, floating ones in fp32; empty except on rank 0. Tied tensors share storage.

        A sharded strategy keeps them in an unnamed memory-mapped file in `folder` instead of in memory.
        """
        if not self.is_rank_0:
            return {}
        tensors, aliases = states.named_tensors(self.unwrap(model))
        exact = {n: self._narrow.exact(t).detach() for n, t in tensors.items()}
        full = {n: (t.float() if t.is_floating_point() else t).cpu() for n, t in exact.items()}
        return full | {alias: full[name] for alias, name in aliases.items()}

    # ------------------------------------------------------------------ pieces for training checkpoints

    def model_pieces(self, model: nn.Module) -> Iterable[Piece]:
        """Returns the pieces of weights and persistent buffers that this rank writes, each on one rank only.

        Names are those of the user's module; tied tensors are written once. Exhaust it on every rank (collective).
        """
        tensors, _ = states.named_tensors(self.unwrap(model))
        kept = self._narrow.ids(self.unwrap(model))
        exact = {name: self._narrow.exact(tensor) for name, tensor in tensors.items()}
        return self._own_pieces(exact, {name for name, tensor in tensors.items() if id(tensor) in kept})

    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        """Fills weights and buffers in place from pieces of any layout."""
        module = self.unwrap(model)
        learns = any(pair.user_model is module for pair in self._pairs.values())
        with self._narrow.widened(module, changes=True, learns=learns):
            tensors, aliases = states.named_tensors(module)
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for name, stored in states.match_names(shapes, aliases, reader, strict=strict).items():
                states.copy_from(reader, stored, tensors[name])
        self._narrow.store(module)

    def optimizer_state(self, optimizer: Optimizer) -> tuple[dict[str, Any], Iterable[Piece]]:
        """Returns JSON (hyperparameters of the groups, loss scale), and the pieces '<parameter>/<slot>' that this rank
        writes; numbers are tensors of shape ()."""
        pair = self._pair(optimizer)
        meta: dict[str, Any] = {'groups': states.groups_to_json(pair.optimizer, pair.names)}
        if pair.scaler is not None:
            meta['scaler'] = pair.scaler.to_json()
        return meta, self._optimizer_pieces(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, meta: Mapping[str, Any], reader: TensorReader) -> None:
        """Replaces hyperparameters, loss scale and states by those of `optimizer_state` in any layout. Groups are
        matched by the names of their parameters; slots of a parameter's size must have its shape."""
        pair = self._pair(optimizer)
        states.groups_from_json(pair.optimizer, pair.names, meta['groups'])
        if pair.scaler is not None and 'scaler' in meta:
            pair.scaler.from_json(meta['scaler'])
        self._load_optimizer_pieces(optimizer, reader)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Releases prepared models and leaves the process group, if the strategy joined one."""
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

    # ------------------------------------------------------------------ for subclasses to override

    def _setup_pair(
        self, model: nn.Module, optimizer: Optimizer, names: list[list[str]]
    ) -> tuple[nn.Module, Optimizer]:
        """Prepares a trained pair: `_setup_model`, `_setup_optimizer`. `names` are the parameter names by group."""
        if id(model) in self._prepared:
            model = self._prepared[id(model)][1]
        else:
            model = self._setup_model(model, trained=True)
        return model, self._setup_optimizer(optimizer, model, names)

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        """Moves (shards, wraps) a module. Here it is moved in place, so that optimizers keep its parameters."""
        return model.to(self.device)

    def _setup_optimizer(self, optimizer: Optimizer, model: nn.Module, names: list[list[str]]) -> Optimizer:
        """Adapts an optimizer to the prepared model. Here its state is moved to the device of its parameters."""
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[slot] = value.to(parameter.device)
        return optimizer

    def _offloaded(self, module: nn.Module) -> AbstractContextManager[None] | None:
        """Returns the object that moves a frozen module to host memory and back; None on a CPU. ValueError if the
        module cannot be moved."""
        return None if self.device.type == 'cpu' else copies.OffloadedWeights(module, self.device)

    def _end_round(self, pair: Trained) -> None:
        """In an exact run, adds the gradients since the last round as one leaf of the tree of sums."""
        if pair.tree is not None:
            pair.tree.add_gradients(pair.parameters())

    def _reduce_gradients(self, pair: Trained) -> None:
        """Sums every gradient over ranks, unless `backward` has done so."""

    def _gradient_norm(self, parameters: list[Tensor]) -> float:
        """Returns the L2 norm of all gradients together, over all ranks."""
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        if self.sums.exact:
            return exact_norm(gradients, self.device)
        if not gradients:
            return 0.0
        norms = torch._foreach_norm(gradients)
        return float(torch.linalg.vector_norm(torch.stack([n.double().to(norms[0].device) for n in norms])))

    def _scale_gradients(self, parameters: list[Tensor], factor: float) -> None:
        """Multiplies all gradients by `factor`, in place."""
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def _optimizer_pieces(self, optimizer: Optimizer) -> Iterable[Piece]:
        """See `optimizer_state`."""
        pair = self._pair(optimizer)
        return self._own_pieces(states.slots_of(pair.optimizer, pair.named_parameters()))

    def _load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        """See `load_optimizer_state`."""
        pair = self._pair(optimizer)
        states.load_slots(pair.optimizer, dict(pair.named_parameters()), reader)

    # ------------------------------------------------------------------ internals

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
            model = self._setup_model(item, trained=False).eval()
            self._prepared[id(item)] = self._prepared[id(model)] = (item, model)
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
        if self._stores_narrow:
            self._narrow.give_masters(user_model, optimizer)
        self._prepared[id(user_model)] = self._prepared[id(model)] = (user_model, model)
        scaler = LossScaler() if self.numerics.scales_loss else None
        pair = Trained(user_model, model, optimizer, names, scaler, self.sums.tree())
        self._pairs[id(user_optimizer)] = self._pairs[id(optimizer)] = pair
        self._keep += [user_optimizer, optimizer]

    def _keep_narrow(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Converts frozen weights to the compute dtype, before the model is moved to the device."""
        if self._keeps_narrow:
            self._narrow.keep(module, self._narrowable(module, optimizer))

    def _narrowable(self, module: nn.Module, optimizer: Optimizer | None) -> list[nn.Parameter]:
        """Returns the frozen weights that may be stored in the compute dtype. In a trained model (LoRA, hydra) these
        are only those that this does not round, as of a bf16 folder, so that what is saved is exact."""
        numerics = self.numerics
        if numerics.precision == 'fp32' or numerics.emulated or self.sums.exact:
            return []
        owned = {id(p) for group in optimizer.param_groups for p in group['params']} if optimizer is not None else set()
        from chatgpt.nn import lora

        elsewhere = {id(p) for pair in self._pairs.values() for p in pair.user_model.parameters()}
        weights = copies.stored_weights(module) if self._stores_narrow and optimizer is None else []
        if not weights or any(id(p) in elsewhere for p in weights):  # norms take states of their own dtype only
            weights = copies.matmul_weights(module)
        frozen = [p for p in weights if not p.requires_grad and id(p) not in owned | elsewhere]
        if optimizer is not None or lora.has_lora(module):  # what is folded or saved must be exact
            lossless = self.broadcast_object(copies.fits(module, frozen, numerics.dtype))
            frozen = [p for p, same in zip(frozen, lossless, strict=True) if same]
        return frozen

    @property
    def _stores_narrow(self) -> bool:
        """True if weights are stored in bf16, those that learn with fp32 masters. In fp16, states between blocks could
        overflow, and an exact run learns from fp32 weights."""
        numerics = self.numerics
        return numerics.precision == 'bf16' and self._keeps_narrow and not numerics.emulated and not self.sums.exact

    def _pair(self, optimizer: Optimizer) -> Trained:
        """Returns the pair of an optimizer; ValueError before `prepare`."""
        if id(optimizer) not in self._pairs:
            raise ValueError(
                f'this {type(optimizer).__name__} was not prepared, so its model is unknown; '
                'call strategy.prepare((model, optimizer)) first'
            )
        return self._pairs[id(optimizer)]

    @contextmanager
    def _cast(self) -> Iterator[None]:
        # With its cache, autocast would sum the gradients of a weight that is used twice in 16 bits.
        cast = torch.autocast(self.device.type, dtype=self.numerics.dtype, cache_enabled=not self.sums.exact)
        with cast, self._products():
            yield

    def _products(self) -> AbstractContextManager[Any]:
        """Returns the context for matrix products of forward and backward: in fp32 where 16 bits are emulated; in a
        bf16 run on CUDA, fp32 products may use TF32."""
        if self.numerics.emulated:
            return WideProducts()
        return tf32() if self._uses_tf32 else nullcontext()

    @contextmanager
    def _round(self, model: nn.Module) -> Iterator[None]:
        yield
        module = self.unwrap(model)
        for pair in {id(pair): pair for pair in self._pairs.values()}.values():
            if pair.user_model is module and pair.ran_backward:
                pair.ran_backward = False
                self._end_round(pair)

    def _save_folder(
        self, path: str | os.PathLike[str], groups: Mapping[str, Iterable[Piece]], meta: dict[str, Any]
    ) -> None:
        from chatgpt.strategies.checkpoint.writer import write_checkpoint

        gather = self.processes.all_gather_object
        write_checkpoint(path, groups, meta=meta, rank=self.processes.rank, all_gather_object=gather)

    def _own_pieces(self, tensors: Mapping[str, Tensor], in_fp32: Container[str] = ()) -> Iterator[Piece]:
        """Yields this rank's share of replicated tensors, on its first process, so that all ranks write at once."""
        owner = states.assign_owners({n: t.numel() * t.element_size() for n, t in tensors.items()}, self.world_size)
        return (
            Piece.whole(name, tensor.detach().float() if name in in_fp32 else tensor)
            for name, tensor in tensors.items()
            if owner[name] == self.rank and self.ranks.leads and tensor.numel()
        )
