"""`Strategy`: everything that depends on how many processes there are and where weights live.

Where this process stands and how it talks to the others is an object, `strategy.ranks`. Every body here works as it is
for models that are whole on each rank; a sharded strategy overrides what sharding changes: `setup_model`,
`setup_optimizer`, `backward` or `reduce_gradients`, `gradient_norm`, `full_model`, `full_state_dict`, the pieces, and
`memory_model` for the planner. Left out: what is computed with all this (trainers), and bytes on disk
(`chatgpt.checkpoint`).
"""

from __future__ import annotations

import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import Exact
from chatgpt.checkpoint.files import save_object, save_tensors
from chatgpt.checkpoint.layout import Piece, PrefixedReader, TensorReader
from chatgpt.trainer.strategies import states
from chatgpt.trainer.strategies.deterministic import Deterministic
from chatgpt.trainer.strategies.exact import Reproducible, TreeSum, align, check_elementwise, exact_norm, exact_of
from chatgpt.trainer.strategies.items import check_items, is_pair, rebuilt
from chatgpt.trainer.strategies.memory import MemoryModel, atoms_of
from chatgpt.trainer.strategies.offload import Offloaded, OffloadedWeights
from chatgpt.trainer.strategies.pairs import Trained, open_saved
from chatgpt.trainer.strategies.precision import (
    DTYPES,
    KeptCopy,
    LossScaler,
    Precision,
    WideProducts,
    cast_copy,
    emulates,
    lora_merged,
    narrow,
    product_weights,
    resolve_precision,
    tf32,
)
from chatgpt.trainer.strategies.ranks import Ranks

T = TypeVar('T')


class Strategy:
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
    """

    sharded: ClassVar[bool] = False
    """True: no rank holds whole weights or optimizer states"""
    supports_accumulation: bool = True
    """False: one micro-batch per optimizer step, `accumulate(last=False)` is a ValueError"""
    supports_unused: bool = True
    """False: every trained parameter must get a gradient in every step"""
    weights_in_place: ClassVar[bool] = True
    """False: what a trainer writes into a prepared module's parameters does not last, because masters elsewhere replace
    it"""

    ranks_below: bool = False
    """with `exact`: gradients are summed over ranks after every atom, and not once per step"""

    exact: Exact | None = None
    """how batches are cut and numbers added up where they are the same to the bit in every layout"""
    ranks: Ranks
    """where this process stands among the others, and how it talks to them"""
    precision: Precision
    """what is computed in: 'fp32', 'bf16' or 'fp16', also where 'auto' was asked for"""
    keeps_narrow: ClassVar[bool] = True
    """computes under autocast from whole weights in fp32, so what nothing trains can be kept in the compute dtype"""
    only_16_bits: bool = False
    """it has no fp32, so 'auto' is bf16 on any device"""
    fuses: ClassVar[bool] = True
    """`make_optimizer` makes torch's fused AdamW on CUDA"""
    options: Mapping[str, Any] = MappingProxyType({})
    """what this was built with and `memory_model` asks for"""

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        ranks: Ranks | None = None,
        deterministic: bool = False,
        reproducible: Reproducible = None,
        atoms: int = 8,
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
        self.ranks = ranks
        self.seed, self.precision = seed, resolve_precision(precision, ranks.device, only_16_bits=self.only_16_bits)
        self._dtype = DTYPES[self.precision]
        self.exact = exact_of(reproducible, atoms, ranks.world_size, ranks_below=self.ranks_below)
        if self.exact is not None:
            self.options = {**self.options, 'reproducible': reproducible, 'atoms': atoms}
        self._deterministic = Deterministic() if deterministic or self.exact is not None else None
        self._emulates = emulates(ranks.device, self._dtype) and self.exact is None
        if self._emulates and ranks.rank == 0:
            of_it = (
                'all but generation imitates in fp32, slower than fp32 itself, which this strategy has not: take '
                "another with precision='fp32'"
                if self.only_16_bits
                else 'learning imitates in fp32, slower than fp32 itself; generation, scores and values are in fp32. '
                "Give precision='fp32'"
            )
            without = 'this CPU has no instructions for matrix products of 16 bits, which'
            warnings.warn(f'precision={self.precision!r}: {without} {of_it}', stacklevel=2)
        bf16_on_cuda = ranks.device.type == 'cuda' and self._dtype is torch.bfloat16
        self._uses_tf32 = bf16_on_cuda and self._deterministic is None
        self.keeps_copy_for: WeakSet[Any] = WeakSet()
        """who generates from the copy of `full_model` again, so that it is kept in its memory until the next time"""
        self._kept_copy: KeptCopy | None = None
        self.whole_copies = False
        """`full_model` gives all weights also where a few processes could compute with parts of them: for an engine
        that has a model of its own"""
        self.only_reads = False
        """that engine reads them once and computes nothing here: what is too large for the device is in host memory"""
        random.seed(seed)
        if (numpy := sys.modules.get('numpy')) is not None:
            numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # the same on every rank, so that models built from scratch are equal
        self._prepared: dict[int, tuple[nn.Module, nn.Module]] = {}
        """id of the user's and of the prepared module -> (user's, prepared)"""
        self._trained: dict[int, Trained] = {}
        """id of the user's and of the prepared optimizer -> its pair"""
        self._keep: list[Any] = []  # objects whose ids are keys above must not be freed
        self._offloaded: dict[int, Offloaded] = {}
        """by id of the user's module"""
        self._narrow: dict[int, list[nn.Parameter]] = {}
        """by id of the user's module: what is kept in the compute dtype"""
        self._wide: set[int] = set()
        """ids of modules whose narrow weights are in fp32 at the moment"""
        self._hooks: list[Any] = []
        """handles of what narrow models need at a forward"""

    # ------------------------------------------------------------------ processes: what `ranks` says

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def local_rank(self) -> int:
        return self.ranks.local_rank

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def is_rank_0(self) -> bool:
        return self.ranks.is_rank_0

    @property
    def processes(self) -> Ranks:
        """Like `ranks`, but each process counts: see `Ranks`."""
        return self.ranks.processes

    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        return self.ranks.all_reduce(tensor, op)

    def all_gather_object(self, obj: T) -> list[T]:
        return self.ranks.all_gather_object(obj)

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return self.ranks.broadcast_object(obj, src)

    def barrier(self) -> None:
        self.ranks.barrier()

    def run_on_rank0(self, fn: Callable[[], T]) -> T:
        return self.ranks.run_on_rank0(fn)

    def note_progress(self, where: str) -> None:
        self.ranks.note_progress(where)

    def failure_guard(self) -> AbstractContextManager[None]:
        return self.ranks.failure_guard()

    def fails_together(self, state: str) -> bool:
        return self.ranks.fails_together(state)

    # ------------------------------------------------------------------ compute dtype

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype. Parameters stay fp32."""
        return self._dtype

    @property
    def full_dtype(self) -> torch.dtype:
        """That of `full_model`: the compute dtype, but fp32 with `exact`. In 16 bits nearly every draw would be so near
        to an edge that it had to be drawn again (`chatgpt.rollout.exact`). fp32 too on a CPU that emulates 16 bits."""
        return torch.float32 if self.exact is not None or self._emulates else self._dtype

    @property
    def uses_loss_scaling(self) -> bool:
        """fp16: an infinite norm means a skipped step and a smaller loss scale, not a failure."""
        return self._dtype is torch.float16

    # ------------------------------------------------------------------ memory

    @classmethod
    def memory_model(cls, **options: Any) -> MemoryModel:
        """What a strategy that is built with these options keeps, for `chatgpt.plan`. Here: whole copies on each
        rank."""
        return MemoryModel(atoms=atoms_of(options))

    def offload(self, model: nn.Module) -> None:
        """From now on a frozen model's weights wait in host memory, and are on the device inside `onload`. On a CPU
        nothing moves.

        Raises:
            ValueError: this strategy places frozen weights itself, or other models use the same weights.
        """
        module = self.unwrap(model)
        states.refuse_shared(module, 'offload moves weights to host memory')
        if id(module) not in self._offloaded and (offloaded := self.offloaded(module)) is not None:
            self._offloaded[id(module)] = offloaded

    def onload(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, a model given to `offload` is on the device; nothing for any other."""
        return self._offloaded.get(id(self.unwrap(model)), nullcontext())

    def offloaded(self, module: nn.Module) -> Offloaded | None:
        """What moves a frozen module, None on a CPU; ValueError where it cannot be moved."""
        return None if self.device.type == 'cpu' else OffloadedWeights(module, self.device)

    # ------------------------------------------------------------------ models

    def make_optimizer(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """An AdamW that this strategy can train with (some bring their own). On CUDA torch's fused one, which needs no
        temporary as large as the weights; not with `exact`, and on a CPU, where it would round otherwise."""
        fused = True if self.fuses and self.device.type == 'cuda' and self.exact is None else None
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Where modules are built. A sharded strategy may put them on the meta device here."""
        return nullcontext()

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

    def _prepare_item(self, item: Any) -> Any:
        if is_pair(item):
            pair = self.trained(item[1])
            return rebuilt(item, [pair.model, pair.optimizer])
        if isinstance(item, (tuple, list)):
            return rebuilt(item, [self._prepare_item(part) for part in item])
        if not isinstance(item, nn.Module):
            return item
        if id(item) not in self._prepared:
            item.requires_grad_(False)
            if self.exact is not None:
                align(item)
            self._keep_narrow(item)
            self._remember(item, self.setup_model(item, trained=False).eval())
        return self._prepared[id(item)][1]

    def _prepare_pair(self, model: nn.Module, optimizer: Optimizer) -> None:
        if id(optimizer) in self._trained:
            if self._trained[id(optimizer)].user_model is not self.unwrap(model):
                raise ValueError('prepare: this optimizer is already paired with another model')
            return
        names = states.parameter_names(self.unwrap(model), optimizer)
        user_model, user_optimizer = self.unwrap(model), optimizer
        if self.exact is not None and id(model) not in self._prepared:
            align(model)
        if id(model) not in self._prepared:
            self._keep_narrow(model, optimizer)
        model, optimizer = self.setup_pair(model, optimizer, names)
        if self.exact is not None:
            check_elementwise(optimizer)
        self._remember(user_model, model)
        scaler, tree = LossScaler() if self.uses_loss_scaling else None, TreeSum() if self.exact is not None else None
        pair = Trained(user_model, model, optimizer, names, scaler, tree)
        self._trained[id(user_optimizer)] = self._trained[id(optimizer)] = pair
        self._keep += [user_optimizer, optimizer]

    def _keep_narrow(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        """From now on, what nothing trains is in the compute dtype where that changes no bit of a result: weights that
        autocast rounds at each use. In a model that learns (under LoRA, hydra) only weights that are numbers of that
        dtype anyway, as of a folder in bf16, so that what is saved is exact. Before the model goes to the device."""
        if self._dtype is torch.float32 or not self.keeps_narrow or self.exact is not None or self._emulates:
            return
        owned = {id(p) for group in optimizer.param_groups for p in group['params']} if optimizer is not None else set()
        from chatgpt.nn import lora

        elsewhere = {id(p) for pair in self._trained.values() for p in pair.user_model.parameters()}
        frozen = [p for p in product_weights(module) if not p.requires_grad and id(p) not in owned | elsewhere]
        if optimizer is not None or lora.has_lora(module):  # what is folded or saved is exact
            lossless = self.broadcast_object([torch.equal(p.to(self._dtype).to(p.dtype), p) for p in frozen])
            frozen = [p for p, same in zip(frozen, lossless, strict=True) if same]
        kept = narrow(frozen, self._dtype)
        if kept and id(module) not in self._narrow:
            self._narrow[id(module)] = kept
            self._autocast_forwards(module)

    def _autocast_forwards(self, module: nn.Module) -> None:
        """A forward outside of `autocast`, where weights and states of two dtypes cannot be multiplied, enters it: the
        module's own, and those of transformers' models in it, which a user calls too (`actor.model.generate`)."""
        from transformers import PreTrainedModel

        entered: list[AbstractContextManager[Any]] = []

        def enter(*_: Any) -> None:
            entered.append(nullcontext() if id(module) in self._wide else self.autocast())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        for part in module.modules():
            if part is module or isinstance(part, PreTrainedModel):
                self._hooks.append(part.register_forward_pre_hook(enter))
                self._hooks.append(part.register_forward_hook(leave, always_call=True))

    @contextmanager
    def _widened(self, model: nn.Module, *, changes: bool = False) -> Iterator[None]:
        """Inside, what is kept in 16 bits is in fp32. It comes back after; with `changes`, from the values then, and of
        a model that learns only where they are numbers of 16 bits."""
        module = self.unwrap(model)
        learns = any(pair.user_model is module for pair in self._trained.values())
        kept = [(p, p.data) for p in self._narrow.get(id(module), [])]
        for parameter, data in kept:
            parameter.data = data.float()
        self._wide.add(id(module))
        try:
            yield
        finally:
            self._wide.discard(id(module))
            for parameter, data in kept:
                if changes:
                    before = parameter.data
                    data.copy_(before)
                    if learns and not torch.equal(data.float(), before):
                        self._narrow[id(module)] = [p for p in self._narrow[id(module)] if p is not parameter]
                        continue
                parameter.data = data

    def _remember(self, user_model: nn.Module, model: nn.Module) -> None:
        self._prepared[id(user_model)] = self._prepared[id(model)] = (user_model, model)

    def setup_pair(self, model: nn.Module, optimizer: Optimizer, names: list[list[str]]) -> tuple[nn.Module, Optimizer]:
        """Make a trained pair ready: `setup_model`, then `setup_optimizer`. `names` are the parameter names of each
        group."""
        if id(model) in self._prepared:
            model = self._prepared[id(model)][1]
        else:
            model = self.setup_model(model, trained=True)
        return model, self.setup_optimizer(optimizer, model, names)

    def setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        """Move (shard, wrap) one module. Here: moved in place, so that optimizers keep pointing at its parameters."""
        return model.to(self.device)

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module, names: list[list[str]]) -> Optimizer:
        """Make an optimizer fit the prepared model. Here: state it already has follows its parameters to their
        device."""
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[slot] = value.to(parameter.device)
        return optimizer

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module the user built."""
        return self._prepared[id(model)][0] if id(model) in self._prepared else model

    def trained(self, optimizer: Optimizer) -> Trained:
        """The pair an optimizer belongs to; ValueError before `prepare`."""
        if id(optimizer) not in self._trained:
            raise ValueError(
                f'this {type(optimizer).__name__} was not prepared, so its model is unknown; '
                'call strategy.prepare((model, optimizer)) first'
            )
        return self._trained[id(optimizer)]

    @contextmanager
    def full_model(
        self, model: nn.Module, dtype: torch.dtype | None = None, *, on_disk: str | os.PathLike[str] | None = None
    ) -> Iterator[nn.Module]:
        """The unwrapped module with full weights, LoRA merged, in eval mode: for generation, and for writing it as a
        whole.

        `dtype=None` means `full_dtype`. In fp32 it is the very module, whose exact bits are restored after. In 16
        bits it is a copy that is freed after. `on_disk` names a folder in which a sharded strategy keeps the whole
        weights of its copy, so that no rank holds them in memory: such a copy is for writing, on rank 0.
        """
        module, dtype = self.unwrap(model), dtype or self.full_dtype
        if dtype is torch.float32:
            from chatgpt.nn.dropout import in_eval_mode

            with in_eval_mode(module), self._widened(module), lora_merged(module):
                yield module
            return
        with self.kept_copy(module, dtype) as kept:
            kept.copied = cast_copy(module, dtype, kept.copied).eval()
            yield kept.copied

    @contextmanager
    def kept_copy(self, module: nn.Module, dtype: torch.dtype) -> Iterator[Any]:
        """Inside, `copied` of what it gives is the copy of this module that was kept, or None; what stands there at the
        end is kept where somebody asked with `keep_copy`. For `full_model`."""
        kept, self._kept_copy = self._kept_copy, None  # a copy that is in use is nobody else's
        given = SimpleNamespace(copied=kept.copied if kept is not None and kept.fits(module, dtype) else None)
        kept = None
        yield given
        if self.keeps_copy_for and given.copied is not None:
            self._kept_copy = KeptCopy(module, dtype, given.copied)

    def keep_copy(self, user: Any, keep: bool) -> None:
        """Keep the copy that `full_model` makes in 16 bits for `user`, or no longer; without users it is freed."""
        if keep:
            self.keeps_copy_for.add(user)
        else:
            self.keeps_copy_for.discard(user)
        if not self.keeps_copy_for:
            self._kept_copy = None

    # ------------------------------------------------------------------ one optimizer step

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward and loss: computes in `dtype`."""
        if self._dtype is torch.float32:
            return nullcontext()
        return self._autocast()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        # A cast weight that is used again would add its gradients up in 16 bits, where it is not a gathered one.
        cast = torch.autocast(self.device.type, dtype=self._dtype, cache_enabled=self.exact is None)
        with cast, self._products():
            yield

    def _products(self) -> AbstractContextManager[Any]:
        """Around a forward and its backward: how matrices are multiplied, where torch would do it otherwise. In bf16 on
        CUDA what stays fp32 may use TF32."""
        if self._emulates:
            return WideProducts()
        return tf32() if self._uses_tf32 else nullcontext()

    def scoring(self) -> AbstractContextManager[Any]:
        """Around forwards whose numbers are compared with none of `autocast`'s: scores, values, evaluation. The same as
        that, but fp32 on a CPU that has no instructions of 16 bits."""
        return nullcontext() if self._emulates and self.keeps_narrow else self.autocast()

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; `last` marks the one before `optimizer_step`."""
        return nullcontext()

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        """Add this rank's share of the gradient. `loss` is a share of a sum: already divided by what counts on all
        ranks."""
        scaler = self.trained(optimizer).scaler
        with self._products():
            (loss if scaler is None else loss * scaler.scale).backward()

    def end_atom(self, optimizer: Optimizer) -> None:
        """With `exact`, what `backward` has added up since the last call is one atom's gradient; otherwise nothing."""
        pair = self.trained(optimizer)
        if pair.tree is not None:
            parameters = [p for _, p in pair.named_parameters()]
            pair.tree.add([p.grad for p in parameters])
            for parameter in parameters:
                parameter.grad = None

    def optimizer_step(self, optimizer: Optimizer, max_norm: float | None = None) -> float:
        """Clip, step, clear the gradients; the global gradient norm before clipping.

        On a non-finite norm the weights and the optimizer's state stay as they are, and the gradients are cleared.
        """
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f'max_norm={max_norm} must be positive; None turns clipping off')
        pair = self.trained(optimizer)
        if pair.tree is not None and self.exact is not None:
            total = pair.tree.finish(self.exact.atoms // self.world_size)
            for (_, parameter), gradient in zip(pair.named_parameters(), total, strict=True):
                parameter.grad = gradient
        self.reduce_gradients(pair)
        parameters = [p for _, p in pair.named_parameters() if p.grad is not None]
        if pair.scaler is not None:
            pair.scaler.unscale([p.grad for p in parameters if p.grad is not None])
        norm = self.gradient_norm(parameters)
        finite = math.isfinite(norm)
        if finite:
            if max_norm is not None:
                self.scale_gradients(parameters, min(1.0, max_norm / (norm + 1e-6)))
            pair.optimizer.step()
        if pair.scaler is not None:
            pair.scaler.update(finite)
        self.discard_gradients(optimizer)
        return norm

    def reduce_gradients(self, pair: Trained) -> None:
        """Make every gradient the sum over ranks, where `backward` has not done so already."""
        return

    def gradient_norm(self, parameters: list[Tensor]) -> float:
        """L2 norm of all gradients together, over all ranks."""
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        if self.exact is not None:
            return exact_norm(gradients, self.device)
        if not gradients:
            return 0.0
        norms = torch._foreach_norm(gradients)
        return float(torch.linalg.vector_norm(torch.stack([n.double().to(norms[0].device) for n in norms])))

    def scale_gradients(self, parameters: list[Tensor], factor: float) -> None:
        """Multiply all gradients by `factor`, in place."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Forget what was accumulated since the last step, in every parameter of the model."""
        pair = self.trained(optimizer)
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
        if self.sharded and not only_rank0:
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
            reader = PrefixedReader(reader, 'model.')
        self.load_model_pieces(model, reader, strict=strict)

    def save_optimizer(self, optimizer: Optimizer, path: str | os.PathLike[str], only_rank0: bool = False) -> None:
        """States by parameter name and hyperparameters: one file, or under a sharded strategy a folder written in
        parallel."""
        meta = {'kind': 'optimizer', **self.optimizer_meta(optimizer)}
        if self.sharded:
            if only_rank0:
                raise ValueError(
                    f'{type(self).__name__} shards optimizer states, so no rank can write them alone; '
                    'use save_optimizer(..., only_rank0=False), which writes a folder at that path'
                )
            self._save_folder(path, {'': self.optimizer_pieces(optimizer)}, meta)
            return
        pair = self.trained(optimizer)

        def write() -> None:
            slots = states.slots_of(pair.optimizer, pair.named_parameters())
            save_object({'meta': meta, 'state': {name: tensor.detach().cpu() for name, tensor in slots.items()}}, path)

        self.run_on_rank0(write)

    def load_optimizer(self, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
        """Load what `save_optimizer` wrote under any strategy. The optimizer must have been prepared with its model."""
        self.trained(optimizer)
        reader, meta = open_saved(path, 'optimizer')
        self.load_optimizer_meta(optimizer, meta)
        self.load_optimizer_pieces(optimizer, reader)

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        """Whole tensors by name, floating ones in fp32; only rank 0's dict is used. Tied tensors share storage.

        A sharded strategy keeps them in a mapped file without a name in `folder`, not in memory.
        """
        if not self.is_rank_0:
            return {}
        tensors, aliases = states.named_tensors(self.unwrap(model))
        full = {n: (t.detach().float() if t.is_floating_point() else t.detach()).cpu() for n, t in tensors.items()}
        return full | {alias: full[name] for alias, name in aliases.items()}

    def _save_folder(
        self, path: str | os.PathLike[str], groups: Mapping[str, Iterable[Piece]], meta: dict[str, Any]
    ) -> None:
        from chatgpt.checkpoint.writer import write_checkpoint

        gather = self.processes.all_gather_object
        write_checkpoint(path, groups, meta=meta, rank=self.processes.rank, all_gather_object=gather)

    # ------------------------------------------------------------------ pieces for training checkpoints

    def model_pieces(self, model: nn.Module) -> Iterable[Piece]:
        """The pieces of weights and persistent buffers that this rank writes; over all ranks each tensor exactly once.

        Names are those of the module the user built; tied tensors come once. May be collective: every rank iterates to
        the end.
        """
        tensors, _ = states.named_tensors(self.unwrap(model))
        kept = {id(p) for p in self._narrow.get(id(self.unwrap(model)), [])}
        return self._dealt(tensors, {name for name, tensor in tensors.items() if id(tensor) in kept})

    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        """Fill weights and buffers in place from any layout's pieces."""
        with self._widened(model, changes=True):
            tensors, aliases = states.named_tensors(self.unwrap(model))
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for name, stored in states.match_names(shapes, aliases, reader, strict=strict).items():
                states.copy_from(reader, stored, tensors[name])

    def optimizer_pieces(self, optimizer: Optimizer) -> Iterable[Piece]:
        """The pieces '<parameter>/<slot>' of optimizer states that this rank writes; numbers are tensors of shape
        ()."""
        pair = self.trained(optimizer)
        return self._dealt(states.slots_of(pair.optimizer, pair.named_parameters()))

    def load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        """Replace the optimizer's states by the reader's. Slots of a parameter's size must have its shape."""
        pair = self.trained(optimizer)
        states.load_slots(pair.optimizer, dict(pair.named_parameters()), reader)

    def optimizer_meta(self, optimizer: Optimizer) -> dict[str, Any]:
        """JSON: hyperparameters of the groups, which slots each parameter has, the loss scale."""
        pair = self.trained(optimizer)
        meta: dict[str, Any] = {'groups': states.groups_to_json(pair.optimizer, pair.names)}
        return meta if pair.scaler is None else {**meta, 'scaler': pair.scaler.to_json()}

    def load_optimizer_meta(self, optimizer: Optimizer, meta: Mapping[str, Any]) -> None:
        """Take over hyperparameters and loss scale from `optimizer_meta`; groups are matched by their parameters'
        names."""
        pair = self.trained(optimizer)
        states.groups_from_json(pair.optimizer, pair.names, meta['groups'])
        if pair.scaler is not None and 'scaler' in meta:
            pair.scaler.from_json(meta['scaler'])

    def _dealt(self, tensors: Mapping[str, Tensor], in_fp32: Container[str] = ()) -> Iterator[Piece]:
        """This rank's share of replicated tensors, so that all ranks write at once; its first process writes them."""
        owner = states.deal({n: t.numel() * t.element_size() for n, t in tensors.items()}, self.world_size)
        return (
            states.whole(name, tensor.detach().float() if name in in_fp32 else tensor)
            for name, tensor in tensors.items()
            if owner[name] == self.rank and self.ranks.leads and tensor.numel()
        )

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Forget prepared models; leave what was joined."""
        self._prepared.clear()
        self._trained.clear()
        self._keep.clear()
        self._offloaded.clear()
        for hook in self._hooks:
            hook.remove()
        for parameter in (p for kept in self._narrow.values() for p in kept):
            parameter.data = parameter.data.float()
        self._hooks.clear()
        self._narrow.clear()
        self._kept_copy = None
        if self._deterministic is not None:
            self._deterministic.restore()
            self._deterministic = None
        self.ranks.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
