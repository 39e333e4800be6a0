"""Worker: GRPO and RLOO in current TRL. `bf16` is `bf16=True`, their default: autocast over fp32 weights.

The loss is GRPO's own ('grpo': a mean over sequences of their token means). Gradient checkpointing is off, as in
ours.py.
"""

from __future__ import annotations

import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from work import ADAMW, EOS, GROUP, KL_COEF, ServeUpdates, begin, text_of, tokenizer, versions

case, line = begin()


class Serve(ServeUpdates, TrainerCallback):
    pass


serve = Serve(line, steps=case.epochs)


def score(completions, completion_ids, **_):
    serve.new_tokens += sum(map(len, completion_ids))
    serve.sequences += len(completion_ids)
    return [float(len(text) % 7) for text in completions]


model = AutoModelForCausalLM.from_pretrained(case.model, dtype='float32')
model.generation_config.eos_token_id = EOS
words = tokenizer()
grpo = case.method == 'grpo'
with tempfile.TemporaryDirectory() as folder:
    loss = {'loss_type': 'grpo'} if grpo else {}
    config = (GRPOConfig if grpo else RLOOConfig)(
        output_dir=folder,
        per_device_train_batch_size=case.sequences,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=GROUP,
        num_iterations=case.epochs,
        max_completion_length=case.new_tokens,
        temperature=1.0,
        beta=KL_COEF if case.kl else 0.0,
        max_steps=10**6,
        learning_rate=ADAMW['lr'],
        lr_scheduler_type='constant',
        optim='adamw_torch_fused',
        weight_decay=0.0,
        bf16=case.precision == 'bf16',
        gradient_checkpointing=False,
        use_cpu=True,
        report_to='none',
        save_strategy='no',
        disable_tqdm=True,
        seed=0,
        **loss,
    )
    trainer = (GRPOTrainer if grpo else RLOOTrainer)(
        model=model,
        reward_funcs=score,
        args=config,
        processing_class=words,
        train_dataset=Dataset.from_dict({'prompt': [text_of(ids) for ids in case.prompts()]}),
        callbacks=[serve],
    )
    line.ready(**versions('trl', 'accelerate'), networks=1 + case.kl)
    if line.wait():
        trainer.train()
