"""SFT as in March 2023: Alpaca's JSON through a torch DataLoader, colossalai's logger."""

import argparse

from chatgpt.models.gpt import GPTLM
from chatgpt.utils import prepare_llama_tokenizer_and_embedding  # noqa: F401
from colossalai.logging import get_dist_logger
from torch.optim import Adam
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from chatgpt.dataset import AlpacaDataCollator, AlpacaDataset
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer.strategies import NaiveStrategy


def train(args):
    strategy = NaiveStrategy()
    with strategy.model_init_context():
        model = GPTLM(pretrained=args.pretrain, lora_rank=args.lora_rank).cuda()
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    optim = Adam(model.parameters(), lr=5e-3)
    logger = get_dist_logger()
    train_dataset = AlpacaDataset(tokenizer=tokenizer, data_path=args.dataset)
    collator = AlpacaDataCollator(tokenizer=tokenizer)
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=args.batch_size, collate_fn=collator)
    eval_dataloader = DataLoader(train_dataset, shuffle=False, batch_size=args.batch_size, collate_fn=collator)
    trainer = SFTTrainer(
        model=model,
        strategy=strategy,
        optim=optim,
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        batch_size=args.batch_size,
        max_epochs=args.max_epochs,
    )
    trainer.fit(logger=logger, use_lora=args.lora_rank, log_interval=args.log_interval)
    strategy.save_model(model, args.save_path, only_rank0=True)
    batch = next(iter(DataLoader(train_dataset, batch_size=2, collate_fn=collator)))
    print('batch', sorted(batch), bool((batch['labels'] == -100).any()), 'updates', trainer.num_updates)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--pretrain', type=str, default=None)
    parser.add_argument('--dataset', type=str, default='alpaca.json')
    parser.add_argument('--save_path', type=str, default='sft_ckpt.pth')
    parser.add_argument('--max_epochs', type=int, default=1)
    parser.add_argument('--batch_size', type=int, default=4)
    parser.add_argument('--lora_rank', type=int, default=0)
    parser.add_argument('--log_interval', type=int, default=100)
    train(parser.parse_args())
