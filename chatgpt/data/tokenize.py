"""Examples to ids: `Prompt`, `Sequence`, `TokenizedPreference`, `TokenizedLabelled`.

- The prompt's ids are the same in training and generation: it is tokenized alone, with the begin token if the tokenizer
  adds one. The response's ids are those that the tokenizer appends for both together, or, if that changes the prompt's
  ids, those of the response alone.
- A response ends with the end token, which is trained on, unless it was truncated. So does each of several turns of the
  assistant, unless a chat template ends turns otherwise.
- Only turns of the assistant are in the loss (`response_mask`), up to the special token that ends a turn.
- Text without a prompt has the begin token as its prompt, or without a begin token its first token.
- With overflow='truncate' a prompt that is too long loses tokens on the left (not the begin token), down to half of
  `max_length`; then the response loses tokens on the right. With overflow='refuse' the record is a BadRecord.
- For an encoder-decoder (`formats.note_model`) prompt and response are tokenized separately with the special tokens of
  `formats.frame`, and `max_length` applies to each. There must be a prompt, and the response is one turn.
"""

from __future__ import annotations

import hashlib
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
    """A prompt and its responses, best first."""

    prompt_ids: Tensor
    """(P,) int64, P >= 1"""
    responses: list[Tensor]
    """K tensors (A,) int64, A >= 1, K >= 2"""
    response_masks: list[Tensor]
    """K tensors (A,) bool, True = a token of an assistant's turn"""
    scores: tuple[float, ...] | None = None
    """K numbers, if the data has them (for ties and margins), not increasing"""

    def __post_init__(self) -> None:
        if self.scores is not None:
            check_order(self.scores)

    def ranks(self) -> list[int | None]:
        """Returns a rank per response, 0 for the best; equal scores share a rank. Responses of different ranks make a
        pair. A response with the same tokens as an earlier one gets None and makes no pair."""
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
        """Returns one `Sequence` per response, best first."""
        pairs = zip(self.responses, self.response_masks, strict=True)
        return [Sequence(prompt_ids=self.prompt_ids, response_ids=r, response_mask=m) for r, m in pairs]


@dataclass(kw_only=True, slots=True)
class TokenizedLabelled:
    """A sequence and its label: a class, a bool (True: desirable), or a reward."""

    sequence: Sequence
    label: bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Options of the `tokenize_` functions. Raises ValueError for invalid values.

    max_length: of prompt + response, in tokens, for an encoder-decoder of each; None for no limit.
    overflow: see the module's docstring.
    apply_chat_template: see `formats.use_template`.
    begin: the ids before a prompt without template; None to compute them for each example (`begin_ids`).
    cuts: a list that gets the length of every truncated record, for an encoder-decoder of its longer side.
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
    """Tokenizes a prompt for the model; the length of a truncated one is appended to `cuts`.

    Raises BadRecord if it has no tokens, or more than `max_tokens` unless overflow='truncate', which keeps the begin
    token and the right end."""
    text = render_prompt(example.prompt, tokenizer, apply_chat_template)
    templated = use_template(example.prompt, tokenizer, apply_chat_template)
    ids = prompt_ids(text, tokenizer, templated=templated, begin=begin)
    if not ids:
        raise BadRecord('the prompt has no tokens')
    if max_tokens is not None and len(ids) > max_tokens:
        if overflow == 'refuse':
            raise BadRecord(
                f'the prompt has {len(ids)} tokens, and there is room for {max_tokens} (max_prompt_tokens, or the '
                'context without max_new_tokens); shorten it, or let max_prompt_tokens cut it on the left'
            )
        if cuts is not None:
            cuts.append(len(ids))
        ids = cut_left(ids, max_tokens, tokenizer)
    turns = [turn._asdict() for turn in prompt_turns(example.prompt)] if templated else None
    return Prompt(ids=_ids(ids), text=text, columns=dict(example.columns), messages=turns)


def tokenize_demonstration(
    example: Demonstration | Labelled, tokenizer: Any, options: TokenizerOptions = DEFAULT
) -> Sequence:
    """Tokenizes a demonstration, with its prompt masked out of the loss. Raises BadRecord, and ValueError for a
    tokenizer without end token."""
    prompt, (answer,) = _encode_answers(example.prompt, (example.response,), tokenizer, options)
    return Sequence(
        prompt_ids=_ids(prompt), response_ids=_ids(answer[0]), response_mask=torch.tensor(answer[1], dtype=torch.bool)
    )


def tokenize_labelled(example: Labelled, tokenizer: Any, options: TokenizerOptions = DEFAULT) -> TokenizedLabelled:
    return TokenizedLabelled(sequence=tokenize_demonstration(example, tokenizer, options), label=example.label)


def tokenize_preference(
    example: Preference, tokenizer: Any, options: TokenizerOptions = DEFAULT
) -> TokenizedPreference:
    """Tokenizes a preference, with the same prompt ids for all its responses. Raises BadRecord."""
    prompt, answers = _encode_answers(example.prompt, example.responses, tokenizer, options)
    return TokenizedPreference(
        prompt_ids=_ids(prompt),
        responses=[_ids(ids) for ids, _ in answers],
        response_masks=[torch.tensor(mask, dtype=torch.bool) for _, mask in answers],
        scores=example.scores,
    )


def tokenize_again(prompt: str, response: str, ended: bool, tokenizer: Any, max_length: int | None = None) -> Sequence:
    """Tokenizes a sample's texts with another model's tokenizer, in the form of that model's training data.

    max_length: keeps this number of tokens at the right end, for an encoder-decoder of each side.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    last = [end] if ended and end is not None else []
    filler = 0 if end is None else end  # a model cannot run on an empty side
    if is_for_encoder_decoder(tokenizer):
        prompt_side = prompt_ids(prompt, tokenizer) or [filler]
        answer = [*lone_response(response, tokenizer), *last] or [filler]
        if max_length is not None:
            prompt_side, answer = prompt_side[-max_length:], answer[-max_length:]
    else:
        body, first = encode(prompt, tokenizer), begin_ids(tokenizer)
        answer = [*encode_after(prompt, body, response, tokenizer), *last] or [filler]
        prompt_side = body if first and body[:1] == first else [*first, *body]  # a template may include the begin token
        prompt_side = prompt_side or [filler if begin is None else begin]  # as in training on text without a prompt
        if max_length is not None:
            answer = answer[-max(max_length - 1, 1) :]
            prompt_side = prompt_side[-max(max_length - len(answer), 1) :]
    return Sequence(
        prompt_ids=_ids(prompt_side), response_ids=_ids(answer), response_mask=torch.ones(len(answer), dtype=torch.bool)
    )


# --- ids -----------------------------------------------------------------------------------------------------------


def encode(text: str, tokenizer: Any) -> list[int]:
    """Returns the ids of a text alone, without adding begin or end tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)['input_ids']) if text else []


def prompt_ids(
    text: str, tokenizer: Any, *, templated: bool = False, begin: tuple[int, ...] | None = None
) -> list[int]:
    """Returns the ids of a prompt's text with its special tokens; none for no text.

    Args:
        templated: the text is from a chat template, which includes its own begin token.
        begin: the ids of the begin token, if known, for a model that is not an encoder-decoder.
    """
    body = encode(text, tokenizer)
    if is_for_encoder_decoder(tokenizer):
        before, after, _ = frame(tokenizer)
        return [*([] if templated else before), *body, *after] if body else []
    first = [] if templated else list(begin_ids(tokenizer) if begin is None else begin)
    return body if first and body[: len(first)] == first else [*first, *body]  # a text may hold its begin token


def digest_of(sequences: Iterable[Sequence]) -> str:
    """Returns a hash of the ids and masks of sequences, without labels, by which a resume detects changed data."""
    digest = hashlib.sha256()
    for s in sequences:
        for tensor in (s.prompt_ids, s.response_ids, s.response_mask):
            digest.update(tensor.cpu().numpy().tobytes() + b'|')
    return digest.hexdigest()[:16]


def warn_of_bare_prompt(ids: Tensor, tokenizer: Any) -> None:
    """Warns if a prompt (P,) of an encoder-decoder does not end with the tokens that its tokenizer adds."""
    after = frame(tokenizer).after if is_for_encoder_decoder(tokenizer) else []
    if after and ids[-len(after) :].tolist() != after:
        warnings.warn(
            f'the first prompt does not end with {tokenizer.decode(after)!r}, as the tokenizer ends what an encoder '
            'reads: make prompts with chatgpt.nn.load_tokenizer(...), which knows that the model has one',
            stacklevel=4,
        )


def lone_response(text: str, tokenizer: Any) -> list[int]:
    """Returns the ids of an encoder-decoder's response, without the end token."""
    return [*frame(tokenizer).start, *_encode_target(text, tokenizer)]


def _encode_target(text: str, tokenizer: Any) -> list[int]:
    """`encode` for text of the decoder, with a tokenizer of two languages (Marian)."""
    return list(tokenizer(text_target=text, add_special_tokens=False, verbose=False)['input_ids']) if text else []


def end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError('the tokenizer has no end token, so no response could end; set tokenizer.eos_token')
    return int(tokenizer.eos_token_id)


def encode_after(so_far: str, so_far_ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """Returns the ids of `text` after `so_far`, without changing the ids of `so_far`."""
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
    prompt_text = rendered[0][0].text
    if any(pieces[0].text != prompt_text for pieces in rendered):
        raise BadRecord(
            "the tokenizer's chat template rewrites earlier turns, so answers of several turns have no prompt in common"
        )
    ids = prompt_ids(prompt_text, tokenizer, templated=templated, begin=options.begin)
    if not ids:
        raise BadRecord('the prompt has no tokens')
    if not apart:
        body = encode(prompt_text, tokenizer)
        answers = [_encode_pieces(prompt_text, body, pieces[1:], tokenizer, end, templated) for pieces in rendered]
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
    """Encodes texts without a prompt. Several of them need the same prompt: the begin token, or without one the end
    token."""
    begin = tokenizer.bos_token_id
    bodies = [encode(text if isinstance(text, str) else '', tokenizer) for text in texts]
    bodies = [body[1:] if begin is not None and body[:1] == [begin] else body for body in bodies]
    bodies = [body if body[-1:] == [end] else [*body, end] for body in bodies]  # a text may hold these tokens itself
    if any(len(body) < 2 for body in bodies):
        raise BadRecord('the text has no tokens')
    if begin is None and len(bodies) == 1:
        return _fit(bodies[0][:1], [(bodies[0][1:], [True] * (len(bodies[0]) - 1))], tokenizer, options)
    return _fit([end if begin is None else begin], [(body, [True] * len(body)) for body in bodies], tokenizer, options)


def _encode_pieces(
    prompt_text: str, ids_before: list[int], pieces: list[Piece], tokenizer: Any, end: int, templated: bool
) -> tuple[list[int], list[bool]]:
    so_far, all_ids, mask = prompt_text, list(ids_before), []
    apart = is_for_encoder_decoder(tokenizer)
    for number, piece in enumerate(pieces):
        ids = _encode_target(piece.text, tokenizer) if apart else encode_after(so_far, all_ids, piece.text, tokenizer)
        counts = _turn_length(ids, end, tokenizer) if piece.trained else 0
        is_last = number == len(pieces) - 1
        # A chat template decides how its turns end.
        closed = piece.trained and end not in ids and (is_last or not templated)
        if closed:
            ids = [*ids[:counts], end]
            counts = len(ids)
        elif is_last:
            ids = ids[:counts]
        mask += [i < counts for i in range(len(ids))]
        all_ids += ids
        so_far += piece.text + (tokenizer.eos_token if closed else '')
    return all_ids[len(ids_before) :], mask


def _turn_length(ids: list[int], end: int, tokenizer: Any) -> int:
    """Returns the number of tokens of an assistant's turn that count: up to its end token, or the special token with
    which the template ends it (such as ChatML's) if only white space follows."""
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
    separate = is_for_encoder_decoder(tokenizer)
    length = (max if separate else sum)((len(prompt), longest))
    if limit is None or length <= limit:
        return prompt, answers
    if options.overflow == 'refuse':
        how = 'one of them' if separate else 'together'
        raise BadRecord(f'{len(prompt)} tokens of prompt and {longest} of response, {how} more than max_length={limit}')
    prompt_limit = limit if separate else max(limit - longest, limit // 2)
    if len(prompt) > prompt_limit:
        prompt = cut_left(prompt, prompt_limit, tokenizer)
    left = limit if separate else limit - len(prompt)
    fitted = [(ids[:left], mask[:left]) for ids, mask in answers]
    if not any(chain.from_iterable(mask for _, mask in fitted)):
        raise BadRecord(f'nothing to learn from is left within max_length={limit} tokens')
    if options.cuts is not None:
        options.cuts.append(length)
    return prompt, fitted


def cut_left(ids: list[int], length: int, tokenizer: Any) -> list[int]:
    """Removes tokens on the left, except the begin token, or an encoder-decoder's special tokens there."""
    kept = int(ids[0] == tokenizer.bos_token_id)
    if is_for_encoder_decoder(tokenizer):
        before = frame(tokenizer).before
        kept = len(before) if ids[: len(before)] == before else kept
    kept = kept if length > kept else 0
    return [*ids[:kept], *ids[len(ids) - length + kept :]]


def _ids(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def pack(documents: Iterable[Sequence], block_length: int) -> list[Sequence]:
    """Splits concatenated documents into blocks of `block_length` tokens; only the last block may be shorter.

    Attention crosses document boundaries, as in the pretraining of most language models; the end token that
    `tokenize_demonstration` adds marks them. Neighbouring blocks share one token, so that every token except the first
    is a target exactly once. Masks are those of the documents (prompts are False); a block without tokens that count is
    dropped.

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
    """Raises ValueError for a tokenizer with ids that the model does not have, or without a way to end a response."""
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
    # ignores a family's default that is beyond the vocabulary of a small model
    ends = [end for end in ends if 0 <= end < config.vocab_size]
    if ends and not any(end in vocab.values() for end in ends):
        raise ValueError(
            f"the tokenizer does not match the model: the model's end token has id {ends[0]}, but the tokenizer has "
            f'{len(vocab)} tokens and no such id; use the tokenizer the model was trained with'
        )
    end_id(tokenizer)
