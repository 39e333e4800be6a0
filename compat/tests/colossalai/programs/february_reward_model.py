"""A reward model as in February 2023: no loss, `RewardDataset`, `fit(use_lora=...)`, positional arguments."""

import json
import sys

from torch.optim import Adam
from transformers import AutoTokenizer

from chatgpt.dataset import RewardDataset
from chatgpt.nn import GPTRM, PairWiseLoss
from chatgpt.trainer import RewardModelTrainer
from chatgpt.trainer.strategies import NaiveStrategy

pretrain, path = sys.argv[1:]
strategy = NaiveStrategy()
model = GPTRM(pretrained=pretrain, lora_rank=4).cuda()
tokenizer = AutoTokenizer.from_pretrained(pretrain)
optim = Adam(model.parameters(), lr=5e-3)
with open(path) as file:
    rows = [json.loads(line) for line in file]
data = RewardDataset(rows, tokenizer, 64)
trainer = RewardModelTrainer(model, strategy, optim, data, data, 4, 6)
trainer.fit(use_lora=4)
strategy.save_model(model, 'rm_checkpoint.pt', only_rank0=True)
print('epochs', trainer.config.max_epochs, 'loss', PairWiseLoss().__class__.__name__)
