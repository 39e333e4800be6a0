"""LoRA by peft_config with load_in_8bit: no reference model, lists of queries, Adafactor, checkpoints."""

import sys

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from transformers import Adafactor, AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.core import LengthSampler

model_name, output_dir = sys.argv[1:]
config = PPOConfig(
    steps=16,
    model_name=model_name,
    learning_rate=1e-2,
    batch_size=8,
    mini_batch_size=2,
    gradient_accumulation_steps=2,
    optimize_cuda_cache=True,
    early_stopping=False,
    target_kl=0.1,
    ppo_epochs=2,
    seed=3,
    init_kl_coef=0.2,
    adap_kl_ctrl=True,
)
tokenizer = AutoTokenizer.from_pretrained(model_name)
if getattr(tokenizer, 'pad_token', None) is None:
    tokenizer.pad_token = tokenizer.eos_token
questions = [f'question: what is {a} plus {b}? answer: ' for a in range(4) for b in range(4)]
dataset = Dataset.from_dict({'query': questions, 'input_ids': tokenizer(questions)['input_ids']})
dataset.set_format(type='torch')


def collator(data):
    return {key: [d[key] for d in data] for key in data[0]}


set_seed(config.seed)
current_device = Accelerator().local_process_index
lora_config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias='none', task_type='CAUSAL_LM')
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    config.model_name, load_in_8bit=True, device_map={'': current_device}, peft_config=lora_config
)
base_weight = model.pretrained_model.transformer.h[0].attn.c_attn.weight.detach().clone()
num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
optimizer = Adafactor(
    filter(lambda p: p.requires_grad, model.parameters()),
    scale_parameter=False,
    relative_step=False,
    warmup_init=False,
    lr=config.learning_rate,
)
ppo_trainer = PPOTrainer(
    config, model, ref_model=None, tokenizer=tokenizer, dataset=dataset, data_collator=collator, optimizer=optimizer
)
generation_kwargs = {
    'top_k': 0.0,
    'top_p': 1.0,
    'do_sample': True,
    'pad_token_id': tokenizer.pad_token_id,
    'eos_token_id': 100_000,
}
output_length_sampler = LengthSampler(3, 9)
all_stats = []
for epoch, batch in enumerate(ppo_trainer.dataloader):
    if epoch >= config.total_ppo_epochs:
        break
    question_tensors = batch['input_ids']
    response_tensors = ppo_trainer.generate(
        question_tensors, return_prompt=False, length_sampler=output_length_sampler, **generation_kwargs
    )
    batch['response'] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
    rewards = [torch.tensor(float(text.count('e')) - 0.5) for text in batch['response']]
    stats = ppo_trainer.step(question_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
    all_stats.append(stats)
    ppo_trainer.save_pretrained(output_dir + f'step_{epoch}')
