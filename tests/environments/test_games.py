"""The games: their rules by hand, that the best player is as good as can be, and that random play is worse."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from chatgpt.environments.games import GAMES, Calculator, CalculatorTools, Countdown, TicTacToe, countdown, tictactoe
from chatgpt.environments.games.scores import best, play, random_player, score, wilson
from chatgpt.environments.registry import ENVIRONMENTS, find_environment, make_environment

OPTIONS = [
    ('countdown', {'numbers': 4, 'largest': 6}),
    ('calculator', {'terms': 2, 'digits': 2, 'tape': 2}),
    ('tictactoe', {'opponent': 'perfect', 'first': 'policy'}),
]
ALL = [(name, {}) for name in GAMES] + OPTIONS


def started(game, **state):
    game.reset(0)
    for name, value in state.items():
        setattr(game, name, value)
    return game


# ---------------------------------------------------------------------- all of them


@pytest.mark.parametrize(('name', 'options'), ALL)
def test_what_is_seen_is_of_the_alphabet_and_moves_are_allowed(name, options):
    for seed in range(30):
        game, player = GAMES[name](**options), random_player(seed)
        seen, over = game.reset(seed), False
        assert seen.endswith('\n')
        while not over:
            move = player(game)
            assert set(move) <= set(game.ALPHABET)
            observation, reward, terminated, truncated, info = game.step(move)
            over = terminated or truncated
            assert observation.startswith('\n') and observation.endswith('\n') and not observation.startswith('\n?')
            assert reward >= game.LOST and type(info['success']) is bool
            seen += observation
        assert set(seen) <= set(game.ALPHABET)


@pytest.mark.parametrize(('name', 'options'), ALL)
def test_the_seed_decides_the_task_and_what_follows(name, options):
    def transcript(seed):
        game, player = GAMES[name](**options), random_player(seed)
        lines, over = [game.reset(seed)], False
        while not over:
            lines.append(player(game))
            observation, reward, terminated, truncated, _ = game.step(lines[-1])
            lines += [observation, reward]
            over = terminated or truncated
        return lines

    assert [transcript(seed) for seed in range(10)] == [transcript(seed) for seed in range(10)]
    assert len({tuple(transcript(seed)) for seed in range(20)}) > 5


@pytest.mark.parametrize('name', GAMES)
@pytest.mark.parametrize('response', ['', 'hello', '0+', '1' * 5000 + '+', '\x00', '٣*٣', 'sss', '🙂'])
def test_moves_that_are_not_allowed_are_answered_and_lose_in_the_end(name, response):
    game = GAMES[name]()
    task = game.reset(3)
    shown = game.show()
    for _ in range(2):
        assert game.step(response) == (f'\n?\n{shown}\n', -0.1, False, False, {'success': False})
    assert game.step(response)[1:] == (-0.1 + game.LOST, True, False, {'success': False})
    assert game.reset(3) == task
    once = GAMES[name](max_illegal=1)
    once.reset(3)
    assert once.step(response)[2]


@pytest.mark.parametrize('name', GAMES)
def test_rules_are_told_where_asked(name):
    told, plain = GAMES[name](rules=True), GAMES[name]()
    assert told.reset(5) == f'{plain.RULES}\n{plain.reset(5)}'


def test_spaces_in_a_move_do_not_matter():
    game = started(Countdown(), numbers=(3, 5, 7), target=22)
    assert game.step(' 3 * 5\n')[0] == '\n7 15 =22\n'


@pytest.mark.parametrize(
    ('name', 'options', 'complaint'),
    [
        ('countdown', {'numbers': 1}, 'numbers=1 must be a whole number from 2 to 6'),
        ('countdown', {'numbers': '3'}, "numbers='3' must be a whole number from 2 to 6"),
        ('countdown', {'operations': '+%'}, r"operations='\+%' must be some of \+-\*/"),
        ('calculator', {'digits': 7}, 'digits=7 must be a whole number from 1 to 6'),
        ('calculator', {'operations': ''}, "operations='' must be some of"),
        ('tictactoe', {'opponent': 'me'}, "opponent='me' is not known; choose one of random, perfect"),
        ('tictactoe', {'max_illegal': 0}, 'max_illegal=0 must be a whole number of at least 1'),
    ],
)
def test_wrong_options_are_told(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        GAMES[name](**options)


def test_tasks_that_there_are_none_of_are_told():
    with pytest.raises(ValueError, match='reach no other number'):
        Countdown(numbers=2, largest=1, operations='*').reset(0)


# ---------------------------------------------------------------------- countdown


def test_countdown_by_hand():
    game = started(Countdown(), numbers=(3, 5, 7), target=22)
    assert game.show() == '3 5 7 =22'
    assert game.step('3*5') == ('\n7 15 =22\n', 0.0, False, False, {'success': False})
    for move in ('3*5', '7-15', '15/7', '7+15+0', '7', '-7+15', '7^15', '7+7', '07+16'):
        assert game.step(move)[0] == '\n?\n7 15 =22\n', move
        game.num_illegal = 0
    assert game.step('15+7') == ('\n22 =22\n', 1.0, True, False, {'success': True})

    game = started(Countdown(), numbers=(2, 8), target=10)
    assert game.step('8/2') == ('\n4 =10\n', 0.0, True, False, {'success': False}), 'nothing is left to do'
    game = started(Countdown(operations='+-'), numbers=(2, 8), target=10)
    assert sorted(game.moves()) == ['2+8', '8-2'] and game.step('2*8')[0] == '\n?\n2 8 =10\n'
    assert sorted(started(Countdown(), numbers=(4, 4), target=10).moves()) == ['4*4', '4+4', '4/4']


def reachable(numbers):
    """Every number that an expression over some of the numbers, each at most once, can be: slowly, by splitting the
    numbers in two."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for size in range(1, len(numbers)):
        for left in set(itertools.combinations(sorted(numbers), size)):
            right = list(numbers)
            for n in left:
                right.remove(n)
            for a, b in itertools.product(reachable(left), reachable(tuple(right))):
                found |= {a + b, a * b, a, b}
                found |= {a - b} if a > b else set()
                found |= {a // b} if a % b == 0 else set()
    return found


@pytest.mark.parametrize('count', [2, 3, 4])
def test_countdown_finds_a_way_exactly_where_there_is_one(count):
    draws, answers = random.Random(count), set()
    for _ in range(15):
        numbers = tuple(sorted(draws.randint(1, 9) for _ in range(count)))
        can = reachable(numbers)
        for target in draws.sample([n for n in range(1, 60) if n not in numbers], 15):
            found = countdown.way_to(numbers, target, '+-*/') is not None
            assert found == (target in can), (numbers, target)
            answers.add(found)
    assert answers == {True, False}


def test_every_task_of_countdown_is_reached():
    for options in ({}, {'numbers': 2}, {'numbers': 5, 'largest': 25, 'max_target': 999}, {'operations': '+'}):
        assert score('countdown', best, episodes=60, **options).success == 1.0


# ---------------------------------------------------------------------- calculator


def test_calculator_by_hand():
    game = started(Calculator(), terms=[482, 37, 915], asked=['*', '+'], answer=18749, shown='482*37+915')
    assert game.show() == '482*37+915'
    assert game.step('482*37') == ('\n=17834\n', 0.0, False, False, {'success': False})
    assert game.step('5--3')[0] == '\n=8\n' and game.step('-2*3')[0] == '\n=-6\n'
    assert game.step('1/2')[0] == '\n?\n=-6\n' and game.step('1+2+3')[0] == '\n?\n=-6\n'
    assert best(game) == '17834+915'
    game.step('17834+915')
    assert best(game) == '18749' and game.step('18749') == ('\n=18749\n', 1.0, True, False, {'success': True})
    game = started(Calculator(), terms=[482, 37, 915], asked=['*', '+'], answer=18749)
    assert game.step('18748')[1:] == (0.0, True, False, {'success': False})


def test_what_the_calculator_asks_is_worked_out_from_left_to_right_and_by_the_rules_of_arithmetic():
    for seed in range(50):
        game = Calculator(terms=4, digits=2)
        asked = game.reset(seed).strip()
        assert eval(asked) == game.answer, 'of digits and + - * alone'
        assert len(str(game.terms[0])) == 2


def test_the_tape_is_long_and_the_result_is_its_last_line():
    game = started(Calculator(tape=20), terms=[12, 3], asked=['*'], answer=36)
    *others, result = game.step('12*3')[0].strip().split('\n')
    assert result == '=36' and len(others) == 20
    for line in others:
        asked, _, answer = line.partition('=')
        assert eval(asked) == int(answer)


def test_the_calculator_is_taken_away_in_the_end():
    game = started(Calculator(max_moves=2))
    assert game.step('1+1')[2:4] == (False, False)
    assert game.step('1+1')[2:4] == (False, True)


def test_the_calculator_as_tools():
    tools = CalculatorTools(terms=3, digits=2)
    plain = started(Calculator(terms=3, digits=2))
    asked = tools.reset(seed=0)
    assert plain.shown in asked and tools.reset(seed=1) != asked == tools.reset(seed=0, prompt='x')
    assert tools.calculate('12 * 34') == '=408' and tools.calculate('12').startswith('error: ')
    assert tools.calculate('1/0').startswith('error: ') and tools.get_reward() == 0.0
    assert tools.answer(plain.answer + 1) == 'wrong' and tools.get_reward() == 0.0
    assert tools.answer(plain.answer) == 'right' and tools.get_reward() == 1.0
    assert tools.answer(number=str(plain.answer)) == 'right'
    tools.reset(seed=2)
    assert tools.get_reward() == 0.0
    with pytest.raises(ValueError, match='digits=9'):
        CalculatorTools(digits=9)


# ---------------------------------------------------------------------- tic-tac-toe


def test_tic_tac_toe_by_hand():
    game = started(TicTacToe(first='policy'))
    assert game.show() == '...\n...\n...' and game.moves() == list('123456789')
    game = started(TicTacToe(), board='xx.oo.x..')
    assert game.step('1')[0].startswith('\n?\n') and game.moves() == ['3', '6', '8', '9']
    assert game.step('3') == ('\nxxx\noo.\nx..\n', 1.0, True, False, {'success': True})
    for opponent in ('random', 'perfect'):
        game = started(TicTacToe(opponent=opponent), board='xoxoxxo..')  # x at 9 wins; x at 8 leaves 9 to o: a draw
        assert game.best() == '9'
        assert game.step('8')[1:] == (0.0, True, False, {'success': opponent == 'perfect'})
    game = started(TicTacToe(opponent='perfect'), board='oo.x.x...')
    assert game.best() == '5'
    assert game.step('7') == ('\nooo\nx.x\nx..\n', -1.0, True, False, {'success': False})


def all_games(to_move, choose, mark):
    """Outcomes of all games in which `mark` plays the moves that `choose` names and the other any move."""
    board, outcomes = '.' * 9, set()
    waiting = [(board, to_move)]
    while waiting:
        board, turn = waiting.pop()
        end = tictactoe.outcome(board)
        if end is not None:
            outcomes.add(end)
            continue
        cells = choose(board) if turn == mark else [c for c in range(9) if board[c] == '.']
        for cell in cells:
            waiting.append((board[:cell] + turn + board[cell + 1 :], 'o' if turn == 'x' else 'x'))
    return outcomes


@pytest.mark.parametrize('first', ['x', 'o'])
def test_perfect_play_never_loses(first):
    def best_of_x(board):
        return [int(started(TicTacToe(opponent='perfect'), board=board).best()) - 1]

    def all_of_o(board):
        worth = {
            c: tictactoe.value(board[:c] + 'o' + board[c + 1 :], 'x', 'perfect') for c in range(9) if board[c] == '.'
        }
        return [c for c, w in worth.items() if w == min(worth.values())]

    assert -1.0 not in all_games(first, best_of_x, 'x')
    assert 1.0 not in all_games(first, all_of_o, 'o')
    assert score('tictactoe', best, episodes=200, opponent='perfect').return_mean == 0.0
    assert score('tictactoe', random_player(), episodes=200, opponent='perfect').return_mean < -0.5


def test_the_perfect_opponent_wins_and_hinders():
    for board, after in (('o.o.xx.x.', 'ooo.xx.x.'), ('xx..o....', 'xxo.o....')):
        game = started(TicTacToe(opponent='perfect'), board=board)
        game.answer()
        assert game.board == after


def test_the_best_against_a_random_opponent():
    memory = {}

    def exact(cells, turn):
        """The mean outcome, over tuples and fractions."""
        key = (cells, turn)
        if key not in memory:
            rows = [cells[i : i + 3] for i in (0, 3, 6)]
            lines = [*rows, *zip(*rows, strict=True), cells[::4], cells[2:7:2]]
            if (1, 1, 1) in lines or (2, 2, 2) in lines:
                memory[key] = Fraction(1 if (1, 1, 1) in lines else -1)
            elif 0 not in cells:
                memory[key] = Fraction(0)
            else:
                after = [exact((*cells[:i], turn, *cells[i + 1 :]), 3 - turn) for i in range(9) if not cells[i]]
                memory[key] = max(after) if turn == 1 else sum(after) / len(after)
        return memory[key]

    for number, mark in ((1, 'x'), (2, 'o')):
        want = exact((0,) * 9, number)
        assert tictactoe.value('.' * 9, mark, 'random') == pytest.approx(float(want), abs=1e-12)
        got = score('tictactoe', best, episodes=1500, first='policy' if mark == 'x' else 'opponent')
        assert abs(got.return_mean - want) < 2 * got.return_error + 1e-9


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize('name', ['countdown', 'calculator', 'tictactoe'])
def test_the_best_player_beats_the_random_one(name):
    good, poor = (score(name, player, episodes=150) for player in (best, random_player()))
    assert good.success_low > poor.success_high
    assert good.return_mean - good.return_error > poor.return_mean + poor.return_error
    assert good.success == 1.0 or name == 'tictactoe'


def test_a_score_by_hand():
    def first(game):
        return game.moves()[0]

    played = [play(TicTacToe(), first, seed) for seed in range(7, 57)]
    returns = [total for total, _, _ in played]
    got = score('tictactoe', first, episodes=50, first_seed=7)
    mean = sum(returns) / 50
    spread = math.sqrt(sum((r - mean) ** 2 for r in returns) / 49)
    assert got.return_mean == pytest.approx(mean) and got.turns_mean == sum(n for _, _, n in played) / 50
    assert got.success == sum(r > 0 for r in returns) / 50 > 0
    assert got.return_error == pytest.approx(1.96 * spread / math.sqrt(50), rel=1e-4)


def test_wilsons_interval():
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for count, total, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(count, total) == pytest.approx((low, high), abs=5e-5)


# ---------------------------------------------------------------------- names


def test_games_by_name():
    assert {name.removeprefix('games:') for name in ENVIRONMENTS} >= set(GAMES)
    for name, game in GAMES.items():
        assert type(make_environment(find_environment(f'games:{name}'))) is game
    made = make_environment(find_environment('games:countdown', {'numbers': 2, 'rules': True}))
    assert made.size == 2 and made.rules


@pytest.mark.parametrize(
    ('spec', 'options', 'complaint'),
    [
        ('games:countdwn', {}, 'is not known; choose one of games:countdown, .*did you mean games:countdown'),
        ('countdown', {}, 'did you mean games:countdown'),
        ('nothing', {}, r'or module:Class, or file.py:Class$'),
        ('games:', {}, 'choose one of'),
        ('chatgpt.environments.games:Countdwn', {}, 'did you mean Countdown'),
        ('chatgpt.environments.gmes:Countdown', {}, 'importing it raised ModuleNotFoundError'),
        ('there_is_none.py:Mine', {}, 'there is no file there_is_none.py'),
        ('math:pi', {}, "environment='math:pi' cannot be called"),
        ('games:countdown', {'number': 3}, r"environment Countdown has no option 'number'; did you mean numbers\?"),
        ('games:tictactoe', {'bet': 3}, "has no option 'bet'; it has opponent, first, rules, max_illegal"),
        ('games:countdown', {'numbers': 1}, 'environment Countdown: numbers=1 must be a whole number from 2 to 6'),
        ('fractions:Fraction', {}, 'environment Fraction has no reset and no step'),
    ],
)
def test_wrong_names_and_options_are_told(spec, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_environment(find_environment(spec, options))


def test_the_calculator_as_tools_is_an_environment():
    factory = find_environment('games:calculator_tools', {'terms': 2, 'digits': 2})
    assert {tool['function']['name'] for tool in factory.tools} == {'calculate', 'answer'}
    environment, plain = make_environment(factory), started(Calculator(terms=2, digits=2))
    assert plain.shown in environment.reset(0)

    def turn(name, **arguments):
        calls = [{'type': 'function', 'function': {'name': name, 'arguments': arguments}}]
        return environment.step({'role': 'assistant', 'content': '', 'tool_calls': calls})

    (result,), reward, *ended, _ = turn('calculate', expression=plain.shown)
    assert result['role'] == 'tool' and result['content'] == f'={plain.answer}' and ended == [False, False]
    (result,), reward, *ended, _ = turn('answer', number=plain.answer)
    assert result['content'] == 'right' and ended == [False, False]
    _, reward, *ended, _ = environment.step({'role': 'assistant', 'content': 'done'})
    assert ended == [True, False] and reward in (1.0, {'reward': 1.0}, {'get_reward': 1.0})


@pytest.mark.parametrize('options', [{}, {'turns': 3}])
def test_a_class_of_a_file_is_found_again_elsewhere(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'far_away.py').write_text(
        'class Talk:\n    def __init__(self, turns=2):\n        self.turns = turns\n'
        '    def reset(self, seed, **columns):\n        return ""\n    def step(self, response):\n        return 1\n'
    )
    sent = pickle.dumps(find_environment('far_away.py:Talk', options))
    code = 'import pickle, sys; print(pickle.load(sys.stdin.buffer)().turns)'
    env = os.environ | {'PYTHONPATH': str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, '-c', code], input=sent, cwd='/', env=env, capture_output=True)
    assert done.stdout == f'{options.get("turns", 2)}\n'.encode(), done.stderr
