"""Tokenizers with chat templates that behave like those of real families, over a small byte-pair vocabulary."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_HERMES_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "{{ '# Tools\\n<tools>' }}{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}"
    '{{ \'\\n</tools>\\nCall with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n\' }}'
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    '{% endif %}'
)
_HERMES_CALLS = (
    "{% for c in m.tool_calls %}{{ ('\\n' if content or not loop.first else '') + '<tool_call>\\n"
    '{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ '}\\n</tool_call>' }}{% endfor %}"
)
_HERMES_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
QWEN25 = (
    _HERMES_TOOLS + '{% for m in messages %}{% set content = m.content %}'
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first)"
    " or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + content }}"
    + _HERMES_CALLS
    + "{{ '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}" + _HERMES_RESULTS + '{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Drops the thinking of turns before the user's last message; the last turn has an empty block if it has none.
QWEN3 = (
    _HERMES_TOOLS + '{% set ns = namespace(asked=0) %}'
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content or '' %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    '{% if loop.index0 > ns.asked and (loop.last or thought) %}'
    "{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}"
    "{% else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}" + _HERMES_CALLS + "{{ '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}" + _HERMES_RESULTS + '{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    '{% endif %}'
)
# One call per turn; tools are in the first message of the user; contents are trimmed.
LLAMA3 = (
    "{{ bos_token }}{% set ns = namespace(rest=messages, system='') %}{% if messages[0].role == 'system' %}"
    '{% set ns.system = messages[0].content | trim %}{% set ns.rest = messages[1:] %}{% endif %}'
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' + ns.system + '<|eot_id|>' }}"
    "{% if tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n\' }}'
    "{% for t in tools %}{{ t | tojson(indent=4) + '\\n\\n' }}{% endfor %}"
    "{{ ns.rest[0].content | trim + '<|eot_id|>' }}{% set ns.rest = ns.rest[1:] %}{% endif %}"
    "{% for m in ns.rest %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}"
    '{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}'
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}'
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + f.name'
    " + '\", \"parameters\": ' + (f.arguments | tojson) + '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    '{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Tools and the system's text are in the user's last message, the latter only if that is the last of all.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(rest=messages, system='', last=0) %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content + '\\n\\n' %}{% set ns.rest = messages[1:] %}{% endif %}"
    "{% for m in ns.rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in ns.rest %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (ns.system if loop.last else '') + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' + (', ' if not loop.last else '') }}"
    "{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
    '{{ \'[TOOL_RESULTS] {"content": \' + m.content + \', "call_id": "\' + m.tool_call_id + \'"}[/TOOL_RESULTS]\' }}'
    '{% endif %}{% endfor %}'
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim"
    " + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# The prompt opens the thinking, and earlier turns have none: DeepSeek-R1, QwQ.
R1 = CHATML.replace('m.content', "m.content.split('</think>')[-1]").replace('assistant\\n', 'assistant\\n<think>\\n')

FAMILIES = {
    'chatml': (CHATML, '<|im_end|>', ('<|im_start|>',)),
    'qwen2.5': (QWEN25, '<|im_end|>', ('<|im_start|>', '<tool_call>', '</tool_call>')),
    'qwen3': (QWEN3, '<|im_end|>', ('<|im_start|>', '<think>', '</think>')),
    'llama3': (LLAMA3, '<|eot_id|>', ('<|eom_id|>', '<|start_header_id|>', '<|end_header_id|>', '<|python_tag|>')),
    'mistral': (
        MISTRAL,
        '</s>',
        ('[INST]', '[/INST]', '[TOOL_CALLS]', '[AVAILABLE_TOOLS]', '[/AVAILABLE_TOOLS]', '[TOOL_RESULTS]')
        + ('[/TOOL_RESULTS]',),
    ),
    'gemma': (GEMMA, '<end_of_turn>', ('<start_of_turn>', '<eos>')),
    'r1': (R1, '<|im_end|>', ('<|im_start|>',)),
}
_SHOWN = ('<think>', '</think>', '<tool_call>', '</tool_call>')
_MERGED = ['the adventure of three thousand answers; there is another, it is so. yes, no: 12 12 123 in "name"'] * 8


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with some merges, the family's template, end token and special tokens."""
    template, end, special = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_MERGED, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token='<bos>',
        eos_token=end,
        pad_token='<pad>',
        additional_special_tokens=[s for s in special if s not in _SHOWN],
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([s for s in special if s in _SHOWN])  # added tokens that decode as text
    fast.chat_template = template
    return fast
