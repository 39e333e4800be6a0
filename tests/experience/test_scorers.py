"""Scorers: functions, models, pipelines and weighted lists, and the errors of faulty ones."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from experience_samples import sample
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chatgpt.data.examples import Demonstration
from chatgpt.data.formats import is_for_encoder_decoder, note_model
from chatgpt.data.rewards import Pattern
from chatgpt.data.tokenize import tokenize_again, tokenize_demonstration
from chatgpt.launch.beside import reward_model_inputs
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import char_tokenizer, encoder_decoder_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.experience import (
    FunctionScorer,
    PipelineScorer,
    RewardFunctionError,
    RewardModelScorer,
    RewardValueError,
    WeightedScorer,
    as_scorer,
)
from chatgpt.trainer.experience.scorers import checksum, described
from chatgpt.types import Batch, Sample


def make(index: int, response: str = 'ab', ended: bool = True, **columns) -> Sample:
    ids = range(3, 4 + len(response))
    texts = {'prompt_text': f'prompt {index}', 'response_text': response, 'columns': columns}
    return sample(index, ids, ended=ended, **texts)


@pytest.fixture
def strategy():
    with NaiveStrategy() as s:
        yield s


def test_function_sees_prompts_responses_and_the_columns_that_it_takes(strategy):
    def takes_all(prompts, responses, **columns):
        assert (prompts, responses) == (['prompt 0', 'prompt 1'], ['a', 'bcd'])
        assert columns == {'answer': ['a', 'y'], 'other': [1, 2]}
        return [float(len(r)) for r in responses]

    def names_one(prompts, responses, answer):
        return [1.0 if r == a else 0.0 for r, a in zip(responses, answer, strict=True)]

    samples = [make(0, 'a', answer='a', other=1), make(1, 'bcd', answer='y', other=2)]
    assert FunctionScorer(takes_all).score(samples, strategy) == [1.0, 3.0]
    assert FunctionScorer(names_one).score(samples, strategy) == [1.0, 0.0]
    scores = FunctionScorer(lambda prompts, responses: [[0.0, 1.0, 2.0]]).score([make(0, 'ab')], strategy)
    assert torch.equal(scores[0], torch.tensor([0.0, 1.0, 2.0]))


def raises(prompts, responses):
    raise KeyError('no such answer')


def hangs(prompts, responses):
    threading.Event().wait(5)


@pytest.mark.parametrize(
    ('fn', 'message'),
    [
        (raises, "reward function raises raised KeyError: 'no such answer'"),
        (hangs, r'reward function hangs did not return within 0\.2 s'),
        (lambda p, r: [1.0], r'returned 1 scores for 2 responses'),
        (lambda p, r: [1.0, float('nan')], r'returned nan for sample 8'),
        (lambda p, r: [1.0, None], r'returned None for sample 8'),
        (lambda p, r: 3.0, r'returned float; return a list'),
        (lambda p, r: '10', r'returned a str; return a list'),
        (lambda p, r: {1: 'a', 2: 'b'}, r'returned a dict; return a list'),
        (lambda p, r: {1.0, 2.0}, r'returned a set; return a list'),
        (lambda p, r: ['abc', 'abc'], r"returned 'abc' for sample 7 \('prompt 7' → 'ab'\); return a number"),
        (
            lambda p, r: [['1', '2', '3'], [0.0] * 3],
            r"returned '1' for sample 7 \('prompt 7' → 'ab'\); return a number",
        ),
        (lambda p, r: [[None, 1.0, 1.0], [0.0] * 3], r'returned None for sample 7 .*; return a number'),
        (lambda p, r: [[1.0], [1.0, 2.0, 3.0]], r'1 token scores for sample 7 .*, whose response has 3 tokens'),
    ],
)
def test_a_misbehaving_function_is_named(fn, message, strategy):
    with pytest.raises(RewardFunctionError, match=message):
        FunctionScorer(fn, timeout_s=0.2 if fn is hangs else 600.0).score([make(7), make(8)], strategy)


def test_a_wrong_value_says_where_the_function_is_defined(strategy):
    def counts(prompts, responses):
        return 'ten'

    class Counts:
        def __call__(self, prompts, responses):
            return [0.0]

    for fn, line in ((counts, 'def counts(prompts, responses):'), (Counts(), 'class Counts:')):
        with pytest.raises(RewardValueError, match=f'; it is defined at {line_of(line)}$'):
            FunctionScorer(fn).score([make(7), make(8)], strategy)
    with pytest.raises(RewardFunctionError) as raised:  # may pass on a retry
        FunctionScorer(lambda p, r: [float('nan')]).score([make(7)], strategy)
    assert type(raised.value) is RewardFunctionError


def leaves(prompts, responses):
    sys.exit(3)


async def leaves_later(prompts, responses):
    await asyncio.sleep(0)
    leaves(prompts, responses)


class LeavesSilently:
    def __call__(self, prompts, responses):
        raise SystemExit


def line_of(text: str) -> str:
    """Returns file:line of a line of this file."""
    lines = Path(__file__).read_text().splitlines()
    return f'{__file__}:{next(i for i, line in enumerate(lines, 1) if line.strip() == text)}'


@pytest.mark.parametrize('timeout', [None, 5.0])
@pytest.mark.parametrize(
    ('fn', 'what', 'line'),
    [
        (leaves, 'leaves raised SystemExit: 3', 'sys.exit(3)'),
        (leaves_later, 'leaves_later raised SystemExit: 3', 'sys.exit(3)'),
        (LeavesSilently(), 'LeavesSilently raised SystemExit', 'raise SystemExit'),
        (raises, "raises raised KeyError: 'no such answer'", "raise KeyError('no such answer')"),
        (
            lambda p, r: [torch.zeros(2) @ torch.zeros(3)],
            'RuntimeError: ',
            '(lambda p, r: [torch.zeros(2) @ torch.zeros(3)],',
        ),
    ],
)
def test_an_error_or_an_exit_in_a_function_names_its_line(fn, what, line, timeout, strategy):
    with pytest.raises(RewardFunctionError) as failed:
        FunctionScorer(fn, timeout_s=timeout).score([make(0)], strategy)
    assert what in str(failed.value)
    expected = line_of(line) if 'lambda' not in line else __file__ + ':'
    assert f', at {expected}' in str(failed.value)


async def slow_length(prompts, responses):
    numbers = await asyncio.gather(*(asyncio.sleep(0, len(r)) for r in responses))
    return [float(n) for n in numbers]


class AsyncLength:
    async def __call__(self, prompts, responses):
        return await slow_length(prompts, responses)


@pytest.mark.parametrize('timeout', [None, 5.0])
@pytest.mark.parametrize('fn', [slow_length, AsyncLength(), AsyncLength])
def test_a_coroutine_function_is_awaited(fn, timeout, strategy):
    samples = [make(0, 'a'), make(1, 'bcd')]
    assert as_scorer(fn, timeout_s=timeout).score(samples, strategy) == [1.0, 3.0]
    assert as_scorer([(2.0, fn)], timeout_s=timeout).score(samples, strategy) == [2.0, 6.0]


def test_all_calls_of_coroutines_share_a_loop_where_one_runs_already_too(strategy):
    loops = []

    async def fn(prompts, responses):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(responses)

    async def notebook():
        return FunctionScorer(slow_length).score([make(0, 'ab')], strategy)

    assert asyncio.run(notebook()) == [2.0]
    for timeout in (None, None, 5.0):
        FunctionScorer(fn, timeout_s=timeout).score([make(0)], strategy)
    assert loops[0] is loops[1] is loops[2] and not loops[0].is_closed()


class LastId(nn.Module):
    """A model that scores a sequence with its last real token id."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.input_ids.flatten()[batch.last_index].float()


def test_model_scores_do_not_depend_on_the_micro_batches(strategy):
    samples = [make(0, 'a'), make(1, 'abcde'), make(2, 'ab')]
    whole = RewardModelScorer(LastId()).score(samples, strategy)
    cut = RewardModelScorer(LastId(), max_tokens_per_batch=8).score(samples, strategy)
    assert whole == cut == [4.0, 8.0, 5.0]

    class Broken(LastId):
        def forward(self, batch: Batch) -> torch.Tensor:
            return super().forward(batch) * float('nan')

    with pytest.raises(RewardFunctionError, match='the reward model gave nan for sample 0'):
        RewardModelScorer(Broken()).score(samples, strategy)


class Letters:
    """A tokenizer that differs from the policy's: one id per letter."""

    bos_token_id = None
    eos_token_id = 1

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return {'input_ids': [100 + ord(c) - ord('a') for c in text if c.isalpha()]}


def test_a_reward_model_with_another_tokenizer_reads_text(strategy):
    class Total(nn.Module):
        def forward(self, batch: Batch) -> torch.Tensor:
            return (batch.input_ids * batch.attention_mask).sum(-1).float()

    scores = RewardModelScorer(Total(), tokenizer=Letters()).score([make(0, 'ab'), make(1, 'c', ended=False)], strategy)
    prompt = sum(100 + ord(c) - ord('a') for c in 'prompt')
    assert scores == [prompt + 100 + 101 + 1, prompt + 102]  # an end token only if the response ended


def ended_twice() -> Any:
    """Returns a tokenizer that adds a begin token, an end token, and a space before the first word of every text."""
    all_words = ['<pad>', '<s>', '</s>', '\u2581', *(f'\u2581{w}' for w in ('one', 'day', 'fox')), *'onedayfx,.']
    words = {w: i for i, w in enumerate(all_words)}
    tokenizer = Tokenizer(models.BPE(vocab=dict.fromkeys(words, 0) | {w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    tokenizer.pre_tokenizer = pre_tokenizers.Split('\u2581', 'merged_with_next')
    tokenizer.post_processor = processors.TemplateProcessing(
        single='<s> $A </s>', special_tokens=[('<s>', words['<s>']), ('</s>', words['</s>'])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>', pad_token='<pad>')


def shared_tokenizer(name: str) -> Any:
    folder = Path(__file__).resolve().parents[3] / 'shared' / 'models' / name
    if not folder.is_dir():
        pytest.skip(f'needs {folder.name} of the shared models')
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize('which', ['ends by itself', 'gpt2_tokenizer', 'stories260K'])
def test_a_reward_model_with_another_tokenizer_is_scored_on_the_tokens_of_its_training(which):
    tokenizer = ended_twice() if which == 'ends by itself' else shared_tokenizer(which)
    pairs = [('one day', ' fox.'), ('one day', 'fox.'), ('one day ', 'fox'), ('one day, one', 'day fox')]
    for prompt, response in [*pairs, ('', 'one fox.'), ('one', 'ed')]:
        read = tokenize_again(prompt, response, True, tokenizer)
        ids = [*read.prompt_ids.tolist(), *read.response_ids.tolist()]
        trained = tokenize_demonstration(Demonstration(prompt=prompt, response=response), tokenizer)
        assert ids == [*trained.prompt_ids.tolist(), *trained.response_ids.tolist()]
        assert ids[1:].count(tokenizer.eos_token_id) == 1  # the first may be a begin token with the same id
        begin = [tokenizer.bos_token_id] if which != 'gpt2_tokenizer' else []
        if prompt == 'one day' and response.startswith(' '):
            whole = tokenizer(prompt + response, add_special_tokens=False)['input_ids']
            assert ids == [*begin, *whole, tokenizer.eos_token_id]  # tokenized as one text
        # Negative control: the parts tokenized separately, each with special tokens.
        apart = [*tokenizer(prompt)['input_ids'], *tokenizer(response, add_special_tokens=False)['input_ids']]
        assert which != 'ends by itself' or ids != [*apart, tokenizer.eos_token_id]
    assert tokenize_again(prompt, response, False, tokenizer).response_ids[-1] != tokenizer.eos_token_id


class FakePipeline:
    """A fake of `transformers.pipeline('text-classification', top_k=None)`."""

    task = 'text-classification'

    class model:
        class config:
            id2label = {0: 'NEGATIVE', 1: 'POSITIVE'}

    def __call__(self, texts, top_k, batch_size):
        return [[{'label': 'POSITIVE', 'score': len(t) / 100}, {'label': 'NEGATIVE', 'score': 0.0}] for t in texts]


def test_pipeline(strategy):
    scores = PipelineScorer(FakePipeline(), label='POSITIVE').score([make(0, 'ab')], strategy)
    assert scores == [len('prompt 0ab') / 100]
    with pytest.raises(ValueError, match='has labels .* say whose score counts'):
        PipelineScorer(FakePipeline())
    with pytest.raises(ValueError, match="no label 'JOY'"):
        PipelineScorer(FakePipeline(), label='JOY')


def test_weighted_list_adds_and_puts_sequence_scores_at_the_last_token_that_counts(strategy):
    mixed = as_scorer([(2.0, lambda p, r: [3.0]), (0.5, lambda p, r: [[1.0, 1.0, 1.0]])])
    assert isinstance(mixed, WeightedScorer)
    masked = make(0, 'ab')
    masked.response_mask = torch.tensor([True, True, False])
    assert mixed.score([masked], strategy)[0].tolist() == [0.5, 6.5, 0.5]


@pytest.mark.parametrize(
    ('bad', 'message'),
    [
        (3, 'reward_model must be'),
        ([lambda p, r: [1.0]], r'holds \(weight, reward\) pairs'),
        ([], 'at least one'),
        (nn.Bilinear, '^Bilinear is a class with arguments of its own .*in1_features.*; give an object'),
        (list, '^list is a class whose objects cannot be called as fn'),
    ],
)
def test_as_scorer_refuses(bad, message):
    with pytest.raises(ValueError, match=message):
        as_scorer(bad)


# ---------------------------------------------------------------- on two processes


async def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(r)) for r in responses]


def exits(prompts: list[str], responses: list[str]) -> list[float]:
    sys.exit(0)


def scored() -> tuple[list[float], str]:
    """Returns this rank's scores by a coroutine function, and the error of a function that exits."""
    with DDPStrategy(device='cpu') as strategy:
        samples = [sample(i, response_text='x' * i) for i in (strategy.rank, strategy.rank + 2)]
        numbers = [float(s) for _ in range(2) for s in FunctionScorer(lengths).score(samples, strategy)]
        try:
            FunctionScorer(exits).score(samples, strategy)
        except RuntimeError as error:
            return numbers, str(error)
        return numbers, 'nothing was raised'


def test_on_two_ranks():
    (first, error), (second, other_error) = run_distributed(scored, 2)
    assert first == [0.0, 2.0] * 2 and second == [1.0, 3.0] * 2
    assert 'reward function exits raised SystemExit: 0, at ' in error and '.py:' in error
    assert error in other_error


# ---------------------------------------------------------------- a reward model of another kind than the policy


class Rows(nn.Module):
    """A model that records its input rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[int], int]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        for row in range(batch.num_sequences):
            actions = int((batch.action_rows == row).sum())
            self.seen.append((batch.input_ids[row][batch.attention_mask[row]].tolist(), actions))
        return torch.zeros(batch.num_sequences)


@pytest.mark.parametrize(
    ('family', 'prompt', 'response', 'ended', 'options', 'row', 'actions'),
    [
        ('t5', 'ab', 'cd', True, {}, [6, 7, 2, 8, 9, 2], 3),
        ('t5', 'ab', 'cd', False, {}, [6, 7, 2, 8, 9], 2),
        ('bart', 'ab', 'cd', True, {}, [1, 6, 7, 2, 1, 8, 9, 2], 4),
        ('t5', 'abcd', 'a', True, {'max_length': 3}, [8, 9, 2, 6, 2], 2),
        ('t5', 'ab', '', False, {}, [6, 7, 2, 2], 1),
    ],
)
def test_rows_of_an_encoder_decoder(family, prompt, response, ended, options, row, actions):
    given = sample(prompt_text=prompt, response_text=response, ended=ended)
    tokenizer, model = encoder_decoder_tokenizer(family), Rows()
    note_model(tokenizer, tiny_config(family))
    RewardModelScorer(model, tokenizer=tokenizer, **options).score([given], NaiveStrategy())
    assert model.seen == [(row, actions)]


def test_a_folder_of_the_other_kind_brings_a_tokenizer_of_its_own(tmp_path: Path):
    for family in ('t5', 'bart', 'gpt2'):
        tiny_config(family, positions=32).save_pretrained(tmp_path / family)
    char_tokenizer().save_pretrained(tmp_path / 'gpt2')
    policy = encoder_decoder_tokenizer('bart')
    note_model(policy, tiny_config('bart'))
    # the same kind and vocabulary: ids are used directly, 31 on each side
    assert reward_model_inputs(str(tmp_path / 'bart'), policy) == (None, 31)
    own, context = reward_model_inputs(str(tmp_path / 'gpt2'), policy)
    assert own is not None and own is not policy and not is_for_encoder_decoder(own) and context == 32
    decoder = char_tokenizer()
    own, context = reward_model_inputs(str(tmp_path / 't5'), decoder)  # the folder has no tokenizer
    assert is_for_encoder_decoder(own) and not is_for_encoder_decoder(decoder) and context is None


# ---------------------------------------------------------------- descriptions: equal if rewards score alike

FILE = """
seen = []
class Reward:
    def __init__(self, scale=1.0):
        self.scale, self.calls = scale, 0
    def __call__(self, prompts, responses):
        self.calls += 1
        return [self.scale * {body} for text in responses]
def score(prompts, responses):
    seen.append(responses)
    return [{body} for text in responses]
def scaled(prompts, responses, k):
    return [k * {body} for text in responses]
def unused():
    return {unused}
"""


def reward_file(path: Path, body: str = 'len(text)', unused: int = 0) -> Any:
    path.parent.mkdir(exist_ok=True)
    path.write_text(FILE.format(body=body, unused=unused))
    spec = importlib.util.spec_from_file_location(f'{path.parent.name}_{path.stem}', path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where inspect finds a class
    spec.loader.exec_module(module)
    return module


def description(reward: Any) -> Any:
    return described(as_scorer(reward))


@pytest.mark.parametrize(
    'reward',
    [
        lambda module: module.score,
        lambda module: module.Reward(),
        lambda module: functools.partial(module.scaled, k=1),
        lambda module: [(0.5, module.score), (1.0, module.Reward())],
    ],
)
def test_a_changed_body_changes_the_description_and_unused_code_does_not(tmp_path, reward):
    first = description(reward(reward_file(tmp_path / 'a' / 'r.py')))
    assert description(reward(reward_file(tmp_path / 'b' / 'r.py', unused=1))) == first
    assert description(reward(reward_file(tmp_path / 'c' / 'r.py', body='-len(text)'))) != first


def test_arguments_and_attributes_change_the_description(tmp_path):
    module = reward_file(tmp_path / 'a' / 'r.py')
    assert description(functools.partial(module.scaled, k=1)) != description(functools.partial(module.scaled, k=2))
    assert description(module.Reward(1.0)) == description(module.Reward(1.0)) != description(module.Reward(2.0))
    assert description(Pattern('a')) == description(Pattern('a')) != description(Pattern('b'))

    def closed(k: float) -> Any:
        return lambda prompts, responses: [k * len(r) for r in responses]

    assert description(closed(1.0)) == description(closed(1.0)) != description(closed(2.0))


def test_state_of_a_function_does_not_change_its_description(tmp_path):
    module = reward_file(tmp_path / 'a' / 'r.py')
    for reward in (module.score, module.Reward()):
        scorer = as_scorer(reward)
        before = described(scorer)
        scorer.fn(['a'], ['b'])
        assert described(scorer) == before
    assert module.seen and description(module.score) == described(as_scorer(module.score))


def test_a_function_whose_file_is_not_its_source(tmp_path, monkeypatch):
    """A function without source, since its code runs under the name of a page, is described by its name."""
    (tmp_path / 'page.md').write_text('a (bracket that\nnever ends\n')
    monkeypatch.chdir(tmp_path)
    names: dict = {'__name__': 'page'}
    exec(compile('score = lambda prompts, responses: [1.0]', 'page.md', 'exec'), names)
    assert checksum(names['score'])  # by its name
