"""trlX's first page, October 2022: a pipeline of one's own, an orchestrator with `score`, a model by its name."""

import sys
from typing import Callable, Iterable

import torch
from torch.utils.data import DataLoader
from trlx.data.accelerate_base_datatypes import PromptBatch, PromptElement
from trlx.data.configs import TRLConfig
from trlx.model.accelerate_ppo_model import AcceleratePPOModel
from trlx.orchestrator import register_orchestrator
from trlx.orchestrator.ppo_orchestrator import PPOOrchestrator
from trlx.pipeline import BasePipeline, register_datapipeline
from trlx.utils.loading import get_model, get_orchestrator, get_pipeline

TEXTS = ['this film was fine, i think', 'no one liked the plot', 'a long evening', 'the best of the year']


@register_datapipeline
class ReviewPipeline(BasePipeline):
    def __init__(self, tokenizer, config, prompt_dataset_path=None):
        super().__init__()
        self.tokens = [
            tokenizer(
                text,
                truncation=True,
                padding='max_length',
                max_length=config.train.input_size,
                return_tensors='pt',
            )['input_ids']
            .long()
            .flatten()
            for text in TEXTS
        ]
        self.text = [tokenizer.decode(tokens.tolist()) for tokens in self.tokens]

    def __getitem__(self, index: int) -> PromptElement:
        return PromptElement(self.text[index], self.tokens[index])

    def __len__(self) -> int:
        return len(self.text)

    def create_loader(
        self, batch_size: int, shuffle: bool, prep_fn: Callable = None, num_workers: int = 0
    ) -> DataLoader:
        def collate_fn(elems: Iterable[PromptElement]) -> PromptBatch:
            return PromptBatch([elem.text for elem in elems], torch.stack([elem.tokens for elem in elems]))

        return DataLoader(self, batch_size, shuffle, collate_fn=collate_fn, num_workers=num_workers)


@register_orchestrator
class SentimentOrchestrator(PPOOrchestrator):
    def __init__(self, pipeline: ReviewPipeline, rl_model: AcceleratePPOModel, chunk_size=512):
        super().__init__(pipeline, rl_model, chunk_size)
        self.seen = []

    def score(self, texts):
        self.seen.append(texts)
        return torch.tensor([float(text.count('o')) for text in texts])


if __name__ == '__main__':
    cfg = TRLConfig.load_yaml('ppo_config.yml')
    cfg.model.model_path = cfg.model.tokenizer_path = sys.argv[1]

    model: AcceleratePPOModel = get_model(cfg.model.model_type)(cfg)
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}  # as wandb.watch(model.model)

    pipeline: ReviewPipeline = get_pipeline(cfg.train.pipeline)(model.tokenizer, cfg)
    orch: SentimentOrchestrator = get_orchestrator(cfg.train.orchestrator)(pipeline, model, cfg.method.chunk_size)
    orch.make_experience(cfg.method.num_rollouts)
    model.learn()
