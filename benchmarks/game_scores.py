"""What a random and the best player reach in each game.

    python benchmarks/game_scores.py [--episodes 10000]

Writes docs/results/game_scores.md, mean return and success with 95 % intervals beside what is known exactly, and the
short table of docs/environments.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from chatgpt.environments.games import tictactoe
from chatgpt.environments.games.blackjack import best_value
from chatgpt.environments.games.scores import Score, best, random_player, score

DOCS = Path(__file__).resolve().parent.parent / 'docs'
PAGE, SHORT = DOCS / 'results' / 'game_scores.md', DOCS / 'environments.md'
MARKS = '<!-- scores -->', '<!-- end of scores -->'
EITHER = sum(tictactoe.value('.' * 9, mark, 'random') for mark in 'xo') / 2
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ('countdown', {}, '1'),
    ('countdown', {'numbers': 4}, '1'),
    ('calculator', {}, '1'),
    ('calculator', {'terms': 2, 'digits': 2}, '1'),
    ('guess_word', {}, '1'),
    ('guess_word', {'words': 64}, '1'),
    ('sokoban', {}, '1'),
    ('sokoban', {'width': 5, 'height': 5, 'walls': 4, 'max_moves': 30, 'min_solution': 5}, '1'),
    ('tictactoe', {}, f'{EITHER:.4f}'),
    ('tictactoe', {'opponent': 'perfect'}, '0'),
    ('blackjack', {}, f'{best_value():.4f}'),
    ('blackjack', {'natural': 1.5}, f'{best_value(1.5):.4f}'),
]
"""game, options, and the mean return of the best play where it is known"""


def mean_of(found: Score) -> str:
    return f'{found.return_mean:.3f} ± {found.return_error:.3f}'


def share_of(found: Score) -> str:
    return f'{100 * found.success:.1f} % ({100 * found.success_low:.1f} to {100 * found.success_high:.1f})'


def pages(episodes: int) -> tuple[str, str]:
    """The page of results, and the short table: returns with the options as they are."""
    short = ['| | random | best | exact |', '|---|---|---|---|']
    lines = [
        '# Scores of the games',
        '',
        f'`python benchmarks/game_scores.py`: {episodes:,} episodes of each row, of the tasks of the seeds 0 to '
        f'{episodes - 1:,}, by a player that takes any allowed move, each as likely as the others, and by the best '
        'one (`best` of each game). Means and shares with 95 % intervals, those of shares by Wilson (1927). Exact: '
        'the mean return of the best play; 1 where every task can be solved, the value of dynamic programming over '
        'all games in tic-tac-toe and blackjack. What the games are is in [environments](../environments.md#games).',
        '',
        '| game | options | return: random | best | exact | success: random | best | turns: random | best |',
        '|---|---|---|---|---|---|---|---|---|',
    ]
    for game, options, exact in ROWS:
        at_random = score(game, random_player(), episodes=episodes, **options)
        good = score(game, best, episodes=episodes, **options)
        words = ', '.join(f'{name}={value!r}' for name, value in options.items()).replace("'", '')
        cells = (
            *(game, words, mean_of(at_random), mean_of(good), exact, share_of(at_random), share_of(good)),
            *(f'{at_random.turns_mean:.1f}', f'{good.turns_mean:.1f}'),
        )
        print(*cells, sep=' | ', flush=True)
        lines.append(f'| {" | ".join(cells)} |')
        if words in ('', 'opponent=perfect'):
            name = game if not words else f'{game}, {words}'
            short.append(f'| {name} | {mean_of(at_random)} | {mean_of(good)} | {exact} |')
    return '\n'.join(lines) + '\n', '\n'.join(short) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--episodes', type=int, default=10_000)
    page, short = pages(parser.parse_args().episodes)
    PAGE.write_text(page)
    before, after = SHORT.read_text().split(MARKS[0])[0], SHORT.read_text().split(MARKS[1])[1]
    SHORT.write_text(f'{before}{MARKS[0]}\n\n{short}\n{MARKS[1]}{after}')
    print(f'wrote {PAGE} and {SHORT}')


if __name__ == '__main__':
    main()
