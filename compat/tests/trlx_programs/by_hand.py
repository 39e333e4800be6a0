"""A trainer made without `trlx.train`, as in trlX's tests, with added pipelines, checkpoints and a resumed run."""

import json
import sys

import trlx.utils.logging as logging
from trlx.data.default_configs import TRLConfig, default_ppo_config
from trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trlx.utils.loading import get_pipeline

logging.disable_progress_bar()
logging.set_verbosity(logging.ERROR)
PROMPTS = {'train': ['the quick fox', 'the cat sat on', 'what sort of food'], 'eval': ['i bought a new', 'i could not']}


def get(config):
    trainer = AcceleratePPOTrainer(
        config=config,
        reward_fn=lambda samples, **kwargs: [sample.count('o') for sample in samples],
        metric_fn=None,
        stop_sequences=None,
        **config.train.trainer_kwargs,
    )
    max_prompt_length = config.train.seq_length - config.method.gen_kwargs['max_new_tokens']
    make = get_pipeline(config.train.pipeline)
    trainer.add_prompt_pipeline(make(PROMPTS['train'], max_prompt_length, trainer.tokenizer))
    trainer.make_experience(config.method.num_rollouts)
    trainer.add_eval_pipeline(make(PROMPTS['eval'], max_prompt_length, trainer.tokenizer))
    return trainer


if __name__ == '__main__':
    config = TRLConfig.update(default_ppo_config(), json.loads(sys.argv[1])['config'])
    trainer = get(config)
    results = trainer.learn()
    trainer.save('by_hand')
    first_run = trainer.iter_count

    config = config.evolve(
        train=dict(total_steps=2 * first_run, resume_from_checkpoint='by_hand', checkpoint_dir='second')
    )
    resumed = get(config)
    resumed.learn()
