"""Short runs of every kind, and everything they came to: all metrics of every phase, and hashes of weights and
optimizer states.

`RUNS` is the table. `record.py` writes it to a file and compares two files, so that a change that should alter no
number can show that it altered none. Only names that users have are used here, for the same file runs on the commits
before and after such a change.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_process_workers import InProcessWorkers
from safetensors.torch import load_file

from chatgpt.data import TokenizedLabelled, TokenizedPreference
from chatgpt.nn import GPTActor, GPTCritic, ILQLModel, LlamaActor, RewardModel
from chatgpt.rollout import Abilities, EngineAround, LocalEngine, RemoteEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import char_tokenizer, tiny_causal_lm, tiny_config
from chatgpt.trainer import (
    BetaEvaluation,
    DPOTrainer,
    ILQLTrainer,
    KTOTrainer,
    ORPOTrainer,
    PPOTrainer,
    PromptEvaluation,
    RewardModelTrainer,
    RFTTrainer,
    SFTTrainer,
    SimPOTrainer,
    rewarded,
)
from chatgpt.trainer.callbacks import EMA, Callback, Evaluator, ProgressBar
from chatgpt.types import Sequence

Record = dict[str, str]
"""what a run came to: 'phase 1 ppo/policy_loss' → the number as float.hex() writes it, 'sha256 ...' → a hash"""

PROMPTS = [f'a {word}' for word in 'one two three four five six seven eight nine ten'.split()]
WIDTH: dict[str, Any] = {'hidden': 16, 'positions': 32}
GROUPS: dict[str, Any] = {'num_samples_per_prompt': 4, 'experience_batch_size': 2}
FREE: dict[str, Any] = {'kl_coef': 0.0, 'reference': False}


@dataclass
class Run:
    """What a run is given, and its record so far."""

    strategy: Any
    folder: Path
    """empty; the same on all ranks"""
    lr_scale: float
    record: Record

    def note(self, name: str, value: float) -> None:
        self.record[name] = float(value).hex()

    def note_tensors(self, name: str, tensors: dict[str, Any]) -> None:
        digest = hashlib.sha256()
        for key in sorted(tensors):
            value = torch.as_tensor(tensors[key]).detach().cpu().contiguous()
            digest.update(f'{key} {value.dtype} {tuple(value.shape)}\n'.encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        self.record[f'sha256 {name}'] = digest.hexdigest()

    def finish(self, trainer: Any) -> None:
        """Note the weights and optimizer states that a run ends with."""
        for name, model in trainer.models().items():
            self.note_tensors(f'weights of {name}', self.strategy.unwrap(model).state_dict())
        for name, optimizer in trainer.optimizers().items():
            state = optimizer.state_dict()['state']
            self.note_tensors(
                f'optimizer of {name}', {f'{i} {slot}': v for i, slots in state.items() for slot, v in slots.items()}
            )

    def note_folder(self, name: str, folder: Path) -> None:
        """The weights that were written there."""
        self.note_tensors(name, load_file(folder / 'model.safetensors'))

    def trained(self, model: Any, lr: float = 1e-2) -> Any:
        """(model, optimizer), prepared."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return self.strategy.prepare((model, self.strategy.make_optimizer(parameters, lr=lr * self.lr_scale, eps=1e-5)))

    def callbacks(self, *more: Any) -> list[Any]:
        return [ProgressBar(enabled=False), *more, Notes(self)]


class Notes(Callback):
    """Notes every metric of every phase, but for times and memory."""

    order = 1000  # after those that add metrics

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        for name in sorted(metrics):
            if not name.startswith(('perf/', 'time')):
                self.run.note(f'phase {step} {name}', metrics[name])


class StopAfter(Callback):
    def __init__(self, phase: int) -> None:
        self.phase = phase

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.phase:
            trainer.request_stop()


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) + len(r) / 7 for r in responses]


def rarely(prompts: list[str], responses: list[str]) -> list[float]:
    """Often equal for all responses to a prompt."""
    return [float('e' in r) for r in responses]


class AheadOfTime(EngineAround):
    """Draws with a copy of the weights of the latest `begin`, when it is asked."""

    def __init__(self) -> None:
        super().__init__(LocalEngine())
        self.abilities = Abilities(copies_weights=False, reproducible=True, answers_ahead=True)

    def begin(self, actor: Any) -> None:
        super().begin(deepcopy(actor))

    def submit(self, call: Any) -> list[Any]:
        return self.generate(call)

    def take(self, ticket: list[Any]) -> list[Any]:
        return ticket

    def cancel(self, ticket: list[Any]) -> None:
        pass


# ---------------------------------------------------------------------- online


def online(
    run: Run,
    *callbacks: Any,
    critic: bool = True,
    reference: bool = True,
    reward: Any = vowels,
    mask: bool = False,
    actor: dict[str, Any] | None = None,
    **settings: Any,
) -> PPOTrainer:
    torch.manual_seed(1)
    policy = GPTActor(config=tiny_config('gpt2', **WIDTH), **(actor or {}))
    if mask:
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(3.0)  # so that few tokens are likely
    frozen = [run.strategy.prepare(deepcopy(policy)) if wanted else None for wanted in (reference, mask)]
    values, value_optim = run.trained(GPTCritic(config=tiny_config('gpt2', **WIDTH))) if critic else (None, None)
    policy, optim = run.trained(policy)
    sizes = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_epochs': 2}
    sizes |= {'max_new_tokens': 6, 'max_tokens_per_batch': 24}
    given = {'mask_model': frozen[1], 'tokenizer': char_tokenizer(), 'callbacks': run.callbacks(*callbacks)}
    models = policy, values, reward, frozen[0], optim, value_optim
    return PPOTrainer(run.strategy, *models, **given, **(sizes | settings))


def fitted(run: Run, trainer: PPOTrainer, phases: int = 2, update: int = 1) -> None:
    trainer.fit(PROMPTS, 1, phases * update, update)
    run.finish(trainer)


def ppo(run: Run) -> None:
    settings = {'kl_target': 3.0, 'kl_horizon': 50.0, 'score_scaling': 'running', 'score_clip': 2.0}
    settings |= {'entropy_coef': 0.01, 'lr_schedule': 'linear', 'missing_eos_score': -1.0, 'whiten_rewards': True}
    fitted(run, online(run, EMA(0.9, path=run.folder / 'average'), **settings), update=2)
    run.note_folder('average', run.folder / 'average')


# settings of `online` for runs of two phases; no critic unless one is asked for
ONLINE: dict[str, dict[str, Any]] = {
    'ppo_bf16': {'critic': True, 'tis_cap': 2.0, 'kl_kind': 'k3'},
    'shared_trunk': {'actor': {'value_head': True}},
    'hydra': {'critic': True, 'reference': False, 'actor': {'num_layers_unfrozen': 1}},
    'lora': {'critic': True, 'reference': False, 'actor': {'lora_rank': 2}},
    'grpo': GROUPS | {'advantage_estimator': 'grpo', 'kl_in': 'loss'},
    'gspo': GROUPS | FREE | {'advantage_estimator': 'grpo', 'policy_loss': 'gspo'},
    'dr_grpo': GROUPS
    | FREE
    | {'advantage_estimator': 'dr_grpo', 'dual_clip': 3.0, 'eps_clip_high': 0.3, 'overlong_filter': True},
    'rloo': GROUPS | {'advantage_estimator': 'rloo', 'policy_loss': 'reinforce'},
    'reinforce_pp': {'advantage_estimator': 'reinforce++', 'gamma': 0.9},
    'reinforce_pp_baseline': GROUPS | {'advantage_estimator': 'reinforce++_baseline'},
    'nlpo': {'mask': True, 'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6, 'nlpo_update_interval': 1},
    'dynamic_sampling': GROUPS | FREE | {'reward': rarely, 'advantage_estimator': 'grpo', 'dynamic_sampling_rounds': 3},
}


def ppo_sampling(run: Run) -> None:
    """Temperature, stop strings and the small settings of collecting and learning."""
    sampling = {'temperature': 0.8, 'top_k': 20, 'top_p': 0.9, 'stop_strings': ['e']}
    settings = {'buffer_limit': 7, 'sample_replay_buffer': True, 'max_epochs': 3, 'token_penalty': 0.01}
    settings |= {'overlong_buffer': 3, 'packing': False, 'advantage_estimator': 'a2c', 'kl_kind': 'full'}
    fitted(run, online(run, **sampling, **settings), update=2)


def reward_model_scores(run: Run) -> None:
    torch.manual_seed(2)
    scorer = run.strategy.prepare(RewardModel(tiny_causal_lm('gpt2', **WIDTH)))
    fitted(run, online(run, reward=[(0.5, scorer), (1.0, vowels)], offload='idle'))


def ptx(run: Run) -> None:
    fitted(run, online(run, ptx_coef=0.5, pretrain_data=demonstrations()))


def stale(run: Run) -> None:
    fitted(run, online(run, engine=AheadOfTime(), max_staleness=1, tis_cap=2.0), phases=3)


def stale_workers(run: Run) -> None:
    with RemoteEngine(InProcessWorkers(2)) as engine:
        fitted(run, online(run, engine=engine, max_staleness=1, tis_cap=2.0), phases=3)


def stepwise(run: Run) -> None:
    trainer = online(run)
    world, rank = run.strategy.world_size, run.strategy.rank
    for number in range(2):
        queries = PROMPTS[4 * number : 4 * number + 4][rank::world]
        ids: Any = trainer.generate(queries)
        run.note_tensors(f'responses {number}', dict(zip(queries, ids, strict=True)))
        metrics = trainer.step(queries, ids, [float(len(set(r.tolist()))) for r in ids])
        run.note(f'returned by step {number}', metrics['ppo/policy_loss'])
    run.finish(trainer)
    trainer.save_pretrained(run.folder / 'saved')
    run.note_folder('saved', run.folder / 'saved')


def ppo_resumed(run: Run) -> None:
    settings = {'kl_target': 3.0, 'score_scaling': 'running', 'lr_schedule': 'cosine'}
    first = online(run, StopAfter(2), **settings)
    first.fit(PROMPTS, 1, 3, 1)
    folder = first.save_checkpoint(run.folder / 'checkpoint')
    second = online(run, **settings)
    second.set_prompts(PROMPTS)
    second.load_checkpoint(folder)
    second.fit(PROMPTS, 1, 3, 1)
    run.finish(second)


def stale_resumed(run: Run) -> None:
    settings = {'max_staleness': 1, 'tis_cap': 2.0}
    first = online(run, StopAfter(1), engine=AheadOfTime(), **settings)
    first.fit(PROMPTS, 1, 3, 1)
    folder = first.save_checkpoint(run.folder / 'checkpoint')
    second = online(run, engine=AheadOfTime(), **settings)
    second.load_checkpoint(folder)
    second.fit(PROMPTS, 1, 3, 1)
    run.finish(second)


def ppo_evaluated(run: Run) -> None:
    fitted(run, online(run, evaluator(run)))


# ---------------------------------------------------------------------- offline


def sequence(prompt: list[int], response: list[int], skipped: int | None = None) -> Sequence:
    mask = torch.ones(len(response), dtype=torch.bool)
    if skipped is not None:
        mask[skipped] = False
    return Sequence(prompt_ids=torch.tensor(prompt), response_ids=torch.tensor(response), response_mask=mask)


def demonstrations() -> list[Sequence]:
    """Of several lengths; in some a token does not count."""
    found = []
    for i in range(11):
        response = [6 + (i + j) % 9 for j in range(2 + i % 4)] + [2]
        found.append(sequence([4 + i % 5] * (1 + i % 3), response, skipped=1 if i % 4 == 1 else None))
    return found


def preferences(answers: int = 2) -> list[TokenizedPreference]:
    found = []
    for i in range(10):
        responses = [
            torch.tensor([6 + (i * (k + 1) + j) % 11 for j in range(2 + (i + k) % 3)] + [20 + k, 2])
            for k in range(answers)
        ]
        masks = [torch.ones_like(r, dtype=torch.bool) for r in responses]
        found.append(
            TokenizedPreference(
                prompt_ids=torch.tensor([4 + i % 4]), responses=responses, response_masks=masks, scores=None
            )
        )
    return found


def labelled() -> list[TokenizedLabelled]:
    return [TokenizedLabelled(sequence=s, label=float(i % 2)) for i, s in enumerate(demonstrations())]


def policy(**kw: Any) -> GPTActor:
    torch.manual_seed(1)
    dropout = kw.pop('dropout', 0.0)
    return GPTActor(config=tiny_config('gpt2', dropout=dropout, **WIDTH), **kw)


OFFLINE: dict[str, Any] = {'train_batch_size': 4, 'max_epochs': 1, 'log_interval': 1, 'max_tokens_per_batch': 24}


def learned(run: Run, kind: Any, model: Any, data: Any, eval_data: Any = None, *callbacks: Any, **settings: Any) -> Any:
    model, optim = run.trained(model)
    return kind(
        run.strategy, model, optim, data, eval_data, callbacks=run.callbacks(*callbacks), **(OFFLINE | settings)
    )


def completed(run: Run, trainer: Any) -> None:
    trainer.fit()
    run.finish(trainer)


def evaluator(run: Run) -> Evaluator:
    """Notes the table of the last evaluation too, where the answers stand."""
    evaluation = PromptEvaluation(
        PROMPTS[:5],
        char_tokenizer(),
        vowels,
        max_new_tokens=5,
        do_sample=True,
        num_rows=0,
        metric_fn=lambda samples, prompts, outputs: {'length': [float(len(o)) for o in outputs]},
    )

    def evaluate(trainer: Any) -> dict[str, float]:
        found = evaluation(trainer)
        for name in sorted(found):
            run.note(f'evaluation after phase {trainer.phase} {name}', found[name])
        return found

    return Evaluator(evaluate, 1, metric='score_mean')


def sft(run: Run) -> None:
    settings = {'max_epochs': 2, 'lr_schedule': 'cosine', 'warmup_steps': 2, 'log_interval': 2}
    completed(run, learned(run, SFTTrainer, policy(dropout=0.1), demonstrations(), demonstrations()[:3], **settings))


def sft_llama(run: Run) -> None:
    torch.manual_seed(1)
    model = LlamaActor(config=tiny_config('llama', **WIDTH), lora_rank=2)
    completed(run, learned(run, SFTTrainer, model, demonstrations(), packing=False))


def sft_resumed(run: Run) -> None:
    """In the middle of an epoch."""
    average = EMA(0.9, path=run.folder / 'average')
    first = learned(run, SFTTrainer, policy(dropout=0.1), demonstrations(), None, StopAfter(2), EMA(0.9), max_epochs=2)
    first.fit()
    folder = first.save_checkpoint(run.folder / 'checkpoint')
    second = learned(run, SFTTrainer, policy(dropout=0.1), demonstrations(), None, average, max_epochs=2)
    second.load_checkpoint(folder)
    completed(run, second)
    run.note_folder('average', run.folder / 'average')


def sft_evaluated(run: Run) -> None:
    completed(
        run, learned(run, SFTTrainer, policy(), demonstrations(), None, evaluator(run), tokenizer=char_tokenizer())
    )


def rft(run: Run) -> None:
    model, optim = run.trained(policy())
    settings = {'num_rounds': 2, 'num_samples_per_prompt': 4, 'max_epochs': 2, 'train_batch_size': 4}
    settings |= {'max_new_tokens': 6, 'tokenizer': char_tokenizer(), 'callbacks': run.callbacks()}
    trainer = RFTTrainer(run.strategy, model, optim, PROMPTS[:5], vowels, **settings)
    completed(run, trainer)


def reward_model(run: Run) -> None:
    torch.manual_seed(1)
    model = RewardModel(tiny_causal_lm('gpt2', **WIDTH))
    settings = {'center_rewards_coefficient': 0.01}
    completed(run, learned(run, RewardModelTrainer, model, preferences(3), preferences(2)[:3], **settings))


def reward_model_labels(run: Run) -> None:
    torch.manual_seed(1)
    completed(
        run, learned(run, RewardModelTrainer, RewardModel(tiny_causal_lm('gpt2', **WIDTH)), labelled(), labelled()[:3])
    )


def with_reference(run: Run, kind: Any, data: Any, **settings: Any) -> None:
    model = policy()
    reference = run.strategy.prepare(deepcopy(model))
    completed(run, learned(run, kind, model, data, data[:3], initial_model=reference, **settings))


def dpo_lora(run: Run) -> None:
    completed(run, learned(run, DPOTrainer, policy(lora_rank=2), preferences(), loss_type='cdpo'))


def ilql(run: Run) -> None:
    torch.manual_seed(1)
    model = ILQLModel(tiny_causal_lm('gpt2', **WIDTH))
    data = demonstrations()
    records = rewarded(data, [float(i % 3) for i in range(len(data))])
    prompts = PromptEvaluation(PROMPTS[:3], char_tokenizer(), vowels, max_new_tokens=4, num_rows=0)
    evaluation = Evaluator(BetaEvaluation(prompts, (0.0, 4.0)), 1)
    settings = {'alpha': 0.3, 'target_sync_interval': 2, 'max_epochs': 2, 'tokenizer': char_tokenizer()}
    completed(run, learned(run, ILQLTrainer, model, records, records[:3], evaluation, **settings))


# ---------------------------------------------------------------------- the table

RUNS: dict[str, Callable[[Run], None]] = {
    name: partial(lambda settings, run: fitted(run, online(run, **settings)), {'critic': False} | settings)
    for name, settings in ONLINE.items()
}
RUNS |= {
    'dpo': lambda run: with_reference(run, DPOTrainer, preferences(), max_epochs=2),
    'dpo_ipo': lambda run: with_reference(
        run, DPOTrainer, preferences(), loss_type='ipo', precompute_ref_logprobs=False
    ),
    'kto': lambda run: with_reference(run, KTOTrainer, labelled(), undesirable_weight=1.5),
    'orpo': lambda run: completed(run, learned(run, ORPOTrainer, policy(), preferences(), preferences()[:3])),
    'simpo': lambda run: completed(run, learned(run, SimPOTrainer, policy(), preferences(), preferences()[:3])),
}
NAMES = """
ppo ppo_sampling reward_model_scores ptx stale stale_workers stepwise ppo_resumed stale_resumed ppo_evaluated sft
sft_llama sft_resumed sft_evaluated rft reward_model reward_model_labels dpo_lora ilql
"""
RUNS |= {name: globals()[name] for name in NAMES.split()}
BF16 = {'ppo_bf16'}


def record_run(name: str, *, ranks: bool = False, folder: Path | None = None, lr_scale: float = 1.0) -> Record:
    """The record of one run, in this process.

    Args:
        ranks: under DDP, as one rank of the process group that is running; otherwise under the naive strategy.
        folder: a new one; with `ranks`, the same on each.
        lr_scale: multiplies learning rates, for a negative control.
    """
    precision = 'bf16' if name in BF16 else 'fp32'
    kind = DDPStrategy if ranks else NaiveStrategy
    record: Record = {}
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as own,
        kind(seed=3, precision=precision, device='cpu') as strategy,
    ):
        warnings.simplefilter('ignore')
        RUNS[name](Run(strategy, folder or Path(own), lr_scale, record))
    assert any(key.startswith('sha256 weights') for key in record), f'{name} recorded no weights'
    return record


def first_difference(a: Record, b: Record) -> str | None:
    """The first entry of two records that differs, with both values; None when they are equal."""
    for key in [*a, *(k for k in b if k not in a)]:
        if a.get(key) != b.get(key):
            return f'{key}: {readable(a.get(key))} against {readable(b.get(key))}'
    return None


def readable(value: str | None) -> str:
    if value is None:
        return 'nothing'
    try:
        number = float.fromhex(value)
    except ValueError:
        return value
    return f'{value} ({number!r})' if math.isfinite(number) else value
