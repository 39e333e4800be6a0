"""The parts that all sides of `vs_peers.py` share: the work of a case, prompts, the tokenizer, and the line protocol.

Runs in the library's environment and in each peer's, so it imports neither, and torch only inside functions.

The protocol, one line each way: the worker sends `{"ready": {...}}`; for each `go` it does one whole update (collect,
score, learn) and answers `{"cpu_s", "wall_s", "new_tokens", "sequences"}`; end of input ends it. CPU seconds are those
of all threads of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, VOCAB = 16, 48, 512
SEQUENCES = 32
GROUP = 8
"""responses per prompt in GRPO and RLOO"""
PAD, EOS = 0, 1
LEARNING_RATE = 1e-6
"""small, so that lengths do not drift"""
ADAMW = {'lr': LEARNING_RATE, 'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 0.0, 'fused': True}
KL_COEF = 0.05


@dataclass(frozen=True)
class Case:
    """One comparison. `peer` names the worker and environment; `method` is ppo, grpo or rloo."""

    peer: str
    method: str
    lengths: str
    """'fixed': every response runs to the limit; 'eos': responses end after a third of it on average"""
    precision: str
    """'fp32', 'bf16', or 'bf16 weights' for a peer"""
    epochs: int = 1
    kl: bool = True
    model: str = ''
    """the saved Hugging Face folder both sides load"""
    device: str = 'cpu'
    sequences: int = SEQUENCES
    """sequences of an update and of its optimizer step"""
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS
    vocab: int = VOCAB

    @property
    def name(self) -> str:
        kl = '' if self.method == 'ppo' else ', KL' if self.kl else ', no KL'
        return f'{self.peer} {self.method}{kl}, {self.lengths}, {self.precision}, {self.epochs} epoch{"s" * (self.epochs > 1)}'

    @property
    def words(self) -> set[str]:
        return set(self.name.replace(',', '').split())

    @property
    def file_name(self) -> str:
        return self.name.replace(',', '').replace(' ', '_') + '.json'

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts of an update, with one response each in PPO and `GROUP` in the others."""
        return self.sequences if self.method == 'ppo' else self.sequences // GROUP

    def prompts(self) -> Any:
        """Returns ids on the CPU, shape (sequences, prompt_tokens)."""
        return prompt_ids(self.sequences, self.prompt_tokens, self.vocab)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


def prompt_ids(count: int, tokens: int = PROMPT_TOKENS, vocab: int = VOCAB) -> Any:
    """Returns ids other than PAD and EOS, shape (count, tokens)."""
    import torch

    return torch.randint(2, vocab, (count, tokens), generator=torch.Generator().manual_seed(0))


def text_of(ids: Any) -> str:
    return ' '.join(map(_word, ids))


def _word(index: Any) -> str:
    return f'w{int(index):03d}'  # no word is a prefix of another, since special tokens match anywhere in a text


def tokenizer(vocab: int = VOCAB, longest: int = 128) -> Any:
    """Returns a tokenizer with one word per id, so that text and ids are equivalent; it pads on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({_word(i): i for i in range(vocab)}, unk_token=_word(2)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=_word(PAD),
        eos_token=_word(EOS),
        padding_side='left',
        model_max_length=longest,
    )


class Line:
    """The worker's end of the protocol; all other output goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), 'w')
        os.dup2(2, 1)
        self._start = (0.0, 0.0)

    def send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + '\n')
        self._out.flush()

    def ready(self, **about: Any) -> None:
        self.send({'ready': about})

    def wait(self) -> bool:
        """Waits for `go` and starts the clocks; returns False at the end of input."""
        go = sys.stdin.readline().strip() == 'go'
        self._start = (time.process_time(), time.perf_counter())
        return go

    def done(self, new_tokens: int, sequences: int) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        cpu, wall = time.process_time() - self._start[0], time.perf_counter() - self._start[1]
        self.send({'cpu_s': cpu, 'wall_s': wall, 'new_tokens': int(new_tokens), 'sequences': int(sequences)})


def begin() -> tuple[Case, Line]:
    """Sets one thread and no hub, and returns the case of the command line and the line to the caller."""
    line = Line()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Case.from_json(sys.argv[1]), line


def versions(*names: str) -> dict[str, str]:
    """Returns the versions of the packages as Python imports them, the first on the path."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ('torch', 'transformers', *names):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class ServeUpdates:
    """A mixin for TrainerCallback that runs `steps` optimizer steps of the trainer's own loop per `go`.

    The trainer adds to `new_tokens` and `sequences`, which are reset at each `go`.
    """

    def __init__(self, line: Line, steps: int = 1) -> None:
        self.line, self.steps, self.seen = line, steps, 0
        self.new_tokens = self.sequences = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen += 1
        if self.seen % self.steps:
            return
        self.line.done(self.new_tokens, self.sequences)
        self.new_tokens = self.sequences = 0
        if not self.line.wait():
            sys.stderr.flush()
            os._exit(0)  # the two trainers have no common way to stop
