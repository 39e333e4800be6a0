"""Generates with `actor.generate` from a checkpoint of `strategy.save_model`, loaded into `actor.model`."""

import argparse

import torch
from transformers import AutoTokenizer

from chatgpt.nn import GPTActor


def eval(args):
    actor = GPTActor(pretrained=args.pretrain).to(torch.cuda.current_device())
    state_dict = torch.load(args.model_path)
    actor.model.load_state_dict(state_dict)
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    actor.eval()
    input_ids = tokenizer.encode(args.input, return_tensors='pt').to(torch.cuda.current_device())
    outputs = actor.generate(
        input_ids,
        max_length=args.max_length,
        do_sample=False,
        num_return_sequences=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    print(outputs[0][0].tolist())
    print(outputs[1][0].tolist(), outputs[2][0].tolist())
    print(tokenizer.batch_decode(outputs[0], skip_special_tokens=True))


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--pretrain', type=str, default=None)
    parser.add_argument('--model_path', type=str, default=None)
    parser.add_argument('--input', type=str, default='Question: How are you ? Answer:')
    parser.add_argument('--max_length', type=int, default=100)
    eval(parser.parse_args())
