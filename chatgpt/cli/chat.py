"""A dialogue with a model in the terminal, printed as it is drawn. Left out: loading the model (`generate`)."""

from __future__ import annotations

import sys
from typing import Any


def chat(policy: Any, tokenizer: Any, sampling: Any, stops: Any, args: Any) -> None:
    """Turn by turn. With a chat template the model sees the whole dialogue, without one only the text so far."""
    from chatgpt.dataset.formats import shown_format

    templated = bool(tokenizer.chat_template)
    turns: list[dict[str, str]] = []
    text = ''
    number = 0
    if templated:
        print(f'conversations read {shown_format(tokenizer)}', flush=True)
    print(f'chatting with {args.pretrain}; Ctrl-C ends an answer, /new begins anew, Ctrl-D ends', flush=True)
    while True:
        try:
            said = input('> ')
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if said.strip() == '/new':
            turns, text = [], ''
            continue
        if not said.strip():
            continue
        turns.append({'role': 'user', 'content': said})
        text = (
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            if templated
            else text + said
        )
        reply = speak(policy, tokenizer, text, sampling, stops, args.seed, number, templated=templated)
        number += 1
        turns.append({'role': 'assistant', 'content': reply})
        text += reply


def speak(
    policy: Any,
    tokenizer: Any,
    text: str,
    sampling: Any,
    stops: Any,
    seed: int,
    index: int,
    *,
    templated: bool,
) -> str:
    """Print a response as it comes; what was said until its end, or until Ctrl-C."""
    import torch

    from chatgpt.dataset.tokenize import cut_left, prompt_ids
    from chatgpt.launch.inputs import longest_side
    from chatgpt.rollout import stream_tokens

    ids = prompt_ids(text, tokenizer, templated=templated) or [tokenizer.bos_token_id]
    limit = longest_side(policy.config)
    if limit is not None:
        beside = 0 if policy.config.is_encoder_decoder else sampling.room(0)
        room = max(limit - beside, 1)
        ids = cut_left(ids, room, tokenizer) if len(ids) > room else ids  # what was said long ago is forgotten
    said: list[int] = []
    shown = whole = ''
    try:
        for token in stream_tokens(policy, torch.tensor(ids), sampling, seed=seed, index=index):
            said.append(token)
            whole = tokenizer.decode(said, skip_special_tokens=True)
            sure = whole if stops is None else stops.settled(whole, stops.start(said))
            if not whole.endswith('\ufffd') and len(sure) > len(
                shown
            ):  # half of a character, or of a stop string: wait for the rest
                sys.stdout.write(sure[len(shown) :])
                sys.stdout.flush()
                shown = sure
    except KeyboardInterrupt:
        pass
    reply = whole if stops is None else stops.text_of(said)
    print(reply[len(shown) :], flush=True)
    return reply
