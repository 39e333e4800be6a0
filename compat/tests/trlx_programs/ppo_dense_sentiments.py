"""Rewards per token: one in the middle of the output and one at its end."""

import json
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_ppo_config


def dense_reward_fn(samples, prompts, outputs, tokenizer, **kwargs):
    scores = []
    for output in outputs:
        row = [0.0] * len(tokenizer(output).input_ids)
        row[len(row) // 2] += 0.25
        row[-1] += 1.0
        scores.append(row)
    return scores


if __name__ == '__main__':
    config = TRLConfig.update(default_ppo_config().to_dict(), json.loads(sys.argv[1])['config'])
    trainer = trlx.train(reward_fn=dense_reward_fn, prompts=['one day ', 'a long time '], config=config)
