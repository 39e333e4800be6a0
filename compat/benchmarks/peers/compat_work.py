"""What both sides of `compat_trl.py` compute: one model, given responses and scores, and cases of settings.

A program of TRL's classic era, with the names of either `trl` or `chatgpt_compat.trl`. Runs in the library's environment
and in the peer's, so it imports nothing of either, and torch only inside functions.
"""

from __future__ import annotations

from typing import Any

VOCAB, WIDTH, LAYERS, POSITIONS = 32, 16, 2, 32
PAD, END = 0, 1
PROMPTS = [[5, 9, 12, 7], [8, 3, 30], [21, 14, 6, 11, 2], [4, 17]]
RESPONSES = [[13, 25, 9, 6, END], [19, 22, 31, 7, 7, 12, END], [10, 3], [28, 16, 23, 5]]
EVEN = [[13, 25, 9, 6], [19, 22, 31, 7, END], [10, 3, END], [28, 16, 23, 5, 8, END]]
"""responses that make all sequences equally long: TRL's whitening of rewards also pays padding"""
MASKS = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 1], [1, 1, 1, 1]]
SCORES = [1.25, -0.5, 2.0, 0.375]

PLAIN: dict[str, Any] = {
    'batch_size': 4,
    'mini_batch_size': 4,
    'ppo_epochs': 1,
    'init_kl_coef': 0.3,
    'adap_kl_ctrl': False,
    'cliprange': 0.2,
    'cliprange_value': 0.1,
    'vf_coef': 0.1,
    'gamma': 0.99,
    'lam': 0.9,
    'seed': 0,
}
CASES: dict[str, dict[str, Any]] = {
    'plain': {},
    'four epochs': {'config': {'ppo_epochs': 4}},
    'abs': {'config': {'kl_penalty': 'abs'}},
    'mse': {'config': {'kl_penalty': 'mse', 'adap_kl_ctrl': True, 'target': 2.0, 'horizon': 50.0}, 'steps': 3},
    'full': {'config': {'kl_penalty': 'full'}},
    'adaptive': {'config': {'adap_kl_ctrl': True, 'target': 0.5, 'horizon': 40.0}, 'steps': 3},
    'scaled scores': {'config': {'use_score_scaling': True, 'score_clip': 1.5}, 'steps': 2},
    'normalised scores': {'config': {'use_score_scaling': True, 'use_score_norm': True}, 'steps': 2},
    'whitened rewards': {'config': {'whiten_rewards': True}, 'responses': 'even'},
    'response masks': {'masks': True},
    'shared layers': {'num_shared_layers': 1, 'steps': 2},
}
"""each one step of SGD from the same weights, unless it says more"""


def make_folder(folder: str, salt: float) -> str:
    """A GPT-2 whose weights are a formula, as a Hugging Face folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=2,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            base = 1.0 if name.endswith('weight') and 'ln_' in name else 0.0
            parameter.copy_(base + 0.3 * wave(parameter.numel(), i + salt).view(parameter.shape))
    model.save_pretrained(folder)
    return folder


def wave(count: int, shift: float) -> Any:
    """(count,) fp32 numbers in [-1, 1] that look like none in particular."""
    import torch

    at = torch.arange(count, dtype=torch.float64)
    return torch.sin(12.9898 * at + 0.618 * at.square() % 6.283185307179586 + 7.1 * shift).float()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f'w{i:02d}': i for i in range(VOCAB)}, unk_token='w02'))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token='w00', eos_token='w01', padding_side='right', model_max_length=POSITIONS
    )


def run_case(trl: Any, watch: Any, case: dict[str, Any], policy: str, reference: str) -> dict[str, Any]:
    """One case in the names of `trl`: statistics of each step, per-token numbers and gradients of the last.

    Args:
        trl: the module that the names are taken from.
        watch: (trainer) -> a function of the last step's statistics that gives what it made: {name: rows of tokens}.
    """
    import torch

    def load(folder: str) -> Any:
        model = trl.AutoModelForCausalLMWithValueHead.from_pretrained(folder, summary_dropout_prob=0.0)
        with torch.no_grad():
            model.v_head.summary.weight.copy_(0.2 * wave(WIDTH, 99.0)[None])
            model.v_head.summary.bias.fill_(0.05)
        return model

    model = load(policy)
    shared = case.get('num_shared_layers')
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = trl.PPOTrainer(
        trl.PPOConfig(**PLAIN | case.get('config', {})),
        model,
        None if shared else load(reference),
        tokenizer(),
        optimizer=optimizer,
        num_shared_layers=shared,
    )
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        named = model.named_parameters()
        gradients.update({n: p.grad.detach().clone() for n, p in named if p.requires_grad and p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    made = watch(trainer)
    queries = [torch.tensor(ids) for ids in PROMPTS]
    responses = [torch.tensor(ids) for ids in (EVEN if case.get('responses') == 'even' else RESPONSES)]
    masks = [torch.tensor(m) for m in MASKS] if case.get('masks') else None
    stats = [
        trainer.step(queries, responses, [torch.tensor(s + 0.25 * n) for s in SCORES], masks)
        for n in range(case.get('steps', 1))
    ]
    return {'stats': [plain_stats(s) for s in stats], 'tokens': made(stats[-1]), 'gradients': gradients}


def plain_stats(stats: dict[str, Any]) -> dict[str, float]:
    """The numbers among statistics; of arrays none, of times none."""
    return {k: float(v) for k, v in stats.items() if not hasattr(v, '__len__') and not k.startswith('time/')}


def summary(gradients: dict[str, Any]) -> dict[str, list[float]]:
    """Of each gradient its norm, and its product with two fixed directions, relative to nothing."""
    found = {}
    for name, gradient in gradients.items():
        flat = gradient.double().flatten()
        products = [float(flat @ wave(flat.numel(), shift).double()) for shift in (3.0, 4.0)]
        found[name] = [float(flat.norm()), *products]
    return found
