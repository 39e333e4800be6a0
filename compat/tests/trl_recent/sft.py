"""SFT on text in blocks, prompt and completion, turns with a chat format, and texts of a formatting function."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, setup_chat_format

folder, output = sys.argv[1:]
common = {'per_device_train_batch_size': 4, 'max_steps': 3, 'logging_steps': 1, 'save_strategy': 'no'}

texts = Dataset.from_dict({'story': ['one day a cat went to the hill .'] * 8, 'id': list(range(8))})
packed = SFTTrainer(
    model=folder,
    args=SFTConfig(f'{output}/packed', dataset_text_field='story', packing=True, max_length=16, **common),
    train_dataset=texts,
)
packed.train()

pairs = [{'prompt': 'one day a cat', 'completion': ' went to the hill .'}] * 8
completions = SFTTrainer(folder, SFTConfig(output_dir=f'{output}/completions', **common), train_dataset=pairs)
completions.train()

tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = None
model, tokenizer = setup_chat_format(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
turns = [{'role': 'user', 'content': 'a cat'}, {'role': 'assistant', 'content': 'went to the hill .'}]
chat = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir=f'{output}/chat', eval_strategy='steps', eval_steps=2, **common),
    train_dataset=Dataset.from_list([{'messages': turns}] * 8),
    eval_dataset={'same': Dataset.from_list([{'messages': turns}] * 2)},
    processing_class=tokenizer,
)
chat.train()


def formatting_func(example):
    return [f'{q} {a}' for q, a in zip(example['question'], example['answer'], strict=True)]


rows = Dataset.from_dict({'question': ['one day a cat'] * 8, 'answer': ['went to the hill .'] * 8})
written = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(folder),
    args=SFTConfig(output_dir=f'{output}/written', **common),
    train_dataset=rows,
    formatting_func=formatting_func,
    max_seq_length=32,
    tokenizer=AutoTokenizer.from_pretrained(folder),
)
written.train()
