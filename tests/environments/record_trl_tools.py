"""Writes trl_tools.json: the results of TRL's own tool loop for the turns in `tool_classes`.

    PYTHONPATH=.:tests/environments python tests/environments/record_trl_tools.py

needs TRL 1.16.0. The loop runs unchanged on an object with the attributes of a trainer that it uses, with scripted
turns instead of a model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import trl
from chat_families import chat_tokenizer
from tool_classes import QUESTION, SCRIPTS, Shop
from trl.chat_template_utils import parse_response, qwen3_template
from trl.trainer.grpo_trainer import GRPOTrainer


def trainer(tokenizer, environment, later):
    """Returns an object with the attributes of a trainer that the loop uses; `later` are the turns after the first, as
    ids."""
    tools = [
        tool
        for name, tool in inspect.getmembers(environment, predicate=inspect.ismethod)
        if name not in ('reset', 'get_reward') and not name.startswith('_')
    ]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asynchronous = {t.__name__: t for t in tools if inspect.iscoroutinefunction(t)}
    me = SimpleNamespace(
        max_tool_calling_iterations=9,
        max_completion_length=10_000,
        use_vllm=False,
        _is_vlm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100_000)),
        tools=tools,
        environment_factories={None: Shop},
        _env_tools={None: tools},
        _batch_environments=[None],
        _sync_tool_dicts=[{t.__name__: t for t in tools if t.__name__ not in asynchronous}],
        _async_tool_dicts=[asynchronous],
        async_loop=loop,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
        _generate_single_turn=lambda ids, *rest, **more: ([later.pop(0)], None),
    )
    me._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(me, messages)
    return me


def record(columns, turns):
    tokenizer = chat_tokenizer('qwen2.5')
    tokenizer.response_template = qwen3_template
    environment = Shop()
    text = environment.reset(prompt=QUESTION, **columns)
    prompt = QUESTION if text is None else [{**QUESTION[0], 'content': QUESTION[0]['content'] + text}]
    ids = [tokenizer(turn + '<|im_end|>')['input_ids'] for turn in turns]
    me = trainer(tokenizer, environment, ids[1:])
    prompt_ids = tokenizer.apply_chat_template(
        prompt, tools=me.tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    completions = [[parse_response(tokenizer, ids[0], prefix=prompt_ids, tools=me.tools)]]
    mask, completions, completion_ids, *_ = GRPOTrainer._tool_call_loop(
        me, [list(prompt)], [prompt_ids], [ids[0]], completions, None, None, {}
    )
    return {
        'prompt': tokenizer.decode(prompt_ids),
        'completion_ids': completion_ids[0],
        'mask': mask[0],
        'messages': completions[0],
        'reward': environment.get_reward(),
    }


if __name__ == '__main__':
    found = {'trl': trl.__version__} | {name: record(*script) for name, script in SCRIPTS.items()}
    target = Path(__file__).with_name('trl_tools.json')
    lines = (f'{json.dumps(name)}: {json.dumps(value)}' for name, value in found.items())
    target.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
    print(f'{len(SCRIPTS)} episodes in {target}')
