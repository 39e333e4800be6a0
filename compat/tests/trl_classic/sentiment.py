"""PPO with the score of a sentiment pipeline, one query at a time, with lengths from a sampler."""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser, pipeline
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.core import LengthSampler


@dataclass
class ScriptArguments:
    model_name: str = field(metadata={'help': 'the policy'})
    classifier: str = field(metadata={'help': 'the sentiment model'})
    log_with: str | None = None


script_args = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()[0]
config = PPOConfig(
    model_name=script_args.model_name,
    learning_rate=1e-3,
    log_with=script_args.log_with,
    batch_size=8,
    mini_batch_size=4,
    steps=16,
)
sent_kwargs = {'top_k': None, 'function_to_apply': 'none', 'batch_size': config.mini_batch_size}


def build_dataset(config, shortest=2, longest=6):
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    rows = [
        f'{subject} was {adverb} ' for subject in ('the film', 'a plot') for adverb in ('so', 'very', 'quite', 'not')
    ]
    input_size = LengthSampler(shortest, longest)

    def tokenize(sample):
        sample['input_ids'] = tokenizer.encode(sample['review'])[: input_size()]
        sample['query'] = tokenizer.decode(sample['input_ids'])
        return sample

    dataset = Dataset.from_dict({'review': rows * 2}).map(tokenize, batched=False)
    dataset.set_format(type='torch')
    return dataset


def collator(data):
    return {key: [d[key] for d in data] for key in data[0]}


dataset = build_dataset(config)
set_seed(config.seed)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token

ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)

device = ppo_trainer.accelerator.device
if ppo_trainer.accelerator.num_processes == 1:
    device = 0 if torch.cuda.is_available() else 'cpu'
sentiment_pipe = pipeline('sentiment-analysis', model=script_args.classifier, device=device)

generation_kwargs = {
    'min_length': -1,
    'top_k': 0.0,
    'top_p': 1.0,
    'do_sample': True,
    'pad_token_id': tokenizer.eos_token_id,
    'eos_token_id': -1,
}
output_length_sampler = LengthSampler(4, 9)

all_stats, lengths = [], []
for _epoch, batch in enumerate(ppo_trainer.dataloader):
    query_tensors = batch['input_ids']
    response_tensors = []
    for query in query_tensors:
        gen_len = output_length_sampler()
        generation_kwargs['max_new_tokens'] = gen_len
        response = ppo_trainer.generate(query, **generation_kwargs)
        response_tensors.append(response.squeeze()[-gen_len:])
        lengths.append((gen_len, len(response_tensors[-1])))
    batch['response'] = [tokenizer.decode(r.squeeze()) for r in response_tensors]

    texts = [q + r for q, r in zip(batch['query'], batch['response'], strict=True)]
    pipe_outputs = sentiment_pipe(texts, **sent_kwargs)
    rewards = [torch.tensor(next(o['score'] for o in out if o['label'] == 'LABEL_1')) for out in pipe_outputs]

    stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
    all_stats.append(stats)
