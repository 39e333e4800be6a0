"""The page of benchmarks/environments.py: tables, intervals, what counts as a collapse, the picture, and its words.

Left out: the runs (`environments_runs`).
"""

from __future__ import annotations

import math
from pathlib import Path

import environments_runs as plan
from environments_runs import Budget, Record, bootstrapping, key, key_of, read, tuned

WINDOW = 5
"""phases over which the success of training episodes is averaged"""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t, by the number of values"""


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % interval by Student's t over seeds."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    variance = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
    half = T_95[len(values)] * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def shares(values: list[float]) -> str:
    """Of successes: the interval is cut at 0 and 1."""
    mean, low, high = interval(values)
    return f'{mean:.2f} ({max(low, 0):.2f}, {min(high, 1):.2f})'


def averaged(r: Record) -> list[float]:
    """Success of training episodes up to each phase, over the last `WINDOW` phases of them."""
    success = [row[2] for row in r['rows']]
    return [sum(part) / len(part) for i in range(len(success)) if (part := success[max(0, i + 1 - WINDOW) : i + 1])]


def collapse(r: Record) -> str:
    """How a run collapsed; empty where it did not."""
    if r['non_finite']:
        return 'not finite'
    success, entropy = averaged(r), [row[4] for row in r['rows'][-WINDOW:]]
    if success[-1] < 0.5 * max(success):
        return 'fell'
    if sum(entropy) / len(entropy) < 0.01 and success[-1] < 0.5:
        return 'stuck'
    fell = any(now < 0.5 * max(success[: i + 1]) for i, now in enumerate(success))
    return 'fell and came back' if fell else ''


def named(setting: Record) -> str:
    words = {'lam': 'λ', 'num_samples_per_prompt': 'groups of'}
    parts = [f'{words.get(name, name)} {value:g}' for name, value in setting.items() if name != 'advantage_estimator']
    return ', '.join([*parts, *(['baseline of the group'] if 'advantage_estimator' in setting else [])])


def number(count: float) -> str:
    return f'{count:,.0f}'


def on_the_way(r: Record, column: int, end: float) -> float:
    """Mean success of the training episodes up to so many episodes (column 0) or CPU seconds (column 1)."""
    total = before = 0.0
    for row in r['rows']:
        total += row[2] * (min(row[column], end) - before)
        before = min(row[column], end)
    return total / end if end else r['rows'][0][2]


def measures(r: Record, episodes: int, cpu_s: float) -> list[float]:
    """Of a run: success at both points, and on the way to both."""
    ends = [r['success'].get(point, 0.0) for point in ('episodes', 'cpu_s')]
    return [*ends, on_the_way(r, 0, episodes), on_the_way(r, 1, cpu_s)]


def task_lines(name: str, runs: dict[str, list[Record]], budget: Budget) -> list[str]:
    task, episodes = plan.TASKS[name], math.ceil(plan.TASKS[name].episodes * budget.share)
    cpu_s = budget.cpu_s * task.times
    of_episodes, of_cpu_s = f'{number(episodes)} episodes', f'{cpu_s:g} CPU s'
    titles = [f'after {of_episodes}', f'after {of_cpu_s}', f'on the way, {of_episodes}', f'on the way, {of_cpu_s}']
    every = [r for found in runs.values() for r in found]
    starts = {r['seed']: r['start'] for r in every}
    observed = sum(r['rows'][0][5] for r in every) / len(every)
    lines = [
        f'## {task.title}',
        '',
        f'{task.text}. {task.known()} Observations are {observed:.0%} of a response at the start, where the models of the '
        f'{len(starts)} seeds have a success of {shares(list(starts.values()))}.',
        '',
        f'| method | tuned | {" | ".join(titles)} | CPU s of {of_episodes} | episodes in {of_cpu_s} | collapses |',
        '|' + '---|' * 9,
    ]
    measured = {method: [measures(r, episodes, cpu_s) for r in found] for method, found in runs.items()}
    for method, found in runs.items():
        took = [next((row[1] for row in r['rows'] if row[0] >= episodes), math.nan) for r in found]
        had = [next((row[0] for row in r['rows'] if row[1] >= cpu_s), math.nan) for r in found]
        collapsed = [kind for r in found if (kind := collapse(r))]
        kinds = ', '.join(f'{kind} {collapsed.count(kind)}' for kind in sorted(set(collapsed)))
        kinds = f' ({kinds})' if kinds else ''
        cells = [
            method,
            named(found[0]['setting']),
            *(shares(list(values)) for values in zip(*measured[method], strict=True)),
        ]
        cells += [
            f'{sum(took) / len(took):.1f}',
            number(sum(had) / len(had)),
            f'{len(collapsed)} of {len(found)}{kinds}',
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    lines += ['', f'Difference from {plan.FIRST}, seed by seed:', '']
    lines += [f'| method | {" | ".join(titles)} |', '|' + '---|' * 5]
    sides: list[dict[str, list[str]]] = [{'better': [], 'worse': [], 'the interval holds 0': []} for _ in titles]
    for method in list(runs)[1:]:
        cells = [method]
        for i, side in enumerate(sides):
            mean, low, high = interval(
                [a[i] - b[i] for a, b in zip(measured[method], measured[plan.FIRST], strict=True)]
            )
            side['better' if low > 0 else 'worse' if high < 0 else 'the interval holds 0'].append(method)
            cells.append(f'{mean:+.2f} ({low:+.2f}, {high:+.2f})')
        lines.append('| ' + ' | '.join(cells) + ' |')
    lines += ['', f'Beside {plan.FIRST}:', '']
    for title, side in zip(titles, sides, strict=True):
        lines.append(f'- {title}: ' + '; '.join(f'{text}: {", ".join(side[text]) or "none"}' for text in side) + '.')
    return [*lines, '']


def bootstrapping_lines(records: list[Record], budget: Budget) -> list[str]:
    other, episodes = bootstrapping(records, budget), math.ceil(plan.TASKS['archive'].episodes * budget.share)
    keys = {key('archive', plan.FIRST, other, seed, True) for seed in budget.seeds} if other is not None else set()
    runs = [r for r in records if key_of(r) in keys]
    if other is None or not runs:
        return []
    after, _, on_way, _ = (shares(list(v)) for v in zip(*(measures(r, episodes, 0) for r in runs), strict=True))
    return [
        f'The tuning took λ = 1 for {plan.FIRST}, with which a value is a baseline and nothing is bootstrapped. Out of '
        f'competition, with its best setting below that ({named(other)}; {len(runs)} seeds), which bootstraps across the '
        f'file: {after} after {number(episodes)} episodes, and {on_way} on the way. (These runs were made later, when CPU '
        'seconds were worth more, so they are not compared by those.)',
        '',
    ]


def tuning_lines(records: list[Record], budget: Budget) -> list[str]:
    names = [name for name in plan.TASKS if not plan.TASKS[name].longer]
    lines = [f'| method | {" | ".join(names)} |', '|' + '---|' * (len(names) + 1)]
    for method in plan.METHODS:
        cells = [method]
        for name in names:
            scored = tuned(records, name, method, budget)
            cells.append('; '.join(f'{named(setting)}: {value:.2f}' for value, setting in scored))
        lines.append('| ' + ' | '.join(cells) + ' |')
    return lines


def report(results: Path, out: Path, budget: Budget) -> None:
    """The page and its picture, of the seeds that all methods have."""
    records = read(results)
    found = {key_of(r): r for r in records}
    compared: dict[str, dict[str, list[Record]]] = {}
    for name in plan.TASKS:
        chosen = {method: tuned(records, name, method, budget)[0][1] for method in plan.METHODS}
        keys = {seed: [key(name, m, chosen[m], seed, True) for m in plan.METHODS] for seed in budget.seeds}
        seeds = [seed for seed in budget.seeds if all(k in found for k in keys[seed])]
        if seeds:
            compared[name] = {m: [found[keys[seed][i]] for seed in seeds] for i, m in enumerate(plan.METHODS)}
    picture(compared, out, budget)
    warm_ups = {(plan.TASKS[r['task']].longer or r['task'], r['seed']): r['warm_up_cpu_s'] for r in records}
    spent = {flag: sum(r['rows'][-1][1] for r in records if r['compared'] is flag) for flag in (False, True)}
    wall = sum(r['wall_s'] for r in records)
    values = {
        'phase': budget.phase,
        'batch': budget.phase // 2,
        'evaluated': budget.evaluated,
        'tune_s': f'{budget.tune_cpu_s:g}',
        'tune_seeds': f'the same {len(budget.tune_seeds)} seeds'
        if len(budget.tune_seeds) > 1
        else 'one seed, the same for all,',
        'settings': budget.settings,
        'tune_all': number(spent[False]),
        'runs_all': number(spent[True]),
        'warm_up': f'{min(warm_ups.values()):.0f} to {max(warm_ups.values()):.0f}',
        'wall': number(wall / 60),
        'window': WINDOW * budget.phase,
    }
    lines = [INTRODUCTION.format(**values), f'![Success over training]({out.stem}.png)', '']
    lines += [CONCLUSIONS] if budget == Budget() else []
    for name, runs in compared.items():
        lines += task_lines(name, runs, budget)
        if name == 'archive':
            lines += bootstrapping_lines(records, budget)
    lines += [PROTOCOL.format(**values), *tuning_lines(records, budget), '', LIMITS.format(**values)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text('\n'.join(lines))


def picture(compared: dict[str, dict[str, list[Record]]], out: Path, budget: Budget) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(
        len(compared), 2, figsize=(11, 3.8 * len(compared)), squeeze=False, sharey='row', constrained_layout=True
    )
    for (name, runs), row in zip(compared.items(), axes, strict=True):
        task = plan.TASKS[name]
        ends = (math.ceil(task.episodes * budget.share), budget.cpu_s * task.times)
        for column, (axis, end) in enumerate(zip(row, ends, strict=True)):
            for i, (method, found) in enumerate(runs.items()):
                grid = np.linspace(0, max(end, 1e-9), 100)
                curves = [
                    np.interp(grid, [0, *(point[column] for point in r['rows'])], [r['start'], *averaged(r)])
                    for r in found
                ]
                axis.fill_between(grid, np.min(curves, 0), np.max(curves, 0), color=f'C{i}', alpha=0.1, linewidth=0)
                axis.plot(grid, np.mean(curves, 0), color=f'C{i}', label=method)
            axis.set(xlabel=('episodes', 'CPU seconds')[column], title=task.title, ylim=(0, 1.02))
            axis.grid(alpha=0.3)
        row[0].set_ylabel('success, mean of seeds; least to greatest')
        row[0].legend(loc='lower right', fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out.with_suffix('.png'), dpi=80)
    plt.close(figure)


INTRODUCTION = """# Credit over several turns

`python benchmarks/environments.py --tune`, then `--run` and `--report`. A critic can say which turn of an episode was good; methods
that compare whole episodes cannot. Is that worth what a critic costs? PPO with token credit (GAE over tokens) and with turn credit
(`gae_over='turn'`) beside GRPO, RLOO and REINFORCE++, on a game of several turns whose reward comes at the end, and on a tool whose
answer is most of the response. Success *after* so many episodes or CPU seconds is that of {evaluated} new tasks, the same for all, sampled at
temperature 1; *on the way* there it is the mean over the training episodes (over their CPU seconds), which says who learns sooner.
Intervals are of 95 %, by Student's t over the seeds. The curves are of the last {window} training episodes, so they lag behind,
and those of methods that draw groups are of fewer tasks, so they are rougher.
"""
CONCLUSIONS = """## What came out

- **Token or turn credit: no difference that these runs could show.** On the game token credit is ahead by 0.01 to 0.08, on the tool turn credit
  by 0.02 after 1,600 episodes; of the twelve intervals only that last one leaves out 0, and barely. Nor did it matter on the tool whether
  token credit bootstraps across the long observation (λ 0.95) or not (λ 1).
- **With a critic an episode took 1.3 to 1.4 times the CPU seconds on the game, and 1.7 times on the tool**, so in equal seconds methods that
  compare episodes learn from that many more.
- **At equal episodes** nothing was better than PPO with token credit but turn credit by its 0.02. RLOO was behind it on the game, RLOO and
  GRPO on the way of the longer runs, REINFORCE++ on the way of the tool.
- **At equal CPU seconds** the critic did not pay on the tool: GRPO and REINFORCE++ learned sooner, by 0.05 and 0.04 on the way, and REINFORCE++
  was 0.03 better at the end. On the game nothing can be told apart.
- **Collapses**, of 75 runs: RLOO fell once for good, on the tool. The steps of its first phase unlearned the call, every reward was 0 from then
  on, and a group whose rewards are equal teaches nothing. REINFORCE++ fell twice in the longer runs and came back; PPO with turn credit and
  GRPO in one seed each, which shows in the short and in the long runs. PPO with token credit did not fall.
- **The game was not learned to the end.** A random player of allowed moves wins 0.59; the short runs end at 0.50 to 0.68, so most of what
  they learned is which moves are allowed. After 32 CPU seconds it is 0.66 to 0.73, and the best player wins nearly all.
"""
"""of the runs in benchmarks/results: new runs need a new text"""
PROTOCOL = """## How it was done

- **Start.** GPT-2 of 2 layers x 64 (0.11 M parameters) with new weights, one token a character, which first imitates the task's teacher
  for {warm_up} CPU seconds. All methods of a seed start from the same weights; the critic of PPO is a copy of them with a new value head.
- **Runs.** Phases of {phase} episodes in train batches of {batch}, one pass, AdamW; the critic's rate 0.001, which was not tuned, no KL, the
  rest as `PPOConfig` has it. Group methods draw fewer tasks, each several times, so that their phases have {phase} episodes too.
- **CPU seconds** are the process's own (`time.process_time`), of one thread: playing, environments, scoring and learning; without
  imports, warm-up and judging.
- **Equal effort.** Each method has {settings} settings: 2 learning rates x 2 values of what matters most to it (λ of GAE; the size of the
  groups; for REINFORCE++ whether the group's mean is its baseline). Each setting ran on {tune_seeds} for {tune_s} CPU
  seconds, and the one with the most success in the training episodes of the last quarter was taken. The grid and this
  rule were fixed before, and the seeds of the comparison were not used. Number and length of the runs were cut to the time there was
  (one seed of the tuning for two), by the clock and before any run of the comparison. Success *on the way* was added after the tuning, the
  longer runs and those out of competition when the others were known.
- **The tasks** are two that PPO with turn credit, on another seed, learned in 15 CPU seconds. Guess-the-word, and the archive after a
  teacher who never looks into the file, it did not learn, and they were dropped before the tuning.
- **Collapse**, of training episodes: a loss or gradient that is not finite; *fell*, success over the last {window} episodes is below half of the
  run's best; *stuck*, entropy below 0.01 nats a token there with success below 0.5; *fell and came back*, below half of the best so far on
  the way but not at the end (counted since it was seen; the others were fixed before). A run that broke off has 0 in the tables.
- **Spent**: {tune_all} CPU seconds on the tuning, {runs_all} on the comparison, in {wall} minutes of wall time of all runs: the two cores were shared
  with other work, which makes CPU seconds longer too. Methods took turns seed by seed, so that it met all of them.

Settings, with the success that the choice was made by, the chosen first:
"""
LIMITS = """## What this does not show

- Anything about large models: where generating takes most of the time, a critic costs a smaller share of it.
- Which method is best in the end: runs are short, and none was trained until it stopped improving.
- What a critic is worth where it is tuned as well: its learning rate, the clip ranges and the passes over a phase were not.
- Small differences: of these 48 intervals of 95 %, two or three leave out the truth by chance, and of two settings that are close
  the tuning may have taken the worse, for any method.
- Tasks of many turns: these have up to 8.
"""
