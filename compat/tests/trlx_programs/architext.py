"""trlX 0.2: a flat YAML file, a reward of texts alone, prompts of a toy task."""

import sys

import trlx
from trlx.data.configs import TRLConfig


def reward_fn(samples):
    return [-sample.count(':') for sample in samples]


if __name__ == '__main__':
    prompts = [
        f'(prompt) the {a} is {how} the {b} (layout)'
        for a, b in (('kitchen', 'bath'), ('hall', 'bedroom'))
        for how in ('next to', 'not next to')
    ]
    config = TRLConfig.load_yaml('ppo_config.yml')
    trainer = trlx.train(sys.argv[1], reward_fn=reward_fn, prompts=prompts, config=config)
