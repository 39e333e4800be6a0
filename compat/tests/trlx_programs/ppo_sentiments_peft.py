"""PPO with adapters; the reference is the policy without them."""

import json
import sys

import trlx
from peft import LoraConfig, TaskType
from trlx.data.default_configs import TRLConfig, default_ppo_config

if __name__ == '__main__':
    config = TRLConfig.update(default_ppo_config(), json.loads(sys.argv[1])['config'])
    config.model.peft_config = LoraConfig(r=4, task_type=TaskType.CAUSAL_LM, lora_alpha=16, lora_dropout=0.1)
    trainer = trlx.train(
        reward_fn=lambda samples, **kwargs: [float(sample.count('e')) for sample in samples],
        prompts=['the sea', 'the hill'],
        config=config,
    )
