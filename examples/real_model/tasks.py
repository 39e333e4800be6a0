"""Tools of the tasks in this folder: commands in child processes, and the table of their results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from model import find_model

from chatgpt.launch.inputs import quiet_transformers
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.trainer.callbacks import format_table

COLUMNS = ['run', 'before', 'score', 'sampled', 'kl', 'length', 'minutes', 'cpu_minutes', 'peak_gib']


def task_parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path(out), help='folder of the runs and results')
    parser.add_argument('--pretrain', help='hub name or folder of a chat model, a wheel or a GGUF file')
    parser.add_argument('--seed', type=int, default=0)
    return parser


def online_methods(responses: int) -> dict[str, tuple[str, list[str]]]:
    """Returns the runs that learn from a reward, with `responses` per phase: their names, commands and options.

    Trained are the top eight layers, or LoRA's matrices, both with a value head on the shared trunk for PPO; or all
    weights of the policy and of a separate critic. GRPO has four responses to a prompt.
    """
    batch, shared, upper = f'--experience_batch_size={responses}', '--critic=shared', '--num_layers_unfrozen=8'
    groups = [f'--experience_batch_size={responses // 4}', '--num_samples_per_prompt=4']
    return {
        'ppo': ('ppo', [batch, shared, upper]),
        'grpo': ('grpo', [*groups, upper]),
        'ppo_lora': ('ppo', [batch, shared, '--lora_rank=16']),
        'ppo_all': ('ppo', [batch]),
    }


def command(*words: str) -> dict[str, float]:
    """Runs `chatgpt-rlhf` with these arguments. Returns its minutes, CPU minutes and peak GiB."""
    print('\n$ chatgpt-rlhf', shlex.join(words), flush=True)
    begun = time.monotonic()
    child = os.posix_spawn(sys.executable, [sys.executable, '-m', 'chatgpt', *words], os.environ)
    try:
        _, status, used = os.wait4(child, 0)
    except KeyboardInterrupt:  # the child receives it too, and saves
        os.waitpid(child, 0)
        raise
    if status:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    return {'minutes': (time.monotonic() - begun) / 60, 'cpu_minutes': cpu / 60, 'peak_gib': peak}


class Task:
    """The runs of a task in one folder, all from the same model.

    `rows` is the table; `curves` maps a run to held-out scores, the mean score of sampled training responses and KL,
    each a list of (phase, number).
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        quiet_transformers()
        self.name, self.out, self.seed = name, args.out, args.seed
        self.out.mkdir(parents=True, exist_ok=True)
        self.start = find_model(args.pretrain, self.out / 'model')
        self.rows: list[dict[str, Any]] = []
        self.curves: dict[str, Any] = {}

    def path(self, name: str) -> str:
        return str(self.out / name)

    def write(self, name: str, rows: list[dict[str, Any]]) -> str:
        (self.out / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
        return self.path(name)

    def score(self, model: str, name: str, prompts: str, *words: str) -> float:
        """Returns the mean score of the model's responses to a file of prompts, greedy by default."""
        scores = [row['score'] for row in self.answers(model, name, prompts, *words)]
        return sum(scores) / len(scores)

    def answers(self, model: str, name: str, prompts: str, *words: str) -> list[dict[str, Any]]:
        """Returns the model's responses to a file of prompts, greedy by default, with their scores."""
        file = self.path(f'answers_{name.replace(" ", "_")}.jsonl')
        command('evaluate', model, prompts, *words, '--output', file)
        return [json.loads(line) for line in Path(file).read_text().splitlines()]

    def pairs(self, name: str, model: str, prompts: list[dict[str, Any]], *words: str) -> str:
        """Writes pairs of the model's own responses: of four to each prompt, sampled at temperature 1, the best and the
        worst that have any text, where their scores differ. Returns the file, which is not written again."""
        file, count = self.out / f'{name}.jsonl', 4
        if file.is_file():
            return str(file)
        asked = self.write(f'{name}_prompts.jsonl', [row for row in prompts for _ in range(count)])
        found, rows = self.answers(model, name, asked, '--temperature=1', *words), []
        for i, row in enumerate(prompts):
            told = [answer for answer in found[count * i : count * (i + 1)] if answer['response'].strip()]
            own = sorted(told, key=lambda answer: answer['score'])
            if own and own[0]['score'] < own[-1]['score']:
                texts = {'chosen': own[-1]['response'], 'rejected': own[0]['response']}
                if not isinstance(row['prompt'], str):
                    texts = {key: [{'role': 'assistant', 'content': text}] for key, text in texts.items()}
                rows.append({'prompt': row['prompt'], **texts})
        return self.write(file.name, rows)

    def learn(self, run: str, method: str, data: str, *words: str, start: str = '', metric: str = '') -> str:
        """Makes one run. Its held-out `metric` (default: `eval/score_mean`) becomes a row of the table. Returns the
        folder of the model. A run that has ended in this folder is not repeated, and an interrupted one goes on."""
        folder, found = self.out / run, self.out / run / 'used.json'
        if not found.is_file():
            place = ['--save_path', str(folder), f'--seed={self.seed}', '--checkpoint_minutes=0', '--resume=auto']
            used = command(method, data, '--pretrain', start or self.start, *place, *words)
            found.write_text(json.dumps(used))
        evaluated, phases = RunFolder(folder).eval, RunFolder(folder).metrics
        metric = metric or 'eval/score_mean'
        scores = list({row['step']: row[metric] for row in (*evaluated, *phases) if metric in row}.items())
        row: dict[str, Any] = {'run': run}
        if scores:
            row |= {'before': scores[0][1]} if scores[0][0] == 0 else {}
            row['score'] = scores[-1][1]
        columns = {'kl': ('rollout/kl_mean', phases), 'length': ('eval/length_mean', evaluated)}
        row |= {key: rows[-1][name] for key, (name, rows) in columns.items() if rows and name in rows[-1]}
        self.rows.append(row | json.loads(found.read_text()))
        own = {'sampled': 'rollout/score_mean', 'kl': 'rollout/kl_mean'}
        curves = {key: [(m['step'], m[name]) for m in phases if name in m] for key, name in own.items()}
        self.curves[run] = {'score': scores, **curves}
        return str(folder / ('reward_model' if method == 'reward-model' else 'actor'))

    def score_others(self, models: dict[str, str], prompts: str, *words: str, start: str = 'as it is') -> None:
        """Gives a held-out score to the rows of `models` without one; their runs began with the model `start`."""
        own = [row for row in self.rows if row['run'] in models and 'score' not in row]
        if not own:
            return
        known = {row['run']: row['score'] for row in self.rows if 'score' in row}
        for name in (start, *(row['run'] for row in own)):
            if name not in known:
                known[name] = self.score(models[name], name, prompts, *words)
        for row in own:
            row |= {'score': known[row['run']], **({'before': known[start]} if row['run'] != start else {})}

    def score_samples(self, models: dict[str, str], prompts: str, *words: str) -> None:
        """Gives the rows of `models` the mean score of responses at temperature 1, which the methods maximise."""
        for row in self.rows:
            if model := models.get(row['run']):
                row['sampled'] = self.score(model, f'{row["run"]}_sampled', prompts, *words, '--temperature=1')

    def finish(self, about: str, prompts: str, models: dict[str, str], *words: str) -> None:
        """Prints the table and six samples of each model, and writes them to results.json and table.txt."""
        lines = Path(prompts).read_text().splitlines()[:6]
        six = self.write('six.jsonl', [json.loads(line) for line in lines])
        answers = {name: self.answers(model, name, six, *words) for name, model in models.items()}
        asked = [json.loads(line)['prompt'] for line in lines]
        texts = [text if isinstance(text, str) else text[-1]['content'] for text in asked]
        samples = [
            {'prompt': text, **{name: rows[i]['response'] for name, rows in answers.items()}}
            for i, text in enumerate(texts)
        ]
        found = {'task': self.name, 'seed': self.seed, 'rows': self.rows, 'curves': self.curves, 'samples': samples}
        (self.out / 'results.json').write_text(json.dumps(found, indent=1))
        for sample in samples:
            print(f'\n{sample["prompt"]}', *(f'  {name}: {sample[name]!r}' for name in models), sep='\n')
        cells = [{k: f'{v:.3g}' if isinstance(v, float) else v for k, v in row.items()} for row in self.rows]
        table = format_table(cells, [c for c in COLUMNS if any(c in row for row in cells)])
        (self.out / 'table.txt').write_text(f'{table}\n')
        print(f'\n{about}\n\n{table}')
