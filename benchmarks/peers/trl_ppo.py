"""Worker: PPO with four networks in TRL 1.12, the last version that has it (trl.experimental.ppo).

`bf16` is what `accelerate launch --mixed_precision bf16` sets: autocast around the trained pair's forward.
(`PPOConfig(bf16=True)` has no effect, since this trainer builds its own Accelerator.) `bf16 weights` loads the models
in bfloat16.
"""

from __future__ import annotations

import os
import tempfile

from work import ADAMW, EOS, KL_COEF, ServeUpdates, begin, tokenizer, versions

case, line = begin()
if case.precision == 'bf16':
    os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback  # noqa: E402
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402

dtype = torch.bfloat16 if case.precision == 'bf16 weights' else torch.float32
words = tokenizer(case.vocab, case.prompt_tokens + case.new_tokens)
policy = AutoModelForCausalLM.from_pretrained(case.model, dtype=dtype)
reference = AutoModelForCausalLM.from_pretrained(case.model, dtype=dtype)
value = AutoModelForSequenceClassification.from_pretrained(case.model, num_labels=1, dtype=dtype)
reward = AutoModelForSequenceClassification.from_pretrained(case.model, num_labels=1, dtype=dtype)


class Serve(ServeUpdates, TrainerCallback):
    pass


serve = Serve(line)


def count_tokens(module, args, kwargs):  # the reward model sees each response cut at its end, padding masked
    serve.new_tokens += int(kwargs['attention_mask'].sum()) - case.sequences * case.prompt_tokens
    serve.sequences += len(kwargs['attention_mask'])


reward.base_model.register_forward_pre_hook(count_tokens, with_kwargs=True)
parameters = [*policy.parameters(), *value.parameters()]
optimizer = torch.optim.AdamW(parameters, **ADAMW)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
with tempfile.TemporaryDirectory() as folder:
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=case.sequences,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=case.epochs,
            local_rollout_forward_batch_size=case.sequences,
            response_length=case.new_tokens,
            temperature=1.0,
            stop_token_id=EOS if case.lengths == 'eos' else None,
            total_episodes=10**6 * case.sequences,
            kl_coef=KL_COEF,
            num_sample_generations=0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=case.device == 'cpu',
            report_to='none',
            save_strategy='no',
            disable_tqdm=True,
            seed=0,
        ),
        processing_class=words,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({'input_ids': case.prompts().tolist()}),
        optimizers=(optimizer, scheduler),
        callbacks=[serve],
    )
    line.ready(**versions('trl', 'accelerate'), networks=4)
    if line.wait():
        trainer.train()
