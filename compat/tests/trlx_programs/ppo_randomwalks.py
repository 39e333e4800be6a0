"""Shortest walks to 'a' by PPO without a KL penalty, from a config with new weights."""

import json
import sys

import trlx
from transformers import GPT2Config
from trlx.data.configs import ModelConfig, OptimizerConfig, SchedulerConfig, TokenizerConfig, TrainConfig, TRLConfig
from trlx.models.modeling_ppo import PPOConfig
from walks import generate_walks

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=8,
        epochs=20,
        total_steps=10000,
        batch_size=32,
        checkpoint_interval=10000,
        eval_interval=20,
        pipeline='PromptPipeline',
        trainer='AcceleratePPOTrainer',
        seed=1,
    ),
    model=ModelConfig(model_path='randomwalks', num_layers_unfrozen=-1),
    tokenizer=TokenizerConfig(tokenizer_path='randomwalks', truncation_side='right'),
    optimizer=OptimizerConfig(name='adamw', kwargs=dict(lr=1e-2, betas=(0.9, 0.95), eps=1.0e-8, weight_decay=1.0e-6)),
    scheduler=SchedulerConfig(name='cosine_annealing', kwargs=dict(T_max=10000, eta_min=1e-2)),
    method=PPOConfig(
        name='PPOConfig',
        num_rollouts=32,
        chunk_size=32,
        ppo_epochs=2,
        init_kl_coef=0,
        target=None,
        horizon=10000,
        gamma=1,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=1.2,
        scale_reward='ignored',
        ref_mean=None,
        ref_std=None,
        cliprange_reward=1,
        gen_kwargs=dict(max_new_tokens=4, top_k=0, top_p=1.0, do_sample=True),
    ),
)


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams['config'])
    metric_fn, prompts, _ = generate_walks()
    return trlx.train(
        model_path=GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=64),
        reward_fn=lambda samples, **kwargs: [sample[1:].count('a') / 4 for sample in samples],
        prompts=prompts,
        eval_prompts=prompts,
        metric_fn=lambda samples, **kwargs: metric_fn(samples),
        config=config,
    )


if __name__ == '__main__':
    trainer = main(json.loads(sys.argv[1]))
