"""From examples in text form to ids: `Prompt`, `Sequence`, `TokenizedPreference`, `TokenizedLabelled`.

- The prompt's ids are the same in training as in generation: tokenized on their own, with the begin token where the
  tokenizer adds one by itself. The answer's ids are what the tokenizer appends when it sees both, or, where it would
  change the prompt's ids, those of the answer alone.
- A response ends with the end token, which is trained on, unless it was cut for length. Each of several turns of the
  assistant does, except that a tokenizer's own chat template closes turns as it likes.
- Only turns of the assistant are in the loss (`response_mask`), up to the special token that closes a turn.
- Text without a prompt has the begin token as its prompt, or its first token where the tokenizer has no begin token.
- Too long, with overflow='truncate': the prompt loses its left end (its begin token stays), but never below half of
  `max_length`; then the response loses its right end. With overflow='refuse' it is a BadRecord.
- Prompt and response of an encoder-decoder (`formats.note_model`) are tokenized each on its own with the special tokens
  of `formats.frame`, and `max_length` holds for each. There has to be a prompt, and the response is one turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from chatgpt.data.examples import (
    BadRecord,
    Demonstration,
    Labelled,
    Preference,
    PromptExample,
    PromptText,
    ResponseText,
    check_order,
)
from chatgpt.data.formats import (
    Piece,
    begin_ids,
    frame,
    is_for_encoder_decoder,
    prompt_turns,
    render,
    render_prompt,
    use_template,
)
from chatgpt.types import Prompt, Sequence

Overflow = Literal['truncate', 'refuse']


@dataclass(kw_only=True, slots=True)
class TokenizedPreference:
    """A prompt and its answers, best first."""

    prompt_ids: Tensor
    """(P,) int64, P >= 1"""
    responses: list[Tensor]
    """K tensors (A,) int64, A >= 1, K >= 2"""
    response_masks: list[Tensor]
    """K tensors (A,) bool, True = a token of an assistant's turn"""
    scores: tuple[float, ...] | None = None
    """K numbers, where the data gives them (for ties and margins); none is higher than the one before it"""

    def __post_init__(self) -> None:
        if self.scores is not None:
            check_order(self.scores)

    def ranks(self) -> list[int | None]:
        """One per answer, 0 the best; answers of equal score share a rank. Two answers make a pair where ranks differ.
        An answer that repeats an earlier one token for token gets None and makes no pair."""
        ranks: list[int | None] = []
        seen: set[tuple[int, ...]] = set()
        for place, response in enumerate(self.responses):
            tokens = tuple(response.tolist())
            ranks.append(
                None if tokens in seen else place if self.scores is None else self.scores.index(self.scores[place])
            )
            seen.add(tokens)
        return ranks

    @property
    def has_pair(self) -> bool:
        return len(set(self.ranks()) - {None}) > 1

    @property
    def num_tokens(self) -> int:
        return sum(len(self.prompt_ids) + len(r) for r in self.responses)

    def sequences(self) -> list[Sequence]:
        """One `Sequence` for each answer, best first."""
        pairs = zip(self.responses, self.response_masks, strict=True)
        return [Sequence(prompt_ids=self.prompt_ids, response_ids=r, response_mask=m) for r, m in pairs]


@dataclass(kw_only=True, slots=True)
class TokenizedLabelled:
    """A sequence and its label: a class, a bool (True: desirable), or a reward."""

    sequence: Sequence
    label: bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """What the `tokenize_` functions have in common. Raises ValueError for values that make no sense.

    max_length: of prompt + response, in tokens, of an encoder-decoder of each; None: no limit.
    overflow: see the module's docstring.
    apply_chat_template: see `formats.use_template`.
    begin: the ids that stand before a prompt without template; None: found out for each example (`begin_ids`).
    cuts: the tokens of every record that was cut are added here, of an encoder-decoder those of its longer side.
    """

    max_length: int | None = None
    overflow: Overflow = 'truncate'
    apply_chat_template: bool | None = None
    begin: tuple[int, ...] | None = None
    cuts: list[int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f'max_length={self.max_length}; give at least 2 (one token of prompt, one of response)')
        if self.overflow not in ('truncate', 'refuse'):
            raise ValueError(f"overflow={self.overflow!r}; give 'truncate' or 'refuse'")


DEFAULT = TokenizerOptions()


def tokenize_prompt(
    example: PromptExample,
    tokenizer: Any,
    *,
    max_tokens: int | None = None,
    overflow: Overflow = 'refuse',
    apply_chat_template: bool | None = None,
    begin: tuple[int, ...] | None = None,
    cuts: list[int] | None = None,
) -> Prompt:
    """A prompt as the model is given it; to `cuts` the tokens of one that was cut are added.

    Raises BadRecord when it has no tokens, or more than `max_tokens` unless overflow='truncate', which keeps the begin
    token and the right end."""
    text = render_prompt(example.prompt, tokenizer, apply_chat_template)
    templated = use_template(example.prompt, tokenizer, apply_chat_template)
    ids = prompt_ids(text, tokenizer, templated=templated, begin=begin)
    if not ids:
        raise BadRecord('the prompt has no tokens')
    if max_tokens is not None and len(ids) > max_tokens:
        if overflow == 'refuse':
            raise BadRecord(
                f'the prompt has {len(ids)} tokens, more than {max_tokens}; shorten it, or allow cutting it on the left'
            )
        if cuts is not None:
            cuts.append(len(ids))
        ids = cut_left(ids, max_tokens, tokenizer)
    turns = [turn._asdict() for turn in prompt_turns(example.prompt)] if templated else None
    return Prompt(ids=_ids(ids), text=text, columns=dict(example.columns), messages=turns)


def tokenize_demonstration(
    example: Demonstration | Labelled, tokenizer: Any, options: TokenizerOptions = DEFAULT
) -> Sequence:
    """A demonstration to learn from, prompt masked out of the loss. Raises BadRecord, ValueError for a tokenizer
    without end token."""
    prompt, (answer,) = _encode_answers(example.prompt, (example.response,), tokenizer, options)
    return Sequence(
        prompt_ids=_ids(prompt), response_ids=_ids(answer[0]), response_mask=torch.tensor(answer[1], dtype=torch.bool)
    )


def tokenize_labelled(example: Labelled, tokenizer: Any, options: TokenizerOptions = DEFAULT) -> TokenizedLabelled:
    return TokenizedLabelled(sequence=tokenize_demonstration(example, tokenizer, options), label=example.label)


def tokenize_preference(
    example: Preference, tokenizer: Any, options: TokenizerOptions = DEFAULT
) -> TokenizedPreference:
    """A preference: the same prompt ids for all its answers. Raises BadRecord."""
    prompt, answers = _encode_answers(example.prompt, example.responses, tokenizer, options)
    return TokenizedPreference(
        prompt_ids=_ids(prompt),
        responses=[_ids(ids) for ids, _ in answers],
        response_masks=[torch.tensor(mask, dtype=torch.bool) for _, mask in answers],
        scores=example.scores,
    )


def tokenize_again(prompt: str, response: str, ended: bool, tokenizer: Any, max_length: int | None = None) -> Sequence:
    """The texts of a sample by another tokenizer, as a model of that tokenizer was trained on them.

    max_length: the right end of so many tokens is kept, of an encoder-decoder on each side.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    last = [end] if ended and end is not None else []
    stand_in = 0 if end is None else end  # an empty side would leave nothing to compute on
    if is_for_encoder_decoder(tokenizer):
        asked = prompt_ids(prompt, tokenizer) or [stand_in]
        answer = [*lone_response(response, tokenizer), *last] or [stand_in]
        if max_length is not None:
            asked, answer = asked[-max_length:], answer[-max_length:]
    else:
        body, first = encode(prompt, tokenizer), begin_ids(tokenizer)
        answer = [*encode_after(prompt, body, response, tokenizer), *last] or [stand_in]
        asked = body if first and body[:1] == first else [*first, *body]  # a template may have written its own
        asked = asked or [stand_in if begin is None else begin]  # as text without a prompt is trained on
        if max_length is not None:
            answer = answer[-max(max_length - 1, 1) :]
            asked = asked[-max(max_length - len(answer), 1) :]
    return Sequence(
        prompt_ids=_ids(asked), response_ids=_ids(answer), response_mask=torch.ones(len(answer), dtype=torch.bool)
    )


# --- ids -----------------------------------------------------------------------------------------------------------


def encode(text: str, tokenizer: Any) -> list[int]:
    """The ids of a text alone, without begin or end tokens added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']) if text else []


def prompt_ids(
    text: str, tokenizer: Any, *, templated: bool = False, begin: tuple[int, ...] | None = None
) -> list[int]:
    """The ids of a prompt's text with its special tokens; none for no text.

    Args:
        templated: a chat template wrote it, which writes its own begin token.
        begin: known ids of the begin token, where it is no encoder-decoder's.
    """
    body = encode(text, tokenizer)
    if is_for_encoder_decoder(tokenizer):
        before, after, _ = frame(tokenizer)
        return [*([] if templated else before), *body, *after] if body else []
    return [*([] if templated else begin_ids(tokenizer) if begin is None else begin), *body]


def warn_of_bare_prompt(ids: Tensor, tokenizer: Any) -> None:
    """Say that a prompt (P,) of an encoder-decoder does not end as its tokenizer ends one by itself."""
    after = frame(tokenizer).after if is_for_encoder_decoder(tokenizer) else []
    if after and ids[-len(after) :].tolist() != after:
        warnings.warn(
            f'the first prompt does not end with {tokenizer.decode(after)!r}, as the tokenizer ends what an encoder '
            'reads: make prompts with chatgpt.nn.load_tokenizer(...), which knows that the model has one',
            stacklevel=4,
        )


def lone_response(text: str, tokenizer: Any) -> list[int]:
    """The ids of a response of an encoder-decoder, which follow no prompt, without the end token."""
    return [*frame(tokenizer).start, *_encode_target(text, tokenizer)]


def _encode_target(text: str, tokenizer: Any) -> list[int]:
    """`encode` as a tokenizer of two languages (Marian) cuts what the decoder writes."""
    return list(tokenizer(text_target=text, add_special_tokens=False, verbose=False)['input_ids']) if text else []


def end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError('the tokenizer has no end token, so no response could end; set tokenizer.eos_token')
    return int(tokenizer.eos_token_id)


def encode_after(so_far: str, so_far_ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """The ids of `text` as they follow `so_far`, whose ids stay as they are."""
    whole = encode(so_far + text, tokenizer)
    if so_far_ids and whole[: len(so_far_ids)] == so_far_ids:
        return whole[len(so_far_ids) :]
    return encode(text, tokenizer)


def _encode_answers(
    prompt: PromptText, responses: tuple[ResponseText, ...], tokenizer: Any, options: TokenizerOptions
) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
    end = end_id(tokenizer)
    templated, apart = use_template(prompt, tokenizer, options.apply_chat_template), is_for_encoder_decoder(tokenizer)
    if prompt == '' and apart:
        raise BadRecord('a text without a prompt, and an encoder-decoder needs one to read; give prompt and response')
    if prompt == '':
        return _encode_texts(responses, tokenizer, end, options)
    rendered = [render(prompt, response, tokenizer, options.apply_chat_template) for response in responses]
    asked = rendered[0][0].text
    ids = prompt_ids(asked, tokenizer, templated=templated, begin=options.begin)
    if not ids:
        raise BadRecord('the prompt has no tokens')
    if not apart:
        body = encode(asked, tokenizer)
        answers = [_encode_pieces(asked, body, pieces[1:], tokenizer, end, templated) for pieces in rendered]
    elif any(len(pieces) > 2 for pieces in rendered):
        raise BadRecord(
            'a response of several turns, and an encoder-decoder writes one; give the turns before it as the prompt'
        )
    else:
        answers = [_encode_pieces('', [], pieces[1:], tokenizer, end, templated) for pieces in rendered]
        start = frame(tokenizer).start
        answers = [([*start, *answer], [*([True] * len(start)), *mask]) for answer, mask in answers]
    return _fit(ids, answers, tokenizer, options)


def _encode_texts(
    texts: tuple[ResponseText, ...], tokenizer: Any, end: int, options: TokenizerOptions
) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
    """Texts without a prompt. Several of them need the same prompt, hence a begin token, or the end token in its
    place."""
    bodies = [[*encode(text if isinstance(text, str) else '', tokenizer), end] for text in texts]
    if any(len(body) < 2 for body in bodies):
        raise BadRecord('the text has no tokens')
    begin = tokenizer.bos_token_id
    if begin is None and len(bodies) == 1:
        return _fit(bodies[0][:1], [(bodies[0][1:], [True] * (len(bodies[0]) - 1))], tokenizer, options)
    return _fit([end if begin is None else begin], [(body, [True] * len(body)) for body in bodies], tokenizer, options)


def _encode_pieces(
    asked: str, asked_ids: list[int], pieces: list[Piece], tokenizer: Any, end: int, templated: bool
) -> tuple[list[int], list[bool]]:
    so_far, all_ids, mask = asked, list(asked_ids), []
    apart = is_for_encoder_decoder(tokenizer)
    for number, piece in enumerate(pieces):
        ids = _encode_target(piece.text, tokenizer) if apart else encode_after(so_far, all_ids, piece.text, tokenizer)
        counts = _turn_length(ids, end, tokenizer) if piece.trained else 0
        is_last = number == len(pieces) - 1
        # A template's own turns stay as it writes them.
        closed = piece.trained and end not in ids and (is_last or not templated)
        if closed:
            ids = [*ids[:counts], end]
            counts = len(ids)
        elif is_last:
            ids = ids[:counts]
        mask += [i < counts for i in range(len(ids))]
        all_ids += ids
        so_far += piece.text + (tokenizer.eos_token if closed else '')
    return all_ids[len(asked_ids) :], mask


def _turn_length(ids: list[int], end: int, tokenizer: Any) -> int:
    """How much of a turn of the assistant counts: up to its end token, or to the special token that the template closes
    it with (such as ChatML's) where only white space follows that."""
    if end in ids:
        return ids.index(end) + 1
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}.union(
        tokenizer.all_special_ids
    )
    last = next((i for i in reversed(range(len(ids))) if ids[i] in special), None)
    return last + 1 if last is not None and not tokenizer.decode(ids[last + 1 :]).strip() else len(ids)


def _fit(
    prompt: list[int], answers: list[tuple[list[int], list[bool]]], tokenizer: Any, options: TokenizerOptions
) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
    limit, longest = options.max_length, max(len(ids) for ids, _ in answers)
    apart = is_for_encoder_decoder(tokenizer)
    length = (max if apart else sum)((len(prompt), longest))
    if limit is None or length <= limit:
        return prompt, answers
    if options.overflow == 'refuse':
        how = 'one of them' if apart else 'together'
        raise BadRecord(f'{len(prompt)} tokens of prompt and {longest} of response, {how} more than max_length={limit}')
    room = limit if apart else max(limit - longest, limit // 2)
    if len(prompt) > room:
        prompt = cut_left(prompt, room, tokenizer)
    left = limit if apart else limit - len(prompt)
    fitted = [(ids[:left], mask[:left]) for ids, mask in answers]
    if not any(chain.from_iterable(mask for _, mask in fitted)):
        raise BadRecord(f'nothing to learn from is left within max_length={limit} tokens')
    if options.cuts is not None:
        options.cuts.append(length)
    return prompt, fitted


def cut_left(ids: list[int], length: int, tokenizer: Any) -> list[int]:
    """Without tokens at the left, but for the begin token, or whatever stands there of an encoder-decoder."""
    kept = int(ids[0] == tokenizer.bos_token_id)
    if is_for_encoder_decoder(tokenizer):
        before = frame(tokenizer).before
        kept = len(before) if ids[: len(before)] == before else kept
    kept = kept if length > kept else 0
    return [*ids[:kept], *ids[len(ids) - length + kept :]]


def _ids(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def pack(documents: Iterable[Sequence], block_length: int) -> list[Sequence]:
    """Documents in the order given, cut into blocks of `block_length` tokens; only the last block may be shorter.

    Attention is not stopped at the border of documents, as in the pretraining of most language models: the end token,
    with which `tokenize_demonstration` leaves them, tells where a new one begins. Neighbouring blocks share one token,
    which is a state in the second, so every token but the very first is a target exactly once. Masks are those of the
    documents (prompts are False); a block in which nothing counts is left out.

    Raises ValueError for a block_length under 2 or no documents.
    """
    if block_length < 2:
        raise ValueError(f'block_length={block_length}; give at least 2, the state and one token to predict')
    ids, mask = [], []
    for document in documents:
        ids += [document.prompt_ids, document.response_ids]
        mask += [torch.zeros(len(document.prompt_ids), dtype=torch.bool), document.response_mask]
    if not ids:
        raise ValueError('pack: no documents given')
    all_ids, all_mask = torch.cat(ids), torch.cat(mask)
    blocks = []
    for start in range(0, len(all_ids) - 1, block_length - 1):
        block, counts = all_ids[start : start + block_length], all_mask[start + 1 : start + block_length]
        if counts.any():
            blocks.append(
                Sequence(prompt_ids=block[:1].clone(), response_ids=block[1:].clone(), response_mask=counts.clone())
            )
    return blocks


def check_tokenizer(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer whose ids the model does not have, or that cannot end a response.

    Raises:
        ValueError: one line with what was found and what to do.
    """
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    vocab = tokenizer.get_vocab()
    largest = max(vocab.values(), default=-1)
    if largest >= config.vocab_size:
        token = next(t for t, i in vocab.items() if i == largest)
        raise ValueError(
            f'the tokenizer does not match the model: its token {token!r} has id {largest}, but the model has a '
            f'vocabulary of {config.vocab_size}; use the tokenizer the model was trained with, or resize its embeddings'
        )
    given = getattr(config, 'eos_token_id', None)
    ends = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    # a family's default beyond the vocabulary of a small model says nothing
    ends = [end for end in ends if 0 <= end < config.vocab_size]
    if ends and not any(end in vocab.values() for end in ends):
        raise ValueError(
            f"the tokenizer does not match the model: the model's end token has id {ends[0]}, but the tokenizer has "
            f'{len(vocab)} tokens and no such id; use the tokenizer the model was trained with'
        )
    if tokenizer.eos_token_id is None:
        raise ValueError('the tokenizer has no end token, so no response could end; set tokenizer.eos_token')
