"""The games: rules by hand, optimal best players, and worse random players."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from chatgpt.environments.games import GAMES, Calculator, CalculatorTools, Countdown, TicTacToe, countdown, tictactoe
from chatgpt.environments.games.scores import best, random_player, score
from chatgpt.environments.registry import find_environment, make_environment

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples' / 'environments'
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


@pytest.mark.parametrize(('name', 'options'), ALL)
def test_what_is_seen_is_of_the_alphabet_moves_are_allowed_and_the_seed_decides(name, options):
    def transcript(seed):
        game, player = GAMES[name](**options), random_player(seed)
        lines, over = [game.reset(seed)], False
        while not over:
            lines.append(player(game))
            observation, reward, terminated, truncated, info = game.step(lines[-1])
            assert observation.startswith('\n') and observation.endswith('\n') and not observation.startswith('\n?')
            assert reward >= game.LOST and type(info['success']) is bool
            lines.append(observation)
            over = terminated or truncated
        assert lines[0].endswith('\n') and set(''.join(lines)) <= set(game.ALPHABET)
        return lines

    assert [transcript(seed) for seed in range(20)] == [transcript(seed) for seed in range(20)]
    assert len({tuple(transcript(seed)) for seed in range(20)}) > 5


@pytest.mark.parametrize('name', GAMES)
def test_illegal_moves_are_answered_and_finally_lose(name):
    for response in ('', 'hello', '0+', '1' * 5000 + '+', '\x00', '٣*٣', '🙂'):
        game = GAMES[name]()
        task, shown = game.reset(3), game.show()
        for _ in range(2):
            assert game.step(response) == (f'\n?\n{shown}\n', -0.1, False, False, {'success': False})
        assert game.step(response)[1:] == (-0.1 + game.LOST, True, False, {'success': False})
        assert game.reset(3) == task
        once = GAMES[name](max_illegal=1, rules=True)
        assert once.reset(3) == f'{game.RULES}\n{task}' and once.step(response)[2]


@pytest.mark.parametrize(
    ('name', 'options', 'complaint'),
    [
        ('countdown', {'numbers': '3'}, "numbers='3' must be a whole number from 2 to 6"),
        ('countdown', {'operations': '+%'}, r"operations='\+%' must be some of \+-\*/"),
        ('countdown', {'numbers': 2, 'largest': 1, 'operations': '*'}, 'reach no other number'),
        ('calculator', {'digits': 7}, 'digits=7 must be a whole number from 1 to 6'),
        ('tictactoe', {'opponent': 'me'}, "opponent='me' is not known; choose one of random, perfect"),
        ('tictactoe', {'max_illegal': 0}, 'max_illegal=0 must be a whole number of at least 1'),
    ],
)
def test_wrong_options_and_impossible_tasks_are_errors(name, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        GAMES[name](**options).reset(0)


def test_countdown_by_hand():
    game = started(Countdown(), numbers=(3, 5, 7), target=22)
    assert game.show() == '3 5 7 =22'
    assert game.step(' 3 * 5\n') == ('\n7 15 =22\n', 0.0, False, False, {'success': False})
    for move in ('3*5', '7-15', '15/7', '7+15+0', '7', '-7+15', '7^15', '7+7', '07+16'):
        assert game.step(move)[0] == '\n?\n7 15 =22\n', move
        game.num_illegal = 0
    assert game.step('15+7') == ('\n22 =22\n', 1.0, True, False, {'success': True})

    game = started(Countdown(), numbers=(2, 8), target=10)
    assert game.step('8/2') == ('\n4 =10\n', 0.0, True, False, {'success': False}), 'nothing is left to do'
    game = started(Countdown(operations='+-'), numbers=(2, 8), target=10)
    assert sorted(game.moves()) == ['2+8', '8-2'] and game.step('2*8')[0] == '\n?\n2 8 =10\n'
    assert sorted(started(Countdown(), numbers=(4, 4), target=10).moves()) == ['4*4', '4+4', '4/4']


@pytest.mark.parametrize(
    ('numbers', 'target', 'can'),
    [((2, 3), 6, True), ((2, 3), 7, False), ((2, 8), 4, True), ((1, 5, 5), 24, True), ((3, 5, 7), 56, True)]
    + [((1, 3, 4, 6), 24, True), ((1, 1, 1, 8), 24, True), ((1, 1, 1, 7), 24, False)],
)
def test_countdown_finds_a_way_exactly_where_there_is_one(numbers, target, can):
    """Two of 1 3 4 6 suffice; results are whole, so 3 from 2 and 7 is impossible."""
    assert (countdown.way_to(numbers, target, '+-*/') is not None) == can


def test_calculator_by_hand():
    game = started(Calculator(), terms=[482, 37, 915], signs=['*', '+'], answer=18749, shown='482*37+915')
    assert game.show() == '482*37+915'
    assert game.step('482*37') == ('\n=17834\n', 0.0, False, False, {'success': False})
    assert game.step('5--3')[0] == '\n=8\n' and game.step('-2*3')[0] == '\n=-6\n'
    assert game.step('1/2')[0] == '\n?\n=-6\n' and game.step('1+2+3')[0] == '\n?\n=-6\n'
    assert best(game) == '17834+915'
    game.step('17834+915')
    assert best(game) == '18749' and game.step('18749') == ('\n=18749\n', 1.0, True, False, {'success': True})
    game = started(Calculator(max_moves=2), answer=18749)
    assert game.step('1+1')[2:4] == (False, False) and game.step('1+1')[2:4] == (False, True)
    assert started(Calculator(), answer=18749).step('18748')[1:] == (0.0, True, False, {'success': False})


def test_what_the_calculator_asks_and_its_tape_are_right():
    for seed in range(20):
        game = Calculator(terms=4, digits=2)
        assert eval(game.reset(seed)) == game.answer, 'of digits and + - * alone'
    game = started(Calculator(tape=20), terms=[12, 3], signs=['*'], answer=36)
    *others, result = game.step('12*3')[0].strip().split('\n')
    assert result == '=36' and len(others) == 20
    assert all(eval(line.replace('=', '==')) for line in others)


def test_the_calculator_as_tools():
    tools = CalculatorTools(terms=3, digits=2)
    plain = started(Calculator(terms=3, digits=2))
    task = tools.reset(seed=0)
    assert plain.shown in task and tools.reset(seed=1) != task == tools.reset(seed=0, prompt='x')
    assert tools.calculate('12 * 34') == '=408' and tools.calculate('12').startswith('error: ')
    assert tools.calculate('1/0').startswith('error: ') and tools.get_reward() == 0.0
    assert tools.answer(plain.answer + 1) == 'wrong' and tools.get_reward() == 0.0
    assert tools.answer(plain.answer) == 'right' and tools.get_reward() == 1.0
    assert tools.answer(number=str(plain.answer)) == 'right'
    tools.reset(seed=2)
    assert tools.get_reward() == 0.0
    with pytest.raises(ValueError, match='digits=9'):
        CalculatorTools(digits=9)


def test_tic_tac_toe_by_hand():
    game = started(TicTacToe(first='policy'))
    assert game.show() == '...\n...\n...' and game.moves() == list('123456789')
    game = started(TicTacToe(), board='xx.oo.x..')
    assert game.step('1')[0].startswith('\n?\n') and game.moves() == ['3', '6', '8', '9']
    assert game.step('3') == ('\nxxx\noo.\nx..\n', 1.0, True, False, {'success': True})
    for opponent in ('random', 'perfect'):
        # x at 9 wins; with x at 8, o takes 9: a draw
        game = started(TicTacToe(opponent=opponent), board='xoxoxxo..')
        assert game.best() == '9'
        assert game.step('8')[1:] == (0.0, True, False, {'success': opponent == 'perfect'})
    game = started(TicTacToe(opponent='perfect'), board='oo.x.x...')
    assert game.best() == '5'
    assert game.step('7') == ('\nooo\nx.x\nx..\n', -1.0, True, False, {'success': False})
    for board, after in (('o.o.xx.x.', 'ooo.xx.x.'), ('xx..o....', 'xxo.o....')):  # it wins, and blocks
        game = started(TicTacToe(opponent='perfect'), board=board)
        game.answer()
        assert game.board == after


@pytest.mark.parametrize('opponent', ['random', 'perfect'])
def test_the_best_of_tic_tac_toe_is_as_good_as_can_be(opponent):
    memory = {}

    def exact(cells, turn):
        """Returns the mean outcome, with tuples and fractions."""
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
                theirs = min(after) if opponent == 'perfect' else sum(after) / len(after)
                memory[key] = max(after) if turn == 1 else theirs
        return memory[key]

    for number, mark in ((1, 'x'), (2, 'o')):
        want = exact((0,) * 9, number)
        assert tictactoe.value('.' * 9, mark, opponent) == pytest.approx(float(want), abs=1e-12)
        first = 'policy' if mark == 'x' else 'opponent'
        got = score('tictactoe', best, episodes=200, first=first, opponent=opponent)
        assert abs(got.return_mean - want) < 2 * got.return_error + 1e-9


CLASSES = {'guess_word': ('GuessWord', 1.0), 'sokoban': ('Sokoban', 1.0), 'blackjack': ('Blackjack', -0.0468)}
"""class in examples/environments and mean return of the best player, for blackjack by dynamic programming"""


@pytest.mark.parametrize('name', CLASSES)
def test_the_games_of_the_examples_load_and_their_best_players_are_good(name):
    assert {path.stem for path in EXAMPLES.glob('*.py')} == set(CLASSES)
    cls, expected = CLASSES[name]
    factory = find_environment(f'{EXAMPLES / name}.py:{cls}')
    assert make_environment(factory).reset(3) == make_environment(factory).reset(3)
    good, poor = (score(factory, player, episodes=200) for player in (best, random_player()))
    assert abs(good.return_mean - expected) < 2 * good.return_error + 1e-9
    assert good.return_mean > poor.return_mean + poor.return_error


def test_games_by_name():
    for name, game in GAMES.items():
        assert type(make_environment(find_environment(f'games:{name}', {'rules': True}))) is game
    factory = find_environment('games:calculator_tools', {'terms': 2, 'digits': 2})
    assert {tool['function']['name'] for tool in factory.tools} == {'calculate', 'answer'}
    assert started(Calculator(terms=2, digits=2)).shown in make_environment(factory).reset(0)


@pytest.mark.parametrize(
    ('spec', 'options', 'complaint'),
    [
        ('games:countdwn', {}, 'is not known; choose one of games:countdown, .*did you mean games:countdown'),
        ('nothing', {}, r'or module:Class, or file.py:Class$'),
        ('chatgpt.environments.games:Countdwn', {}, 'did you mean Countdown'),
        ('there_is_none.py:Mine', {}, 'there is no file there_is_none.py'),
        ('math:pi', {}, "environment='math:pi' cannot be called"),
        ('games:countdown', {'number': 3}, r"environment Countdown has no option 'number'; did you mean numbers\?"),
        ('games:countdown', {'numbers': 1}, 'environment Countdown: numbers=1 must be a whole number from 2 to 6'),
        ('fractions:Fraction', {}, 'environment Fraction has no reset and no step'),
    ],
)
def test_wrong_names_and_options_are_errors(spec, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_environment(find_environment(spec, options))


def test_the_example_of_the_page_plays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLES.parents[1] / 'docs' / 'environments.md').read_text()
    (code,) = re.findall(r'```python\n(# guess\.py\n.*?)```', page, re.DOTALL)
    Path('guess.py').write_text(code)
    factory = find_environment('guess.py:Guess')
    game, other = make_environment(factory), make_environment(factory)
    assert game.reset(0) == other.reset(0) == 'guess a number from 1 to 9\n'
    game.number = other.number = 5
    assert game.step(' 3') == ('\nhigher\n', {'right': 0.0, 'form': 0.1}, False, False, {'success': False})
    assert game.step('5')[1:] == ({'right': 1.0, 'form': 0.1}, True, False, {'success': True})
    assert [other.step('6')[2] for _ in range(3)] == [False, False, True]
