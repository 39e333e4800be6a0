"""Models, tokenizers and data of the published programs, under the hub names that they read, as folders of a directory.

Everything is drawn from a seed: GPT-2 of two layers over bytes without dropout, classifiers, sentences of equal length,
and for trlX's random walks a policy that has learned the walks. Files are those that transformers 4.32 to 5 read.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from harness import gpt2

END, PAD = '<|endoftext|>', '<|padding|>'
LETTERS = 'abcdefghijklmnopqrstu'
GOOD, BAD = 'great lovely funny warm clever bright'.split(), 'awful boring cold clumsy dull empty'.split()
WORDS = 'the a film story actor scene was is and with of song light night it I saw we never always'.split()


def byte_letters() -> list[str]:
    """Returns the 256 printable characters that GPT-2's tokenizer has for bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]


def save_tokenizer(folder: Path, letters: Iterable[str]) -> None:
    """Writes GPT-2's tokenizer without merges: a letter is a token, then come the end and the padding."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate([*letters, END, PAD])}
    (folder / 'vocab.json').write_text(json.dumps(vocabulary))
    (folder / 'merges.txt').write_text('#version: 0.2\n')
    special = {'bos_token': END, 'eos_token': END, 'unk_token': END, 'pad_token': PAD}
    settings = {'tokenizer_class': 'GPT2Tokenizer', 'model_max_length': 1024, 'add_prefix_space': False}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings | special))
    (folder / 'special_tokens_map.json').write_text(json.dumps(special))


def save(model: Any, folder: Path, letters: Iterable[str] | None = None) -> None:
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / 'pytorch_model.bin')  # models with a value head look for it
    save_tokenizer(folder, byte_letters() if letters is None else letters)


def tiny_gpt2(**fields: Any) -> Any:
    return gpt2(260, 2, 64, 4, 256, **{'bos_token_id': 256, 'eos_token_id': 256, 'pad_token_id': 257} | fields)


def save_models(root: Path) -> None:
    """Writes `tiny`, `rm` (a score), and the classifier of two labels that programs about films read."""
    from transformers import (
        DistilBertConfig,
        DistilBertForSequenceClassification,
        GPT2ForSequenceClassification,
        GPT2LMHeadModel,
    )

    torch.manual_seed(0)
    save(GPT2LMHeadModel(tiny_gpt2()), root / 'tiny')
    scorer = GPT2ForSequenceClassification(tiny_gpt2(num_labels=1))
    torch.nn.init.normal_(scorer.score.weight, std=0.3)
    save(scorer, root / 'rm')
    config = DistilBertConfig(
        vocab_size=260,
        dim=32,
        hidden_dim=64,
        n_layers=1,
        n_heads=2,
        dropout=0,
        attention_dropout=0,
        seq_classif_dropout=0,
    )
    config.id2label, config.label2id = {0: 'NEGATIVE', 1: 'POSITIVE'}, {'NEGATIVE': 0, 'POSITIVE': 1}
    films = DistilBertForSequenceClassification(config)
    for parameter in (films.distilbert.embeddings.word_embeddings.weight, films.classifier.weight):
        torch.nn.init.normal_(parameter, std=1.0)
    save(films, root / 'lvwerra' / 'distilbert-imdb')


def save_walker(root: Path, programs: Path) -> None:
    """Writes trlX's `CarperAI/randomwalks`, a GPT-2 that has learned the walks of the programs' own graph."""
    from transformers import GPT2LMHeadModel

    sys.path.insert(0, str(programs))
    from examples.randomwalks import generate_random_walks

    walks = generate_random_walks(seed=1000)[2]
    ids = torch.full((len(walks), 10), len(LETTERS))
    for row, walk in zip(ids, walks, strict=True):
        row[: len(walk)] = torch.tensor([LETTERS.index(letter) for letter in walk])
    torch.manual_seed(0)
    ends = {'bos_token_id': 21, 'eos_token_id': 21, 'pad_token_id': 22}
    model = GPT2LMHeadModel(gpt2(23, 3, 72, 4, 16, **ends)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(400):
        batch = ids[torch.randint(len(ids), (100,))]
        labels = batch.masked_fill((batch == 21) & ((batch == 21).cumsum(1) > 1), -100)
        model(batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, root / 'CarperAI' / 'randomwalks', LETTERS)


def sentences(count: int, length: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns texts of `length` characters with a label, every second of them 1."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        words, text = WORDS + (GOOD if i % 2 else BAD) * 2, ''
        while len(text) < length:
            text += draw.choice(words) + ' '
        rows.append({'text': text[: length - 1] + '.', 'label': i % 2})
    return rows


def dialogues(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns pairs of whole dialogues with one prompt, of several lengths."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        start = f'\n\nHuman: Was the {draw.choice(WORDS)} {draw.choice(GOOD + BAD)}?\n\nAssistant:'
        good, bad = (' '.join(draw.choices(WORDS + kind * 3, k=draw.randint(3, 9))) for kind in (GOOD, BAD))
        rows.append({'chosen': f'{start} {good}', 'rejected': f'{start} {bad}'})
    return rows


def turns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns pairs of dialogues as lists of messages."""

    def messages(text: str) -> list[dict[str, str]]:
        question, _, answer = text.partition('\n\nAssistant: ')
        question = question.removeprefix('\n\nHuman: ')
        return [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]

    return [{side: messages(row[side]) for side in ('chosen', 'rejected')} for row in rows]


def write_split(root: Path, name: str, rows: list[dict[str, Any]]) -> None:
    path = root / f'{name}.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def workspace(folder: Path, models: Path, data: dict[str, list[dict[str, Any]]]) -> Path:
    """Makes an empty folder with the models and `data`, rows by 'hub name/split', and returns it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for child in models.iterdir():
        (folder / child.name).symlink_to(child)
    for name, rows in data.items():
        write_split(folder, name, rows)
    return folder
