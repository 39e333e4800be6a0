"""Worker: classic PPO in TRL 0.11.4, with a value head on the policy's trunk and a loop of `generate` and `step`.

`bf16` is `accelerator_kwargs={'mixed_precision': 'bf16'}`, `bf16 weights` loads both models in bfloat16. Scores are
zero, as in ours.py.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (trl expects it to be loaded)
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from work import ADAMW, EOS, KL_COEF, PAD, begin, tokenizer, versions

case, line = begin()
dtype = torch.bfloat16 if case.precision == 'bf16 weights' else torch.float32


def load():
    return AutoModelForCausalLMWithValueHead.from_pretrained(case.model, torch_dtype=dtype, summary_dropout_prob=0.0)


model = load()
trainer = PPOTrainer(
    PPOConfig(
        batch_size=case.sequences,
        mini_batch_size=case.sequences,
        gradient_accumulation_steps=1,
        ppo_epochs=case.epochs,
        init_kl_coef=KL_COEF,
        adap_kl_ctrl=False,
        learning_rate=ADAMW['lr'],
        seed=0,
        accelerator_kwargs={'cpu': case.device == 'cpu'}
        | ({'mixed_precision': 'bf16'} if case.precision == 'bf16' else {}),
    ),
    model,
    load(),
    tokenizer(case.vocab, case.prompt_tokens + case.new_tokens),
    optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
)
prompts = list(case.prompts().to(case.device))
generation = {
    'max_new_tokens': case.new_tokens,
    'min_length': -1,
    'do_sample': True,
    'top_k': 0,
    'top_p': 1.0,
    'pad_token_id': PAD,
    'eos_token_id': EOS if case.lengths == 'eos' else None,
}

line.ready(**versions('trl', 'accelerate'), networks=2)
while line.wait():
    responses = trainer.generate(prompts, batch_size=case.sequences, return_prompt=False, **generation)
    trainer.step(prompts, responses, [torch.zeros(())] * case.sequences)
    line.done(sum(map(len, responses)), len(responses))
