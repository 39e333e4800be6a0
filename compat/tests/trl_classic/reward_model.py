"""PPO with the scores of a separate reward model."""

import sys
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.import_utils import is_npu_available, is_xpu_available


@dataclass
class ScriptArguments:
    use_seq2seq: bool = field(default=False, metadata={'help': 'whether to use seq2seq'})
    trust_remote_code: bool = field(default=False)


args, ppo_config = HfArgumentParser((ScriptArguments, PPOConfig)).parse_args_into_dataclasses(sys.argv[1:])
trl_model_class = AutoModelForSeq2SeqLMWithValueHead if args.use_seq2seq else AutoModelForCausalLMWithValueHead

tokenizer = AutoTokenizer.from_pretrained(ppo_config.model_name)
queries = [f'{word} is ' for word in ('red', 'a dog', 'two', 'an oak', 'rain', 'ice', 'fire', 'salt')]
dataset = Dataset.from_dict({'query': queries, 'input_ids': [tokenizer.encode(q) for q in queries], 'extra': queries})
dataset.set_format(type='torch')

set_seed(ppo_config.seed)
ref_model = AutoModelForCausalLM.from_pretrained(ppo_config.model_name)
model = trl_model_class.from_pretrained(ppo_config.model_name, trust_remote_code=args.trust_remote_code)
ppo_trainer = PPOTrainer(
    ppo_config,
    model,
    ref_model,
    tokenizer,
    dataset=dataset,
    data_collator=lambda data: {key: [d[key] for d in data] for key in data[0]},
)
device = ppo_trainer.accelerator.device
if ppo_trainer.accelerator.num_processes == 1:
    device = 'xpu:0' if is_xpu_available() else 'npu:0' if is_npu_available() else device
assert ppo_trainer.accelerator.state.deepspeed_plugin is None
task, reward_name = ppo_config.reward_model.split(':')
reward_model = AutoModelForSequenceClassification.from_pretrained(reward_name).to(device).eval()
reward_tokenizer = AutoTokenizer.from_pretrained(reward_name)


@torch.no_grad()
def score(texts):
    inputs = reward_tokenizer(texts, return_tensors='pt', padding=True).to(device)
    return list(reward_model(**inputs).logits[:, 0])


generation_kwargs = {'min_length': -1, 'top_k': 0.0, 'top_p': 1.0, 'do_sample': True, 'max_new_tokens': 6}
columns = []
for _ in range(2):
    for batch in ppo_trainer.dataloader:
        columns.append(sorted(batch))
        query_tensors = batch['input_ids']
        response_tensors = ppo_trainer.generate(query_tensors, return_prompt=False, **generation_kwargs)
        batch['response'] = tokenizer.batch_decode(response_tensors)
        rewards = score([q + r for q, r in zip(batch['query'], batch['response'], strict=True)])
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
