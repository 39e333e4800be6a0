"""A dialogue with a model in the terminal, printed as it is drawn."""

from __future__ import annotations

import sys
from typing import Any


def chat(policy: Any, tokenizer: Any, sampling: Any, stops: Any, args: Any) -> None:
    """Turn by turn. With a chat template the model sees the whole dialogue; without one, or where it was trained on
    text as it is, only the text so far."""
    from chatgpt.data.formats import check_template, shown_format, text_choice

    templated = bool(tokenizer.chat_template) and text_choice(tokenizer) is not False
    turns: list[dict[str, str]] = []
    text = ''
    number = 0
    if templated:
        check_template(tokenizer)
        print(f'conversations read {shown_format(tokenizer)}', flush=True)
    elif tokenizer.chat_template:
        print('what you write is given to the model as it is, without its chat template', flush=True)
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

    from chatgpt.data.tokenize import cut_left, prompt_ids
    from chatgpt.nn.layouts import room_beside
    from chatgpt.rollout import stream_tokens

    ids = prompt_ids(text, tokenizer, templated=templated) or [tokenizer.bos_token_id]
    room = room_beside(policy.config, sampling.room(0))
    if room is not None:
        room = max(room, 1)
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
