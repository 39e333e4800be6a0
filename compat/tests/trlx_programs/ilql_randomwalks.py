"""Shortest walks to 'a' by ILQL from walks with rewards, evaluated for a list of β."""

import json
import sys

import trlx
from transformers import GPT2Config
from trlx.data.default_configs import (
    ILQLConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from walks import generate_walks

small = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=64)
default_config = TRLConfig(
    train=TrainConfig(
        seq_length=8,
        batch_size=10,
        epochs=80,
        total_steps=1000,
        checkpoint_interval=1000,
        eval_interval=40,
        pipeline='PromptPipeline',
        trainer='AccelerateILQLTrainer',
    ),
    model=ModelConfig(model_path=small, num_layers_unfrozen=-1),
    tokenizer=TokenizerConfig(tokenizer_path='randomwalks', truncation_side='right'),
    optimizer=OptimizerConfig(name='adamw', kwargs=dict(lr=1e-2, betas=(0.9, 0.95), eps=1.0e-8, weight_decay=1.0e-6)),
    scheduler=SchedulerConfig(name='cosine_annealing', kwargs=dict(T_max=1000, eta_min=1e-2)),
    method=ILQLConfig(
        name='ilqlconfig',
        tau=0.8,
        gamma=0.99,
        cql_scale=0.1,
        awac_scale=1,
        alpha=0.1,
        beta=0,
        steps_for_target_q_sync=5,
        two_qs=True,
        gen_kwargs=dict(max_new_tokens=5, top_k=10, beta=[0, 1, 100], temperature=1.0),
    ),
)


def main(hparams):
    config = TRLConfig.update(default_config, hparams['config'])
    metric_fn, eval_prompts, walks = generate_walks()
    rewards = metric_fn(walks)['optimality']
    return trlx.train(
        model_path=small,
        samples=[[walk[:1], walk[1:]] for walk in walks],
        rewards=rewards,
        eval_prompts=eval_prompts,
        metric_fn=lambda samples, **kwargs: metric_fn(samples),
        config=config,
        stop_sequences=['|'],
    )


if __name__ == '__main__':
    trainer = main(json.loads(sys.argv[1]))
