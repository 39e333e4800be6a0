"""What a run in a game starts from where it is given no model: a tokenizer of characters, and games of a random player
to learn the moves from.

A policy that never makes a move that is allowed earns the same for everything it says, and has nothing to learn from.
Left out: training the model (`models`).
"""

from __future__ import annotations

from typing import Any

import torch

from chatgpt.environments.games import Game
from chatgpt.environments.games.scores import random_player
from chatgpt.types import Sequence

CHARACTERS = '\n' + ''.join(map(chr, range(32, 127)))
"""that the tokenizer has: those of every game, and of their rules"""
PAD, BOS, EOS, UNKNOWN = '<pad>', '<s>', '</s>', '<unk>'
CONTEXT = 512


def game_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` with a token per character of ASCII."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, BOS, EOS, UNKNOWN, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def game_config() -> Any:
    """A GPT-2 of 4 layers x 64 for that tokenizer: about 0.25 million parameters."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=4 + len(CHARACTERS),
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def games_of_a_random_player(
    make: Any, tokenizer: Any, *, num_tokens: int = 160_000, most: int = 8000
) -> list[Sequence]:
    """Episodes as demonstrations: each move, with an end token, is trained on; observations are not. Longer ones are
    cut at a move.

    Args:
        make: makes a `Game`.
        num_tokens: of all of them together, about; at most `most` games.
    """
    examples: list[Sequence] = []
    player = random_player()
    while num_tokens > 0 and len(examples) < most:
        game: Game = make()
        prompt = tokenizer(game.reset((1 << 32) + len(examples)))['input_ids']
        response: list[int] = []
        mask: list[bool] = []
        over = False
        while not over:
            move = player(game)
            observation, _, terminated, truncated, _ = game.step(move)
            over = terminated or truncated
            turn = [*tokenizer(move)['input_ids'], tokenizer.eos_token_id]
            seen = [] if over else tokenizer(observation)['input_ids']
            if len(prompt) + len(response) + len(turn) > CONTEXT:
                break
            response += [*turn, *seen]
            mask += [True] * len(turn) + [False] * len(seen)
        num_tokens -= len(prompt) + len(response)
        last = max(i for i, counts in enumerate(mask) if counts) + 1
        examples.append(
            Sequence(
                prompt_ids=torch.tensor(prompt),
                response_ids=torch.tensor(response[:last]),
                response_mask=torch.tensor(mask[:last]),
            )
        )
    return examples
