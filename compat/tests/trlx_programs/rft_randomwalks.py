"""Short ways to 'a' by rejection fine-tuning."""

import json
import sys

import trlx
from trlx.data.default_configs import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from trlx.trainer.accelerate_rft_trainer import RFTConfig
from walks import generate_walks

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=8,
        epochs=4,
        total_steps=1000,
        batch_size=16,
        checkpoint_interval=1000,
        eval_interval=1,
        pipeline='PromptPipeline',
        trainer='AccelerateRFTTrainer',
        checkpoint_dir='checkpoints/randomwalks',
    ),
    model=ModelConfig(model_path='randomwalks', num_layers_unfrozen=-1),
    tokenizer=TokenizerConfig(tokenizer_path='randomwalks', truncation_side='right'),
    optimizer=OptimizerConfig(name='adamw', kwargs=dict(lr=1e-2, betas=(0.9, 0.99), eps=1.0e-8, weight_decay=0)),
    scheduler=SchedulerConfig(name='cosine_annealing', kwargs=dict(T_max=10000, eta_min=1e-2)),
    method=RFTConfig(
        name='RFTConfig',
        n_generations_per_prompt=16,
        start_percentile=0.9,
        end_percentile=0.95,
        n_improve_steps=1,
        gen_kwargs=dict(max_new_tokens=4, top_k=0, top_p=1.0, temperature=1.0, do_sample=True),
    ),
)


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams['config'])
    metric_fn, prompts, _ = generate_walks()
    return trlx.train(
        reward_fn=lambda samples, **kwargs: [sample[1:].count('a') / 4 for sample in samples],
        prompts=prompts,
        eval_prompts=prompts,
        metric_fn=lambda samples, **kwargs: metric_fn(samples),
        config=config,
    )


if __name__ == '__main__':
    trainer = main(json.loads(sys.argv[1]))
