"""Helpful responses: the reward is the gain over a given response, passed as metadata of the prompt; turns of the user
end a response."""

import json
import sys

import trlx
from trlx.data.default_configs import (
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=48,
        epochs=10000,
        total_steps=4,
        batch_size=4,
        checkpoint_interval=10000,
        eval_interval=2,
        pipeline='PromptPipeline',
        trainer='AcceleratePPOTrainer',
        checkpoint_dir='checkpoints/ppo_hh',
    ),
    model=ModelConfig(model_path='gpt2', num_layers_unfrozen=-1),
    tokenizer=TokenizerConfig(tokenizer_path='gpt2', truncation_side='left'),
    optimizer=OptimizerConfig(name='adamw', kwargs=dict(lr=1e-3, betas=(0.9, 0.95), eps=1.0e-8, weight_decay=1.0e-6)),
    scheduler=SchedulerConfig(name='cosine_annealing', kwargs=dict(T_max=4, eta_min=1e-4)),
    method=PPOConfig(
        name='PPOConfig',
        num_rollouts=8,
        chunk_size=4,
        ppo_epochs=1,
        init_kl_coef=0.05,
        target=6,
        horizon=10000,
        gamma=1,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=1,
        scale_reward='running',
        ref_mean=None,
        ref_std=None,
        cliprange_reward=10,
        gen_kwargs=dict(max_new_tokens=8, top_k=0, top_p=1.0, do_sample=True),
    ),
)
CALLS = []


def score(texts):
    return [float(len(set(text))) for text in texts]


def reward_fn(samples, prompts, original_output, **kwargs):
    CALLS.append((samples, prompts, original_output, kwargs))
    original = score([prompt + output for prompt, output in zip(prompts, original_output)])
    return [new - old for new, old in zip(score(samples), original)]


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams['config'])
    questions = ['how are you?', 'what is the time?', 'where is the station?', 'who wrote it?']
    prompts = [{'prompt': f'human: {q} assistant:', 'original_output': f' answer {i}'} for i, q in enumerate(questions)]
    return trlx.train(
        prompts=prompts, eval_prompts=prompts[:2], reward_fn=reward_fn, config=config, stop_sequences=['human:', 'e']
    )


if __name__ == '__main__':
    trainer = main(json.loads(sys.argv[1]))
