"""The randomwalks task of trlX: find short paths to node 'a' in a small directed graph, from random walks.

A graph of 21 nodes is drawn from numpy's RandomState(graph seed): an edge where rand(21, 21) > 0.9, without self-loops,
redrawn until every node has an outgoing edge; 'a' is the goal and leads only to itself. A walk starts at another node,
makes up to 9 uniform moves and stops at 'a'. A text is the letters of its nodes. The optimality of a walk is (10 −
length) / (10 − shortest), where length counts nodes up to the first 'a' (10 if it is never reached or a move is no
edge) and shortest those of the shortest path from its start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import gpt2, offline_trainer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import SFTTrainer
from chatgpt.types import Sequence

NUM_NODES, MAX_LENGTH, NUM_WALKS = 21, 10, 1000
LETTERS = 'abcdefghijklmnopqrstu'
PAD, BOS, EOS = '_', '<', '.'


@dataclass(frozen=True)
class Task:
    """A graph, its walks, and the prompts: one letter each."""

    edges: np.ndarray
    """(21, 21) bool"""
    walks: tuple[str, ...]
    shortest: dict[str, int]
    """number of nodes by start letter, with both ends, at most 10"""

    @property
    def starts(self) -> list[str]:
        return list(LETTERS[1:])

    def length(self, walk: str) -> int:
        """Returns the number of nodes up to the first 'a'; 10 for a walk that is invalid or does not reach it."""
        for i, letter in enumerate(walk[:MAX_LENGTH]):
            if letter not in LETTERS:
                return MAX_LENGTH
            if i and not self.edges[LETTERS.index(walk[i - 1]), LETTERS.index(letter)]:
                return MAX_LENGTH
            if letter == 'a':
                return i + 1
        return MAX_LENGTH

    def optimality(self, walk: str) -> float:
        """Returns the optimality in [0, 1]; 1 for a shortest path from the walk's first letter."""
        return (MAX_LENGTH - self.length(walk)) / (MAX_LENGTH - self.shortest[walk[0]])


def make_task(graph_seed: int) -> Task:
    """Returns the graph with its 1,000 walks.

    Raises:
        ValueError: 'a' is not within 10 nodes of some start, where optimality would be 0/0.
    """
    rng = np.random.RandomState(graph_seed)
    while True:
        edges = rng.rand(NUM_NODES, NUM_NODES) > 0.9
        np.fill_diagonal(edges, False)
        if edges.any(axis=1).all():
            break
    edges[0] = False
    edges[0, 0] = True
    walks = []
    for _ in range(NUM_WALKS):
        node = rng.randint(1, NUM_NODES)
        path = [node]
        for _ in range(MAX_LENGTH - 1):
            node = rng.choice(np.nonzero(edges[node])[0])
            path.append(node)
            if node == 0:
                break
        walks.append(''.join(LETTERS[n] for n in path))
    shortest = {LETTERS[start]: _shortest(edges, start) for start in range(1, NUM_NODES)}
    far = [letter for letter, length in shortest.items() if length >= MAX_LENGTH]
    if far:
        raise ValueError(
            f"graph seed {graph_seed}: 'a' is too far from {', '.join(far)}; seeds 1000, 1002 and 1004 have a way from all"
        )
    return Task(edges, tuple(walks), shortest)


def _shortest(edges: np.ndarray, start: int) -> int:
    """Returns the number of nodes on the shortest path to 'a', by breadth-first search."""
    seen, queue = {start: 1}, deque([start])
    while queue:
        node = queue.popleft()
        if node == 0:
            return min(seen[node], MAX_LENGTH)
        for following in np.nonzero(edges[node])[0].tolist():
            if following not in seen:
                seen[following] = seen[node] + 1
                queue.append(following)
    return MAX_LENGTH


def tokenizer() -> Any:
    """Returns a tokenizer with one token per letter and no begin token."""
    vocab = {c: i for i, c in enumerate([PAD, BOS, EOS, *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex('.'), 'isolated')
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def config() -> Any:
    """Returns the config of a GPT-2 of 6 layers x 144."""
    return gpt2(len(LETTERS) + 3, 6, 144, 12, 16, eos_token_id=2)


def sequences(walks: Any) -> list[Any]:
    """Returns walks as sequences: the first letter is the prompt, the rest and the end token the response."""
    ids = {c: i + 3 for i, c in enumerate(LETTERS)}
    records = []
    for walk in walks:
        response = torch.tensor([*(ids[c] for c in walk[1:]), 2])
        mask = torch.ones_like(response, dtype=torch.bool)
        records.append(Sequence(prompt_ids=torch.tensor([ids[walk[0]]]), response_ids=response, response_mask=mask))
    return records


def learn_walks(task: Task, config: Any, seed: int, *, steps: int, lr: float) -> GPTActor:
    """Returns a new model trained on the walks in batches of 100."""
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=config)
        adam = partial(torch.optim.AdamW, lr=lr)
        data, settings = sequences(task.walks), {'train_batch_size': 100, 'max_epochs': 1000, 'max_steps': steps}
        offline_trainer(SFTTrainer, strategy, actor, data, optimizer=adam, **settings).fit()
        return actor
