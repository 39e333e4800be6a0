"""Positive reviews by PPO: a sentiment classifier as the reward, and the top blocks of the policy trained (hydra)."""

import json
import sys
from typing import List

import torch
import trlx
from transformers import pipeline
from trlx.data.default_configs import TRLConfig, default_ppo_config


def positive(scores):
    return {entry['label']: entry['score'] for entry in scores}['POSITIVE']


def main(hparams={}):
    config = TRLConfig.update(default_ppo_config().to_dict(), hparams['config'])
    device = 0 if torch.cuda.is_available() else -1
    sentiment_fn = pipeline(
        'sentiment-analysis', hparams['classifier'], top_k=2, truncation=True, batch_size=256, device=device
    )

    def reward_fn(samples: List[str], **kwargs) -> List[float]:
        return [positive(scores) for scores in sentiment_fn(samples)]

    reviews = ['this film was so good', 'i did not like the plot', 'what a dull evening', 'the best of the year']
    return trlx.train(
        reward_fn=reward_fn,
        prompts=[' '.join(review.split()[:4]) for review in reviews],
        eval_prompts=['i know much about films'] * 4,
        config=config,
    )


if __name__ == '__main__':
    trainer = main(json.loads(sys.argv[1]))
