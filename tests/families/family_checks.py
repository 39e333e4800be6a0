"""Checks of a model type, each of which compares two computations of the same numbers.

A check returns an empty string or a remark, or raises. A ValueError of the library that names the model or its folder
is a refusal; any other error is a crash or a wrong number. `benchmarks/models.py` writes docs/results/model_types.md
from them.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from family_configs import BIG, VOCAB, family_config
from torch import Tensor
from transformers import AutoModelForCausalLM

import chatgpt
from chatgpt.batching import collate
from chatgpt.nn import AutoActor, AutoCritic, AutoRM, initial_tensors
from chatgpt.nn.lora import convert_to_lora, lora_layers, merged
from chatgpt.nn.packing import packs
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.trunk import base_model, dropout_off
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.types import Prompt, Sequence

LENGTHS = [(5, 6), (3, 7), (4, 2), (1, 3), (30, 10)]
"""lengths of prompt and response; the last exceeds the attention windows during generation"""


def sequences(seed: int = 1) -> list[Sequence]:
    g = torch.Generator().manual_seed(seed)
    return [
        Sequence(
            prompt_ids=torch.randint(3, VOCAB, (p,), generator=g),
            response_ids=torch.randint(3, VOCAB, (a,), generator=g),
            response_mask=torch.ones(a, dtype=torch.bool),
        )
        for p, a in LENGTHS
    ]


LIMIT_S = 300
LIBRARY = str(Path(chatgpt.__file__).parent)


class Wrong(AssertionError):
    """Raised for numbers that differ without an error of the library."""


class Refused(Exception):
    """Raised for a refusal by the library."""


class NotTried(Exception):
    """Raised if a requirement of the check is not available."""


@dataclass
class Family:
    """A model type: a folder with random weights, and the models loaded from it."""

    model_type: str
    folder: Path

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        config = family_config(self.model_type)
        with torch.device('meta'):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > BIG:
            raise Refused(f'no tiny config: {size} parameters')
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.plain  # noqa: B018  fails first if transformers cannot run the model
        self.model.save_pretrained(self.folder)

    @cached_property
    def actor(self) -> Any:
        return AutoActor(self.folder).eval()

    @cached_property
    @torch.no_grad()
    def plain(self) -> list[Tensor]:
        """Returns log-probs of each sequence alone, shape (A,), by transformers' forward of the saved model."""
        found = zip(sequences(), plain_logits(self.model), strict=True)
        return [torch.log_softmax(of, -1).gather(1, s.response_ids[:, None]).squeeze(1) for s, of in found]


def plain_logits(model: Any) -> list[Tensor]:
    """Returns the logits of each sequence alone, shape (A, V), by the model's forward."""
    return [
        model(input_ids=torch.cat([s.prompt_ids, s.response_ids])[None]).logits[0, len(s.prompt_ids) - 1 : -1].float()
        for s in sequences()
    ]


def same(got: Tensor, want: Tensor, tolerance: float = 1e-3) -> None:
    if got.shape != want.shape:
        raise Wrong(f'shape {tuple(got.shape)} for {tuple(want.shape)}')
    off = float((got - want).abs().max()) if got.numel() else 0.0
    if not off <= tolerance:
        raise Wrong(f'off by {off:.2g}')


@torch.no_grad()
def forward(family: Family) -> str:
    """The actor's log-probs in a batch of several lengths equal those of transformers for each sequence alone."""
    same(family.actor(collate(sequences())).logprobs, torch.cat(family.plain))
    return 'packed' if packs(base_model(family.actor.model)) else 'padded'


@torch.no_grad()
def meta(family: Family) -> str:
    """A model built on the meta device, as under FSDP, gets the same weights later."""
    with torch.device('meta'):
        later = AutoActor(family.folder)
    got, checked = dict(initial_tensors(later)), set()
    for name, tensor in [*_tensors(family.actor)]:
        if name in got and not torch.equal(got[name].float(), tensor.float()):
            raise Wrong(f'{name} is another tensor')
        checked |= {id(tensor)} if name in got else set()
    missing = [name for name, tensor in _tensors(family.actor) if id(tensor) not in checked]
    if missing:  # the message of FSDPStrategy
        raise Refused(f'{family.model_type}: nothing says what these parameters start as: {missing[0]}')
    return ''


def _tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Returns (name, tensor) pairs, a shared tensor under each of its names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def critic(family: Family) -> str:
    """A value does not depend on the other sequences of the batch."""
    return _alone(AutoCritic(family.folder).eval())


def reward_model(family: Family) -> str:
    """A score does not depend on the other sequences of the batch."""
    return _alone(AutoRM(family.folder).eval())


@torch.no_grad()
def _alone(model: Any) -> str:
    together = model(collate(sequences()))
    same(together, torch.cat([model(collate([s])) for s in sequences()]))
    return ''


def hf(family: Family) -> str:
    """The hf engine's log-probs equal the actor's."""
    return _engine(family, HFEngine())


def local(family: Family) -> str:
    """The local engine's log-probs equal the actor's, in every form of decoding that the model supports."""
    remark = _engine(family, LocalEngine(fixed_steps=False))
    for form in ({'fixed_steps': True}, {'attention': 'grouped'}, {'fixed_steps': 'compiled'}):
        try:
            with traced_only():
                _engine(family, LocalEngine(**form))
        except ValueError as error:
            if 'cannot be had' not in str(error):
                raise
    return remark


@contextmanager
def traced_only() -> Iterator[None]:
    """Compiles without inductor: the same graphs and numbers, in a tenth of the time."""
    real, torch.compile = torch.compile, functools.partial(torch.compile, backend='eager')
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch.compile = real


@torch.no_grad()
def _engine(family: Family, engine: Any) -> str:
    engine.begin(family.actor)
    prompts = [Prompt(ids=s.prompt_ids) for s in sequences()]

    def generated(given: list[Prompt]) -> None:
        samples = engine.generate(Call.of(given, SamplingParams(max_new_tokens=12), seed=3, indices=range(len(given))))
        same(torch.cat([s.logprobs for s in samples]), family.actor(collate(samples)).logprobs)

    generated(prompts[:-1])
    try:
        generated(prompts)
    except ValueError as error:
        if 'attention window' not in str(error):
            raise
        return 'up to the window'
    finally:
        engine.end()
    return ''


@torch.no_grad()
def hydra(family: Family) -> str:
    """With the top block trained, the reference equals the initial model, also from the policy's own forward."""
    actor, batch = AutoActor(family.folder, num_layers_unfrozen=1).eval(), collate(sequences())
    g = torch.Generator().manual_seed(5)
    for parameter in actor.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter += torch.randn(parameter.shape, generator=g) * 0.05
    if float((actor(batch).logprobs - torch.cat(family.plain)).abs().max()) < 1e-3:
        raise Wrong('what is trained changes nothing')
    with actor.reference():
        same(actor(batch).logprobs, torch.cat(family.plain))
    same(actor(batch, with_reference=True).reference.logprobs, torch.cat(family.plain))
    return ''


@torch.no_grad()
def lora(family: Family) -> str:
    """New adapters change no output; folded into the weights they give the same output as beside them."""
    actor = deepcopy(family.actor)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        convert_to_lora(actor.model, 2)
    batch = collate(sequences())
    same(actor(batch).logprobs, torch.cat(family.plain))
    _draw_adapters(actor)
    beside = actor(batch).logprobs
    with merged(actor.model):
        same(actor(batch).logprobs, beside)
    share = next((str(w.message).split('beside ')[1].split(' of')[0] for w in seen if 'beside ' in str(w.message)), '')
    return f'{share} of the weights' if share else ''


def _draw_adapters(actor: Any) -> None:
    """Sets B of every adapter to random numbers, as after training."""
    g = torch.Generator().manual_seed(5)
    for layer in lora_layers(actor.model).values():
        layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=g) * 0.05)


@torch.no_grad()
def peft(family: Family) -> str:
    """Adapters with random B, written by `export_peft` and read by `PeftModel`, give the actor's logits within 1e-4."""
    try:
        from peft import PeftModel
    except Exception as error:  # peft may be too old or too new for this transformers
        raise NotTried(f'peft cannot be imported: {line_of(error)}') from error
    actor = deepcopy(family.actor)
    convert_to_lora(actor.model, 2)
    _draw_adapters(actor)
    out = actor(collate(sequences()), with_logits=True)
    if float((out.logprobs - torch.cat(family.plain)).abs().max()) < 1e-3:
        raise Wrong('the adapters change nothing')
    with tempfile.TemporaryDirectory() as folder:
        export_peft(actor, folder)
        base = AutoModelForCausalLM.from_pretrained(family.folder)
        theirs = PeftModel.from_pretrained(base, folder).eval()
    same(torch.cat(plain_logits(theirs)), out.logits, 1e-4)
    return ''


@torch.no_grad()
def saving(family: Family) -> str:
    """A saved model loads in transformers and gives the same logits."""
    with tempfile.TemporaryDirectory() as folder:
        family.actor.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.cat([sequences()[0].prompt_ids, sequences()[0].response_ids])[None]
    same(again(input_ids=ids).logits, family.model(input_ids=ids).logits)
    return ''


@torch.no_grad()
def bf16(family: Family) -> str:
    """A bf16 copy, as used for generating, gives finite numbers near those in fp32."""
    from chatgpt.strategies.copies import cast_copy

    got = cast_copy(family.actor, torch.bfloat16).eval()(collate(sequences())).logprobs.float()
    same(got, torch.cat(family.plain), 0.5)
    return ''


def checkpointing(family: Family) -> str:
    """Gradient checkpointing changes no gradient, with any dropout of the config."""
    gradients = []
    for checkpoint in (False, True):
        actor = AutoActor(family.folder, checkpoint=checkpoint).train()
        dropout_off(actor)
        actor(collate(sequences())).logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None]))
    same(gradients[1], gradients[0], 1e-2 * float(gradients[0].abs().max().clamp_min(1.0)))
    return ''


CHECKS: dict[str, Callable[[Family], str]] = {
    'forward': forward,
    'meta': meta,
    'local': local,
    'hf': hf,
    'critic': critic,
    'reward model': reward_model,
    'LoRA': lora,
    'PEFT': peft,
    'hydra': hydra,
    'saving': saving,
    'bf16': bf16,
    'checkpointing': checkpointing,
}


def check(model_type: str) -> dict[str, str]:
    """Returns by check: 'ok', 'ok: remark', 'no: the library's reason', 'CRASH: message' or 'WRONG: difference'."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            family = Family(model_type, Path(folder))
        except Exception as error:
            return {'config': f'none: {line_of(error)}'}
        return {name: outcome(fn, family) for name, fn in CHECKS.items()}


def check_apart(model_type: str, checked: Callable[[str], dict[str, str]] = check) -> dict[str, str]:
    """Checks in a child process, since some types change transformers for later ones and some take all memory."""
    context = multiprocessing.get_context('fork')  # the child needs no imports
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(checked(model_type)))
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT_S):
            return {'config': f'none: it took more than {LIMIT_S} s'}
        return here.recv()
    except EOFError:
        return {'config': f'none: its process ended with {process.exitcode}'}
    finally:
        process.kill()
        process.join()


def outcome(fn: Callable[[Family], str], family: Family) -> str:
    try:
        remark = fn(family)
    except Refused as error:
        return f'no: {line_of(error)}'
    except NotTried as error:
        return f'none: {line_of(error)}'
    except ValueError as error:
        return f'{"no" if _is_refusal(error, family) else "CRASH"}: {line_of(error)}'
    except Wrong as error:
        return f'WRONG: {line_of(error)}'
    except Exception as error:
        return f'CRASH: {line_of(error)}'
    return f'ok: {remark}' if remark else 'ok'


def _is_refusal(error: ValueError, family: Family) -> bool:
    """Returns True if the library raised the error and it names the model or folder."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    names = (type(family.model).__name__, type(base_model(family.model)).__name__, str(family.folder))
    return innermost.startswith(LIBRARY) and any(name in str(error) for name in names)


def line_of(error: Exception) -> str:
    """Returns the first line of the error without the folder's name, which differs in every run."""
    text = re.sub(
        r"(the folder )?'?\S*/tmp\w+(/model\.safetensors)?'?",
        'the folder',
        (str(error).strip().splitlines() or [''])[0],
    )
    in_own_words = isinstance(error, (ValueError, Wrong, Refused, NotTried))
    return (text if in_own_words else f'{type(error).__name__}: {text}')[:500]


# ---------------------------------------------------------------- the table of docs/results/model_types.md


def cells(checks: dict[str, str]) -> list[str]:
    """Returns the cells of a model type in the page's table, one per check."""
    return [cell(checks[name]) for name in CHECKS]


def cell(text: str) -> str:
    if text.startswith('ok'):
        return text.partition(': ')[2] or 'yes'
    if text.startswith('none'):
        return '–'
    return '✗' if text.startswith('no:') else text.partition(':')[0].lower()


def read_page(text: str) -> dict[str, list[str]]:
    """Returns the cells of a page's table by model type; [] for a type that is refused as a whole or was not tried."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith('| ') and line.count(' | ') > len(CHECKS):
            kind, *rest = line.strip('| ').split(' | ')
            if kind != 'model type':
                found[kind] = rest[: len(CHECKS)]
        elif line.startswith('- ') and ',' not in line.partition(':')[0]:
            found[line[2:].partition(':')[0]] = []
    return found
