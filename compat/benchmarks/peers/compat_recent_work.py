"""What both sides of `compat_trl.py` compute: models by a formula, given responses, and cases of settings.

Programs of TRL's second era, with the names of either `trl` or `chatgpt_compat.trl`. Runs in the library's environment
and in the peer's, so it imports nothing of either, and torch only inside functions.
"""

from __future__ import annotations

from typing import Any

from compat_work import END, PAD, POSITIONS, VOCAB, make_folder, summary, tokenizer, wave

PROMPTS = [[5, 9, 12, 7], [8, 3, 30, 22], [21, 14, 6, 11], [4, 17, 2, 19]]
EVEN = [[13, 25, 9, 6, 11], [19, 22, 31, 7, 7], [10, 3, 24, 18, 2], [28, 16, 23, 5, 29]]
ENDED = [[13, 25, 9, 6, END], [19, 22, 31, 7, 7], [10, 3, 24, 18, END], [28, 16, 23, 5, 29]]
"""two have the end token, as their last: no padding"""
SHORT = [[13, 25, END], [19, 22, 31, 7, 7], [10, END], [28, 16, 23, 5, END]]
"""of different lengths: TRL's faults enter"""

PLAIN: dict[str, Any] = {
    'per_device_train_batch_size': 4,
    'total_episodes': 4,
    'num_ppo_epochs': 1,
    'response_length': 5,
    'learning_rate': 1e-2,
    'lr_scheduler_type': 'constant',
    'optim': 'adamw_torch',
    'kl_coef': 0.3,
    'gamma': 0.99,
    'lam': 0.9,
    'cliprange': 0.05,
    'cliprange_value': 0.02,
    'vf_coef': 0.1,
    'max_grad_norm': 0.0,
    'bf16': False,
    'gradient_checkpointing': False,
    'num_sample_generations': 0,
    'save_strategy': 'no',
    'report_to': 'none',
    'seed': 0,
}
PPO: dict[str, dict[str, Any]] = {
    'plain': {'responses': EVEN},
    'three epochs': {'responses': EVEN, 'config': {'num_ppo_epochs': 3}},
    'k3, micro-batches': {
        'responses': EVEN,
        'apart': ('val/ratio_var',),
        'config': {
            'kl_estimator': 'k3',
            'per_device_train_batch_size': 2,
            'gradient_accumulation_steps': 2,
            'num_ppo_epochs': 2,
        },
    },
    'end token and penalty': {
        'responses': ENDED,
        'config': {'stop_token': 'eos', 'missing_eos_penalty': 1.0, 'temperature': 1.3},
    },
    'different lengths': {'responses': SHORT, 'config': {'stop_token': 'eos'}, 'only': ('scores', 'kl')},
}
"""one update from the same weights; `only`: the kinds of numbers in which TRL's faults have no part; `apart`: logged over
micro-batches there and over train batches here"""

PAIRS = [
    ([5, 9, 12], [13, 25, 9], [6, 11]),
    ([8, 3, 30, 22], [19], [31, 7, 7]),
    ([21, 14], [10, 3, 24, 18], [2, 20, 4]),
]
OFFLINE: dict[str, dict[str, Any]] = {
    'per_device_train_batch_size': 3,
    'max_steps': 2,
    'logging_steps': 1,
    'learning_rate': 1e-2,
    'lr_scheduler_type': 'linear',
    'optim': 'sgd',
    'max_grad_norm': 0.0,
    'bf16': False,
    'gradient_checkpointing': False,
    'save_strategy': 'no',
    'report_to': 'none',
    'seed': 0,
    'disable_tqdm': True,
}
LEARNERS: dict[str, dict[str, Any]] = {
    'dpo': {'kind': 'DPO', 'config': {'beta': 0.4}},
    'dpo, AdamW': {'kind': 'DPO', 'config': {'beta': 0.4, 'optim': 'adamw_torch', 'lr_scheduler_type': 'cosine'}},
    'dpo, hinge': {'kind': 'DPO', 'config': {'beta': 0.4, 'loss_type': ['hinge']}},
    'dpo, robust': {'kind': 'DPO', 'config': {'beta': 0.4, 'loss_type': ['robust'], 'label_smoothing': 0.2}},
    'sft, completions': {'kind': 'SFT', 'config': {'loss_type': 'nll'}},
    'sft, text': {'kind': 'SFT', 'config': {'loss_type': 'nll'}, 'text': True, 'scale': 17 / 20},
    'reward': {'kind': 'Reward', 'config': {'center_rewards_coefficient': 0.05}},
    'reward, margins': {'kind': 'Reward', 'config': {}, 'margins': [0.5, 0.25, 1.0]},
}
"""two steps of SGD over three rows, unless it says more; `scale`: what transformers makes of the mean over the 17 tokens
that are predicted, for it divides by the 20 that there are"""


def text(ids: list[int]) -> str:
    return ' '.join(f'w{i:02d}' for i in ids)


def make_folders(folder: str) -> dict[str, str]:
    """Policy, reference, reward model and value model, as Hugging Face folders with the tokenizer."""
    made = {name: make_folder(f'{folder}/{name}', salt) for name, salt in (('policy', 0.0), ('reference', 0.37))}
    for name, salt in (('reward', 0.71), ('value', 0.53)):
        made[name] = make_classifier(made['policy'], f'{folder}/{name}', salt)
    for path in made.values():
        tokenizer().save_pretrained(path)
    return made


def make_classifier(trunk: str, folder: str, salt: float) -> str:
    """A GPT-2 classifier with one label whose weights are a formula."""
    import torch
    from transformers import AutoConfig, GPT2ForSequenceClassification

    config = AutoConfig.from_pretrained(trunk, num_labels=1)
    model = GPT2ForSequenceClassification(config)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            base = 1.0 if name.endswith('weight') and 'ln_' in name else 0.0
            parameter.copy_(base + 0.3 * wave(parameter.numel(), i + salt).view(parameter.shape))
    model.save_pretrained(folder)
    return folder


def load(name: str, folders: dict[str, str]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if name in ('policy', 'reference') else AutoModelForSequenceClassification
    return kind.from_pretrained(folders[name], dtype='float32')


def gradients_of(**models: Any) -> dict[str, Any]:
    return {
        f'{owner}.{name}': p.grad.detach().clone()
        for owner, model in models.items()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def run_ppo(trl: Any, watch: Any, name: str, folders: dict[str, str], out: str) -> dict[str, Any]:
    """One update: what the log says, numbers per token by prompt, and the gradients of the first optimizer step.

    Args:
        trl: `PPOConfig` and `PPOTrainer`.
        watch: (trainer, responses by prompt) makes it answer with those; gives a function of nothing that gives
            {kind: rows of tokens in the order of `PROMPTS`}, and the optimizers.
    """
    from datasets import Dataset

    case = PPO[name]
    models = {kind: load(kind, folders) for kind in ('policy', 'reference', 'reward', 'value')}
    trainer = trl.PPOTrainer(
        args=trl.PPOConfig(output_dir=out, **PLAIN | case.get('config', {})),
        processing_class=tokenizer(),
        model=models['policy'],
        ref_model=models['reference'],
        reward_model=models['reward'],
        value_model=models['value'],
        train_dataset=Dataset.from_dict({'input_ids': PROMPTS}),
    )
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, case['responses'], strict=True)}
    made, optimizers = watch(trainer, answers)
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        for owner in ('policy', 'value'):
            found = gradients_of(**{owner: models[owner]})
            gradients.update({k: g for k, g in found.items() if k not in gradients})

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(keep)
    trainer.train()
    logs = {k: float(v) for k, v in trainer.state.log_history[-1].items() if k not in ('eps', 'epoch', 'step')}
    return {'logs': [logs], 'tokens': made(), 'gradients': summary(gradients)}


def run_learner(trl: Any, name: str, folders: dict[str, str], out: str) -> dict[str, Any]:
    """Two steps of DPO, SFT or reward modelling: what the log says, and the gradients of the first one."""
    from datasets import Dataset

    case = LEARNERS[name]
    kind = case['kind']
    words = tokenizer()
    model = load('reward' if kind == 'Reward' else 'policy', folders)
    if kind == 'SFT':
        rows = [{'prompt': text(p) + ' ', 'completion': text(a)} for p, a, _ in PAIRS]
        rows = [{'text': r['prompt'] + r['completion']} for r in rows] if case.get('text') else rows
    else:
        rows = [{'prompt': text(p) + ' ', 'chosen': text(a), 'rejected': text(b)} for p, a, b in PAIRS]
    if 'margins' in case:
        rows = [row | {'margin': m} for row, m in zip(rows, case['margins'], strict=True)]
    config = getattr(trl, f'{kind}Config')(output_dir=out, max_length=POSITIONS, **OFFLINE | case['config'])
    more = {'ref_model': load('reference', folders)} if kind == 'DPO' else {}
    trainer = getattr(trl, f'{kind}Trainer')(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=words, **more
    )
    gradients: dict[str, Any] = {}
    trl.first_step(trainer, lambda: gradients.update(gradients or gradients_of(model=model)))
    trainer.train()
    logs = [line for line in trainer.state.log_history if 'loss' in line]
    names = {k for k in logs[0] if k.split('/')[0] in ('loss', 'rewards', 'logps', 'grad_norm', 'accuracy', 'margin')}
    names |= {'learning_rate', *({'mean_reward'} & set(logs[0]))}
    logs = logs[:1] if 'scale' in case else logs  # from there the weights differ
    return {'logs': [{k: float(line[k]) for k in sorted(names)} for line in logs], 'gradients': summary(gradients)}


__all__ = ['END', 'LEARNERS', 'PAD', 'PPO', 'PROMPTS', 'VOCAB', 'make_folders', 'run_learner', 'run_ppo']
