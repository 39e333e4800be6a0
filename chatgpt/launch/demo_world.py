"""Data and models of the demo and of runs without data: short stories with a known score, and small models that are
trained to write them or to make the moves of a game.

    one day a small fox went to the river .  it found a flower . it felt glad . it played with a duck .

The prompt is the first sentence, the response the rest. `true_score` scores a response by the stories' grammar, so
preferences can be generated from it, and a policy trained with a reward model can be measured by the true score.
Everything is a function of a seed. Imports torch only to train a model.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ANIMALS = ('cat', 'dog', 'fox', 'bear', 'bird', 'frog', 'fish', 'duck', 'mouse', 'horse')
SIZES = ('small', 'big', 'young', 'old', 'white', 'brown')
PLACES = ('river', 'forest', 'garden', 'hill', 'lake', 'farm')
THINGS = {
    1: ('flower', 'cake', 'gift', 'song'),
    0: ('leaf', 'stone', 'stick', 'path'),
    -1: ('thorn', 'storm', 'trap', 'hole'),
}
MOODS = {
    1: ('glad', 'happy', 'merry', 'proud'),
    0: ('calm', 'hungry', 'quiet', 'sleepy'),
    -1: ('sad', 'angry', 'lonely', 'scared'),
}
DEEDS = {1: ('played', 'danced', 'laughed'), 0: ('walked', 'waited', 'talked'), -1: ('fought', 'quarrelled', 'cried')}
FRAME = ('one', 'day', 'a', 'went', 'to', 'the', 'it', 'found', 'felt', 'with', '.')
PAD, BOS, EOS, UNKNOWN = '<pad>', '<bos>', '<eos>', '<unk>'
MAX_SENTENCES = 4
VALUES = (1, 0, -1)
REPEAT_WORDS = 3
"""length of the word sequences that `repeated_share` counts"""

_VALUE_OF = {word: value for table in (THINGS, MOODS, DEEDS) for value, words in table.items() for word in words}
_SENTENCES = (
    re.compile(r'it found a (\w+)'),
    re.compile(r'it felt (\w+)'),
    re.compile(rf'it (\w+) with a (?:{"|".join(ANIMALS)})'),
)
_SLOTS = tuple({w for words in table.values() for w in words} for table in (THINGS, MOODS, DEEDS))


def _sentence(rng: random.Random, values: tuple[int, ...] = VALUES) -> str:
    value = rng.choice(values)
    kind = rng.randrange(3)
    if kind == 0:
        return f'it found a {rng.choice(THINGS[value])} .'
    if kind == 1:
        return f'it felt {rng.choice(MOODS[value])} .'
    return f'it {rng.choice(DEEDS[value])} with a {rng.choice(ANIMALS)} .'


def _prompt(rng: random.Random) -> str:
    return f'one day a {rng.choice(SIZES)} {rng.choice(ANIMALS)} went to the {rng.choice(PLACES)} .'


def _sentences(rng: random.Random, values: tuple[int, ...] = VALUES) -> list[str]:
    return [_sentence(rng, values) for _ in range(rng.randint(2, MAX_SENTENCES))]


def _response(rng: random.Random) -> str:
    return ' '.join(_sentences(rng))


def _corrupted(rng: random.Random, response: str) -> str:
    """Returns a response with a typical fault: shuffled words, one repeated word, a cut end, or a repeated sentence."""
    words = response.split()
    fault = rng.randrange(4)
    if fault == 0:
        rng.shuffle(words)
    elif fault == 1:
        words = [rng.choice(list(_VALUE_OF))] * rng.randint(2, len(words))
    elif fault == 2:
        words = words[: rng.randint(1, len(words) - 2)]
    else:
        return ' '.join([_sentence(rng)] * rng.randint(2, MAX_SENTENCES))
    return ' '.join(words)


def _changed(rng: random.Random, sentences: list[str], values: tuple[int, ...]) -> list[str]:
    """Returns a story with one change typical of a policy in training: a repeated sentence in place of another or
    inserted, a cut end, another sentence, or, in half of the cases, a wrong word."""
    sentences, at, change = list(sentences), rng.randrange(len(sentences)), rng.randrange(8)
    if change == 0:
        sentences[at] = rng.choice(sentences)
    elif change == 1:
        sentences.insert(at, rng.choice(sentences))
    elif change == 2:
        sentences[-1] = ' '.join(sentences[-1].split()[: -rng.randint(1, 3)])
    elif change == 3:
        sentences[at] = _sentence(rng, values)
    else:
        words = sentences[at].split()
        words[rng.randrange(len(words) - 1)] = rng.choice([*FRAME, *ANIMALS, *_VALUE_OF])
        sentences[at] = ' '.join(words)
    return sentences


def demo_corpus(num: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns `num` stories as {'prompt', 'response'}; cheerful, neutral and gloomy sentences are equally likely."""
    rng = random.Random(f'corpus {seed}')
    return [{'prompt': _prompt(rng), 'response': _response(rng)} for _ in range(num)]


def demo_prompts(num: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns `num` first sentences as {'prompt'}."""
    rng = random.Random(f'prompts {seed}')
    return [{'prompt': _prompt(rng)} for _ in range(num)]


def _pairs(num: int, draw: Callable[[], tuple[str, str, str]]) -> list[dict[str, str]]:
    """Returns `num` samples of `draw`, (prompt, response, response), ordered by true score; ties are sampled again."""
    pairs: list[dict[str, str]] = []
    while len(pairs) < num:
        prompt, a, b = draw()
        score_a, score_b = true_score(prompt, a), true_score(prompt, b)
        if score_a != score_b:
            chosen, rejected = (a, b) if score_a > score_b else (b, a)
            pairs.append({'prompt': prompt, 'chosen': chosen, 'rejected': rejected})
    return pairs


def demo_preferences(num: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns `num` pairs as {'prompt', 'chosen', 'rejected'}. One response in three is corrupted (`_corrupted`), so
    that a reward model also learns to reject faults."""
    rng = random.Random(f'preferences {seed}')

    def draw() -> tuple[str, str, str]:
        prompt, a, b = _prompt(rng), _response(rng), _response(rng)
        a, b = (_corrupted(rng, r) if rng.random() < 1 / 3 else r for r in (a, b))
        return prompt, a, b

    return _pairs(num, draw)


def demo_close_preferences(num: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns `num` pairs as {'prompt', 'chosen', 'rejected'}, as similar as two responses of one policy, which a
    reward model must rank during PPO.

    Both stories of a pair have one mood, from mixed to cheerful. In half of the pairs the second story is the first
    with one change (`_changed`); one second story in five is corrupted.
    """
    rng = random.Random(f'close preferences {seed}')

    def draw() -> tuple[str, str, str]:
        prompt, values = _prompt(rng), rng.choice((VALUES, (1, 1, 0), (1,)))
        story = _sentences(rng, values)
        other = _changed(rng, story, values) if rng.random() < 1 / 2 else _sentences(rng, values)
        a, b = ' '.join(story), ' '.join(other)
        if rng.random() < 1 / 5:
            b = _corrupted(rng, b)
        return prompt, a, b

    return _pairs(num, draw)


def rewarded_stories(num: int) -> list[dict[str, Any]]:
    """Returns stories with their true score, as {'prompt', 'response', 'reward'}."""
    return [row | {'reward': true_score(row['prompt'], row['response'])} for row in demo_corpus(num, seed=0)]


def true_reward(prompts: list[str], responses: list[str]) -> list[float]:
    """`true_score` as a reward function."""
    return [true_score(p, r) for p, r in zip(prompts, responses, strict=True)]


def repeated_share(response: str) -> float:
    """Returns the share of a response's `REPEAT_WORDS`-grams that repeat an earlier one (seq-rep-n of Welleck et al.
    2020), 0 if it has none.

    >>> repeated_share('it felt glad . it felt sad . it felt glad .')
    0.3
    """
    words = response.split()
    runs = list(zip(*(words[i:] for i in range(REPEAT_WORDS)), strict=False))
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


def true_score(prompt: str, response: str) -> float:
    """Returns the score of a response, in [−1.25, 1]: the sum over its first four sentences / 4.

    A well-formed sentence counts the value of its word (+1 cheerful, 0 neutral, −1 gloomy), a repeated one 0; any other
    sentence counts −1. A response that ends within a sentence, or is empty, loses 1/4.
    """
    *sentences, rest = [s.strip() for s in response.strip().split('.')]
    total, seen = 0.0, set()
    for sentence in sentences[:MAX_SENTENCES]:
        if sentence not in seen:
            total += _sentence_value(sentence)
        seen.add(sentence)
    return total / MAX_SENTENCES - (0.25 if rest or not sentences else 0.0)


def _sentence_value(sentence: str) -> float:
    for pattern, words in zip(_SENTENCES, _SLOTS, strict=True):
        match = pattern.fullmatch(sentence)
        if match and match[1] in words:
            return float(_VALUE_OF[match[1]])
    return -1.0


def demo_tokenizer() -> Any:
    """Returns a word-level `PreTrainedTokenizerFast` of the stories' words, with distinct pad, begin and end tokens."""
    from tokenizers import decoders, pre_tokenizers

    words = [*FRAME, *ANIMALS, *SIZES, *PLACES, *_VALUE_OF]
    return _tokenizer(words, BOS, EOS, pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix='##', cleanup=False))


def _tokenizer(words: Iterable[str], bos: str, eos: str, split: Any, decoder: Any) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = {word: i for i, word in enumerate([PAD, bos, eos, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
    special = {'pad_token': PAD, 'bos_token': bos, 'eos_token': eos, 'unk_token': UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def demo_config(vocab_size: int | None = None, n_positions: int = 64) -> Any:
    """Returns the config of a GPT-2 of 4 layers x 64, by default for `demo_tokenizer`: about 0.2 million parameters."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=len(demo_tokenizer()) if vocab_size is None else vocab_size,
        n_positions=n_positions,
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


# --- games ----------------------------------------------------------------------------------------------------------

CHARACTERS = '\n' + ''.join(map(chr, range(32, 127)))
"""vocabulary of `game_tokenizer`; covers the text of every game"""
GAME_CONTEXT = 512


def game_tokenizer() -> Any:
    """Returns a `PreTrainedTokenizerFast` with one token per ASCII character."""
    from tokenizers import Regex, decoders, pre_tokenizers

    return _tokenizer(CHARACTERS, '<s>', '</s>', pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated'), decoders.Fuse())


def game_config() -> Any:
    """Returns the config of a GPT-2 of 4 layers x 64 for `game_tokenizer`: about 0.25 million parameters."""
    return demo_config(4 + len(CHARACTERS), GAME_CONTEXT)


def random_games(make: Any, tokenizer: Any, *, num_tokens: int = 160_000, most: int = 8000) -> list[Any]:
    """Returns episodes of a random player as demonstrations, each a `Sequence`. The mask is True on moves and their end
    tokens, False on observations. An episode longer than `GAME_CONTEXT` is cut before a move.

    Args:
        make: returns a `Game`.
        num_tokens: approximate total of tokens; at most `most` episodes.
    """
    import torch

    from chatgpt.environments.games.scores import random_player
    from chatgpt.types import Sequence

    examples = list[Any]()
    player = random_player()
    while num_tokens > 0 and len(examples) < most:
        game = make()
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
            if len(prompt) + len(response) + len(turn) > GAME_CONTEXT:
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


# --- a run without data or model ------------------------------------------------------------------------------------

NUM_EXAMPLES = 2000
"""number of preferences or stories of a run without data"""
NUM_STORIES = 1600
"""number of stories that the small model is trained on, for two epochs"""
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    'sft': {'lr': 3e-3},
    'reward-model': {'lr': 1e-3},
}


def trial_defaults(method: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a method's defaults for the small model, from those for a model of the user."""
    lr = 3e-4 if 'critic_lr' in defaults else 1e-4
    ours = {'lr': lr, 'critic_lr': 1e-3, 'max_new_tokens': 32} | _OWN_DEFAULTS.get(method, {})
    return {name: ours.get(name, value) for name, value in defaults.items()}


def write_demo_model(folder: str | Path, seed: int) -> None:
    """Writes a Hugging Face folder with a small GPT-2 after SFT on stories, and its tokenizer.

    A policy that cannot write a sentence gets the same score for every response, so PPO could not improve it.
    """
    from chatgpt.data import load_demonstrations

    tokenizer = demo_tokenizer()
    stories = load_demonstrations(demo_corpus(NUM_STORIES, seed=0), tokenizer)[0]
    write_trained(folder, seed, demo_config(), tokenizer, stories, max_epochs=2)


def write_game_model(folder: str | Path, seed: int, environment: Any) -> None:
    """Writes a folder with a small GPT-2 after SFT on a random player's moves in the game that `environment` makes."""
    tokenizer = game_tokenizer()
    games = random_games(environment, tokenizer)
    write_trained(folder, seed, game_config(), tokenizer, games, max_epochs=4, lr_schedule='cosine')


def write_trained(
    folder: str | Path, seed: int, config: Any, tokenizer: Any, examples: list[Any], **options: Any
) -> None:
    """Writes a folder with a new GPT-2 after SFT in this process alone, so that its weights do not depend on the number
    of processes. `options`: keywords of the trainer."""
    import torch

    from chatgpt.nn import GPTActor
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.trainer.objectives.sft import SFTTrainer

    python_random = random.getstate()
    with torch.random.fork_rng(), NaiveStrategy(seed=seed) as strategy:
        actor = GPTActor(config=config)
        model, optimizer = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=3e-3)))
        options = {'train_batch_size': 32, 'log_interval': 25, 'tokenizer': tokenizer} | options
        SFTTrainer(strategy, model, optimizer, examples, **options).fit()
        unfinished = Path(folder).with_name(f'.{Path(folder).name}.tmp')
        for old in (unfinished, Path(folder)):
            shutil.rmtree(old, ignore_errors=True)
        actor.save_pretrained(unfinished, tokenizer=tokenizer)
        unfinished.rename(folder)
    random.setstate(python_random)
