"""PPO from a command line: policy, reference, reward and value model from folders, end token, penalty, completions."""

import shutil

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import (
    ModelConfig,
    PPOConfig,
    PPOTrainer,
    ScriptArguments,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE

parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_into_dataclasses()
shutil.rmtree(training_args.output_dir, ignore_errors=True)

torch_dtype = (
    model_args.torch_dtype if model_args.torch_dtype in ('auto', None) else getattr(torch, model_args.torch_dtype)
)
quantization_config = get_quantization_config(model_args)
model_kwargs = {'revision': model_args.model_revision, 'torch_dtype': torch_dtype}
if quantization_config is not None:
    model_kwargs |= {'device_map': get_kbit_device_map(), 'quantization_config': quantization_config}

tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side='left')
tokenizer.add_special_tokens({'pad_token': '[PAD]'})
if tokenizer.chat_template is None:
    tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
peft_config = get_peft_config(model_args)
ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path) if peft_config is None else None

dataset = load_dataset(script_args.dataset_name, split=script_args.dataset_train_split)
train_dataset = dataset.select(range(len(dataset) - 4))
eval_dataset = dataset.select(range(len(dataset) - 4, len(dataset)))


def prepare(dataset):
    def tokenize(element):
        ids = tokenizer(element['prompt'], padding=False)['input_ids']
        return {'input_ids': ids, 'lengths': [len(i) for i in ids]}

    return dataset.map(
        tokenize, batched=True, remove_columns=dataset.column_names, num_proc=training_args.dataset_num_proc
    )


trainer = PPOTrainer(
    args=training_args,
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=prepare(train_dataset),
    eval_dataset=prepare(eval_dataset),
    peft_config=peft_config,
)
trainer.train()
trainer.save_model(training_args.output_dir)
if training_args.push_to_hub:
    trainer.push_to_hub(dataset_name=script_args.dataset_name)
completions = trainer.generate_completions()
