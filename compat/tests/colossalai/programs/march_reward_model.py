"""A reward model as in March 2023: rows of rm-static or dialogues of hh-rlhf; log-sigmoid or log-exp."""

import argparse
import json

import torch
from chatgpt.models import LogExpLoss, LogSigLoss
from chatgpt.models.gpt import GPTRM
from torch.optim import Adam
from transformers import AutoTokenizer

from chatgpt.dataset import HhRlhfDataset, RmStaticDataset
from chatgpt.trainer import RewardModelTrainer
from chatgpt.trainer.strategies import NaiveStrategy


def train(args):
    strategy = NaiveStrategy()
    with strategy.model_init_context():
        model = GPTRM(pretrained=args.pretrain, lora_rank=args.lora_rank).to(torch.cuda.current_device())
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    optim = Adam(model.parameters(), lr=1e-3)
    loss_fn = LogSigLoss() if args.loss_fn == 'log_sig' else LogExpLoss()
    with open(args.rows) as file:
        rows = [json.loads(line) for line in file]
    kind = RmStaticDataset if args.dataset == 'Dahoas/rm-static' else HhRlhfDataset
    train_dataset = kind(rows, tokenizer, args.max_len)
    valid_dataset = kind(rows[:4], tokenizer, args.max_len)
    eval_dataset = kind(rows[4:], tokenizer, args.max_len)
    trainer = RewardModelTrainer(
        model=model,
        strategy=strategy,
        optim=optim,
        loss_fn=loss_fn,
        train_dataset=train_dataset,
        valid_dataset=valid_dataset,
        eval_dataset=eval_dataset,
        batch_size=args.batch_size,
        max_epochs=args.max_epochs,
    )
    trainer.fit()
    strategy.save_model(trainer.model, args.save_path, only_rank0=True)
    if args.need_optim_ckpt:
        strategy.save_optimizer(trainer.optimizer, 'rm_optim_%d.pt' % (torch.cuda.current_device()), only_rank0=False)
    print('items', len(train_dataset), 'ids', train_dataset[0][0].shape[0], 'phases', trainer.phase)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('rows')
    parser.add_argument('--pretrain', type=str, default=None)
    parser.add_argument('--need_optim_ckpt', type=bool, default=False)
    parser.add_argument('--dataset', choices=['Anthropic/hh-rlhf', 'Dahoas/rm-static'], default='Dahoas/rm-static')
    parser.add_argument('--save_path', type=str, default='rm_ckpt.pt')
    parser.add_argument('--max_epochs', type=int, default=1)
    parser.add_argument('--batch_size', type=int, default=1)
    parser.add_argument('--max_len', type=int, default=512)
    parser.add_argument('--lora_rank', type=int, default=0)
    parser.add_argument('--loss_fn', type=str, default='log_sig', choices=['log_sig', 'log_exp'])
    train(parser.parse_args())
