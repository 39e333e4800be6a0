"""The parts that all sides of `learning_vs_trl.py` share: a run's settings, the reward, the clock, the held-out score.

Runs in the library's environment and in each peer's, so it imports neither, and torch only inside functions. CPU
seconds are those of the process, without evaluations.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUP, EPOCHS = 4, 2
"""responses per prompt with GRPO; epochs over an update's responses"""
BETAS, EPS = (0.9, 0.999), 1e-8
QUIET = {
    'bf16': False,
    'gradient_checkpointing': False,
    'use_cpu': True,
    'report_to': 'none',
    'save_strategy': 'no',
    'disable_tqdm': True,
}
"""settings of both TRL trainers with their own loop: fp32 on a CPU, nothing written or logged"""


@dataclass(frozen=True)
class Lesson:
    """One run: the initial model, the task's files, the two searched settings, and the time limit."""

    side: str
    task: str
    """'additions' or 'sums', or 'sentiment' with a `classifier`"""
    start: str
    prompts: str
    """a JSON lines file of `text` (a formatted prompt) and, but for sentiment, `answer`"""
    held_out: str
    lr: float
    kl_coef: float
    seed: int
    cpu_seconds: float
    every: float
    """CPU seconds between evaluations"""
    new_tokens: int
    train_batch: int
    """sequences of an optimizer step"""
    classifier: str = ''
    data: str = ''
    """name of the files and of the initial model, if a task has several"""

    @property
    def label(self) -> str:
        return f'{self.task} {self.data}'.strip()

    @property
    def name(self) -> str:
        return f'{self.label} {self.side} lr {self.lr:g} kl {self.kl_coef:g} seed {self.seed} {self.cpu_seconds:g}s'

    @property
    def responses(self) -> int:
        """Responses of an update."""
        return 32 if self.task == 'sentiment' else 64

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def config_of(folder: str) -> Any:
    """Returns the config of a model's folder; for earlier versions of transformers under their key of RoPE's base."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if rope := getattr(config, 'rope_parameters', None):
        config.rope_theta = rope['rope_theta']
    return config


def additions_reward(lesson: Lesson) -> Any:
    """Returns a reward of 1 if the last number of a response is the answer, else 0."""
    answers = {row['text']: int(row['answer']) for path in (lesson.prompts, lesson.held_out) for row in rows(path)}

    def score(prompts: list[str], responses: list[str]) -> list[float]:
        found = [re.findall(r'\d+', response.replace(',', '')) for response in responses]
        pairs = zip(found, prompts, strict=True)
        return [float(bool(numbers) and int(numbers[-1]) == answers[prompt]) for numbers, prompt in pairs]

    return score


def sentiment_reward(lesson: Lesson) -> Any:
    """Returns a reward that is the classifier's logit for prompt and response together."""
    import torch
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    given = {'config': config_of(lesson.classifier), 'torch_dtype': torch.float32}
    model = AutoModelForSequenceClassification.from_pretrained(lesson.classifier, **given).eval()
    words = PreTrainedTokenizerFast.from_pretrained(lesson.classifier, padding_side='right')

    def score(prompts: list[str], responses: list[str]) -> list[float]:
        texts = [a + b for a, b in zip(prompts, responses, strict=True)]
        with torch.inference_mode():
            ids = words(texts, return_tensors='pt', padding=True, return_token_type_ids=False)
            return model(**ids).logits[:, 0].tolist()

    return score


class Run:
    """The measurement of a run: its reward, its prompts, and at intervals of CPU seconds the mean score of responses to
    held-out prompts, sampled at temperature 1."""

    def __init__(self) -> None:
        import torch
        from transformers import PreTrainedTokenizerFast

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.lesson = Lesson(**json.loads(sys.argv[1]))
        self.out = Path(sys.argv[2])
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.lesson.start, padding_side='left')
        if self.tokenizer.unk_token:  # a chat contains end tokens, and TRL masks tokens equal to the padding token
            self.tokenizer.pad_token = self.tokenizer.unk_token
        self.reward = (sentiment_reward if self.lesson.task == 'sentiment' else additions_reward)(self.lesson)
        self.texts = [row['text'] for row in rows(self.lesson.prompts)]
        self.held_out = [row['text'] for row in rows(self.lesson.held_out)]
        self.curve: list[dict[str, float]] = []
        self.updates = 0
        self._apart = 0.0
        self._begun = 0.0

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)['input_ids']

    def text_of(self, ids: Any) -> str:
        """Returns a response's text up to its first end token, without special tokens."""
        ids = [int(i) for i in ids]
        if self.tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(self.tokenizer.eos_token_id)]
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def begin(self, model: Any) -> None:
        """Starts the clock. The first of the runs with this initial model and these held-out prompts evaluates it."""
        self._begun = time.process_time()
        same = ('task', 'start', 'held_out', 'new_tokens', 'classifier')
        key = hashlib.sha256(repr([getattr(self.lesson, name) for name in same]).encode()).hexdigest()[:16]
        first = self.out.parent / f'before-{key}.json'
        if first.is_file():
            self.curve.append(json.loads(first.read_text()))
        else:
            self._evaluate(model)
            first.write_text(json.dumps(self.curve[0]))

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._begun - self._apart

    def after_update(self, model: Any) -> bool:
        """Call after each update. Returns False if the time is up; the record is then written."""
        now = self.cpu_s
        self.updates += 1
        over = now >= self.lesson.cpu_seconds
        if over or now >= len(self.curve) * self.lesson.every:
            self._evaluate(model)
        if over:
            self.out.write_text(json.dumps(self.curve))
        return not over

    def end_process(self) -> None:
        sys.stdout.flush()
        os._exit(0)

    def _evaluate(self, model: Any) -> None:
        import torch
        from transformers import GenerationConfig

        at, begun, training = self.cpu_s, time.process_time(), model.training
        model.eval()
        end = self.tokenizer.eos_token_id
        how = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=self.lesson.new_tokens,
            eos_token_id=end,
            pad_token_id=end,
            use_cache=True,
        )
        scores, lengths = [], []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for first in range(0, len(self.held_out), 50):
                texts = self.held_out[first : first + 50]
                batch = self.tokenizer(texts, return_tensors='pt', padding=True, add_special_tokens=False)
                batch.pop('token_type_ids', None)
                ids = model.generate(**batch, generation_config=how)[:, batch['input_ids'].shape[1] :]
                responses = [self.text_of(row) for row in ids]
                scores += self.reward(texts, responses)
                lengths += [len(self.ids(response)) for response in responses]
        model.train(training)
        mean = {'score': sum(scores) / len(scores), 'length': sum(lengths) / len(lengths)}
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.curve.append({'cpu_s': at, **mean, 'updates': self.updates, 'peak_gib': peak_gib})
        print(self.lesson.name, self.curve[-1], file=sys.stderr, flush=True)
        self._apart += time.process_time() - begun


def watcher(run: Run, steps: int, model: Any = None) -> Any:
    """Returns a TrainerCallback that counts `steps` optimizer steps as an update and ends the process in time."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        seen = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.seen += 1
            if self.seen % steps == 0 and not run.after_update(model if model is not None else more['model']):
                run.end_process()

    return Watch()
