"""SFT and a reward model as in coati 0.3: a dict for `prepare`, a scheduler, loaders for `fit`."""

import sys

from coati.dataset import HhRlhfDataset, SupervisedDataset
from coati.models import LogSigLoss
from coati.models.generation import generate
from coati.models.gpt import GPTRM, GPTActor
from coati.trainer import RewardModelTrainer, SFTTrainer
from coati.trainer.strategies import NaiveStrategy
from colossalai.logging import get_dist_logger
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from transformers.trainer import get_scheduler

pretrain, texts = sys.argv[1:]
strategy = NaiveStrategy()
tokenizer = AutoTokenizer.from_pretrained(pretrain)

model = GPTActor(pretrained=pretrain)
optim = Adam(model.parameters(), lr=1e-3)
loader = DataLoader(SupervisedDataset(texts, tokenizer, max_length=64), batch_size=2, shuffle=True, pin_memory=True)
scheduler = get_scheduler('cosine', optim, num_warmup_steps=0, num_training_steps=4)
made = strategy.prepare({'model': model, 'optimizer': optim, 'lr_scheduler': scheduler})
trainer = SFTTrainer(
    model=made['model'],
    strategy=strategy,
    optim=made['optimizer'],
    lr_scheduler=made['lr_scheduler'],
    max_epochs=2,
    accumulation_steps=2,
)
trainer.fit(train_dataloader=loader, eval_dataloader=None, logger=get_dist_logger(), log_dir='logs', use_wandb=False)
print('sft updates', trainer.num_updates)
strategy.save_pretrained(made['model'], path='sft', only_rank0=True, tokenizer=tokenizer)
ids = tokenizer('ab', return_tensors='pt')['input_ids']
print('generated', tuple(generate(model, ids, tokenizer=tokenizer, max_length=9, do_sample=True, top_k=5).shape)[0])

rows = [{'chosen': f'q {i} good {i}', 'rejected': f'q {i} bad'} for i in range(6)]
reward_model = GPTRM(pretrained=pretrain)
optim = Adam(reward_model.parameters(), lr=1e-3)
loader = DataLoader(HhRlhfDataset(rows, tokenizer, 32), batch_size=2, shuffle=True)
made = strategy.prepare({'model': reward_model, 'optimizer': optim, 'lr_scheduler': CosineAnnealingLR(optim, 3)})
trainer = RewardModelTrainer(
    model=made['model'],
    strategy=strategy,
    optim=made['optimizer'],
    lr_scheduler=made['lr_scheduler'],
    loss_fn=LogSigLoss(),
    max_epochs=2,
)
trainer.fit(train_dataloader=loader, eval_dataloader=loader, log_dir='logs', use_wandb=False)
print('rm updates', trainer.num_updates)
strategy.save_model(made['model'], 'rm.pt', only_rank0=True)
