"""Chat templates and the kinds of rows, as scripts of TRL handle them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIMPLE_CHAT_TEMPLATE = (
    '{% for message in messages %}'
    "{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}"
    '{% endfor %}'
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""roles in capitals, each turn a paragraph of its own"""

_CHATML = (
    '{% for message in messages %}'
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TURNS = ('prompt', 'chosen', 'rejected', 'completion', 'messages')


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether one of the row's columns holds turns with a role."""
    for name in _TURNS:
        value = example.get(name)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping) and 'role' in value[0]:
            return True
    return False


def apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, Any]:
    """The row with its turns rendered: messages becomes text; prompt ends where the answer begins, and completion,
    chosen and rejected hold what follows.

    Raises:
        ValueError: columns without a known meaning, or a template that changes the prompt when an answer follows.
    """
    known = set(example) & {*_TURNS, 'label'}
    options = dict(template_kwargs) | ({'tools': tools} if tools is not None else {})

    def render(turns: Any, **more: Any) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options, **more)

    if 'messages' in known:
        return {'text': render(example['messages'])}
    answers = [name for name in ('completion', 'chosen', 'rejected') if name in known]
    if 'prompt' not in known:
        if not answers:
            raise ValueError(f'apply_chat_template: no turns in the columns {", ".join(example)}')
        return {name: render(example[name]) for name in answers}
    last = example['prompt'][-1]['role']
    begun = {'continue_final_message': True} if last == 'assistant' else {'add_generation_prompt': True}
    prompt = render(example['prompt'], **begun)
    rendered: dict[str, Any] = {'prompt': prompt}
    for name in answers:
        whole = render([*example['prompt'], *example[name]])
        if not whole.startswith(prompt):
            raise ValueError('apply_chat_template: this template renders the prompt otherwise once an answer follows')
        rendered[name] = whole[len(prompt) :]
    return rendered | ({'label': example['label']} if 'label' in known else {})


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> Mapping[str, Any]:
    """`apply_chat_template` of a row with turns; any other row as it is."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """prompt, chosen and rejected of a row whose chosen and rejected begin alike: the common beginning is the prompt,
    which in texts ends before a space."""
    chosen, rejected = example['chosen'], example['rejected']
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(chosen), len(rejected))
    if shared and isinstance(chosen, str) and chosen[shared - 1] == ' ':
        shared -= 1
    return {'prompt': chosen[:shared], 'chosen': chosen[shared:], 'rejected': rejected[shared:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extract_prompt` where the prompt stands in chosen and rejected; any other row as it is."""
    if 'chosen' not in example or 'rejected' not in example:
        return example
    if 'prompt' in example:
        turns = isinstance(example['chosen'], (list, tuple))
        if turns == isinstance(example['prompt'], (list, tuple)):
            return example
    return {**example, **extract_prompt(example)}


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Two rows for each of a `datasets` dataset with chosen and rejected: completion, and label true or false."""

    def two(batch: Mapping[str, Any]) -> dict[str, Any]:
        size = len(batch['chosen'])
        made = {'completion': [*batch['chosen'], *batch['rejected']], 'label': [True] * size + [False] * size}
        return made | ({'prompt': batch['prompt'] * 2} if 'prompt' in batch else {})

    return dataset.map(two, batched=True, remove_columns=['chosen', 'rejected'], num_proc=num_proc, desc=desc)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` of a dataset with chosen and rejected; any other as it is."""
    columns = dataset.column_names
    columns = next(iter(columns.values())) if isinstance(columns, Mapping) else columns
    return unpair_preference_dataset(dataset, num_proc, desc) if {'chosen', 'rejected'} <= set(columns) else dataset


def setup_chat_format(
    model: Any, tokenizer: Any, format: str = 'chatml', resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """ChatML for a base model: its two special tokens, the template, embeddings for them, and the ends in the configs.

    Raises:
        ValueError: the tokenizer has a template already, or another format.
    """
    if tokenizer.chat_template is not None:
        raise ValueError('setup_chat_format: the tokenizer has a chat template; set it to None to replace it')
    if format != 'chatml':
        raise ValueError(f"setup_chat_format: format={format!r} is not known; use 'chatml'")
    begin, end = '<|im_start|>', '<|im_end|>'
    tokenizer.add_special_tokens({'bos_token': begin, 'eos_token': end, 'pad_token': end})
    tokenizer.chat_template = _CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, getattr(model, 'generation_config', None)):
        if config is not None:
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
