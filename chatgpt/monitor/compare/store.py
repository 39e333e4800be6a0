"""Pairs of responses and the judgements of people, in one SQLite file.

A judgement is durable when `judge` returns: every change is a transaction of its own, in a write-ahead log that is
synced at each commit (journal_mode=WAL, synchronous=FULL). A pair is judged by `annotators_per_pair` different people.
A person who is shown a pair has a lease on it for `LEASE_S` seconds; after that it may be shown to another.

The next pair of a person is, in this order: one that others have judged, so that pairs are finished and agreement can
be measured; the one with the smallest margin |s_a − s_b| by a reward model, if there is one, since by Bradley and Terry
response a wins with probability σ(s_a − s_b), which is then nearest to 1/2; the first in a random order per person. The
side of each response is random per person and pair, and kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
"""version of the tables; a file of another version is refused"""
APPLICATION = 0x43474350
"""SQLite application id of the file"""
LEASE_S = 900.0
CHOICES = ('left', 'right', 'tie', 'both_bad', 'skip')
MAX_NAME, MAX_COMMENT = 60, 4000
SCHEMA = f"""
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE pairs (
    id INTEGER PRIMARY KEY, prompt TEXT NOT NULL, shown TEXT NOT NULL, answer_a TEXT, answer_b TEXT, margin REAL);
CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE judgements (
    person INTEGER NOT NULL REFERENCES people, pair INTEGER NOT NULL REFERENCES pairs, a_is_left INTEGER NOT NULL,
    asked REAL NOT NULL, verdict TEXT CHECK (verdict IN ('a', 'b', 'tie', 'both_bad', 'skip')),
    comment TEXT NOT NULL DEFAULT '', judged REAL, number INTEGER, PRIMARY KEY (person, pair));
CREATE INDEX judgements_of_pair ON judgements (pair);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION}
"""

# Number of other people per pair that have judged it or hold a lease.
TAKEN = """(SELECT pair, COUNT(*) AS taken FROM judgements WHERE person != :person AND
    (verdict IN ('a', 'b', 'tie', 'both_bad') OR (verdict IS NULL AND asked > :since)) GROUP BY pair)"""


class NotAsked(ValueError):
    """A judgement of a pair that is not assigned to the person, or has already been made."""


@dataclass(frozen=True)
class AskedPair:
    """A pair as shown to a person."""

    id: int
    prompt: str
    left: str
    right: str
    comment: str = ''
    """comment of a judgement that was undone"""


@dataclass(frozen=True)
class Judgement:
    person: str
    pair: int
    verdict: str
    """a, b, tie, both_bad or skip"""
    a_is_left: bool
    comment: str


class Store:
    """An SQLite file of pairs and judgements. Several processes may open it; within one, only one thread may use it.

    Args:
        path: the file; created if it does not exist, unless `create` is False.
        clock: returns seconds since 1970.

    Raises:
        ValueError: if the file does not exist, is another database, or has another version.
    """

    def __init__(self, path: str | Path, *, create: bool = True, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = Path(path), clock
        if not self.path.is_file() and not create:
            raise ValueError(f'there is no database {path}')
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.OperationalError) as error:
            raise ValueError(f'cannot open the database {path}: {error}') from None
        self._db.row_factory = sqlite3.Row
        try:
            self._open()
        except (sqlite3.DatabaseError, ValueError) as error:
            self._db.close()
            raise ValueError(f'{path} is no database of comparisons: {error}') from None

    def _open(self) -> None:
        is_new = not self._value('SELECT COUNT(*) FROM sqlite_master')
        if not is_new and self._value('PRAGMA application_id') != APPLICATION:
            raise ValueError('it is one of something else; give another --db')
        if not is_new and (version := self._value('PRAGMA user_version')) != VERSION:
            raise ValueError(f'its tables have version {version}, and this package reads {VERSION}')
        for line in ('journal_mode = WAL', 'synchronous = FULL', 'foreign_keys = ON'):
            self._db.execute(f'PRAGMA {line}')
        if is_new:
            with self._change():
                for statement in SCHEMA.split(';'):
                    self._db.execute(statement)

    def _value(self, query: str, *values: Any) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._db:  # commits at its end, rolls back after an error
            self._db.execute('BEGIN IMMEDIATE')
            yield

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what is compared

    @property
    def settings(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._db.execute('SELECT name, value FROM settings')}

    def update_settings(self, **settings: Any) -> None:
        with self._change():
            self._put_settings(settings)

    def _put_settings(self, settings: dict[str, Any]) -> None:
        rows = [(name, json.dumps(value)) for name, value in settings.items()]
        self._db.executemany('INSERT OR REPLACE INTO settings VALUES (?, ?)', rows)

    def begin(self, records: Sequence[dict[str, Any]], shown: Sequence[str], **settings: Any) -> None:
        """Writes prompts, as records for `chatgpt.data` and as shown to people, and settings. Replaces those of a file
        without responses; raises ValueError if it has any."""
        rows = [(json.dumps(r, ensure_ascii=False), s) for r, s in zip(records, shown, strict=True)]
        with self._change():
            if self.has_answers:
                raise ValueError(f'{self.path} has answers already')
            self._db.execute('DELETE FROM pairs')
            self._db.execute('DELETE FROM settings')
            self._db.executemany('INSERT INTO pairs (prompt, shown) VALUES (?, ?)', rows)
            self._put_settings(settings | {'id': secrets.token_hex(6)})

    def _column(self, name: str) -> list[Any]:
        return [row[0] for row in self._db.execute(f'SELECT {name} FROM pairs ORDER BY id')]

    def _set_column(self, name: str, values: Sequence[Any]) -> None:
        with self._change():
            rows = list(zip(values, self._column('id'), strict=True))
            self._db.executemany(f'UPDATE pairs SET {name} = ? WHERE id = ?', rows)

    def records(self) -> list[dict[str, Any]]:
        """Returns the prompts, one per pair."""
        return list(map(json.loads, self._column('prompt')))

    @property
    def has_answers(self) -> bool:
        return bool(self._value('SELECT COUNT(*) FROM pairs WHERE answer_a IS NOT NULL OR answer_b IS NOT NULL'))

    def answers(self, side: str) -> list[str] | None:
        """Returns the responses of side 'a' or 'b' to all prompts; None before they are set."""
        found = self._column(f'answer_{side}')
        return None if None in found else found

    def set_answers(self, side: str, texts: Sequence[str]) -> None:
        """Sets the responses of side 'a' or 'b', one per prompt. Raises ValueError if they are set already."""
        if self.num_pairs and self.answers(side) is not None:
            raise ValueError(f'{self.path} has the answers {side} already')
        self._set_column(f'answer_{side}', texts)

    def set_margins(self, margins: Sequence[float | None]) -> None:
        """Sets s_a − s_b of each pair by a reward model; None if it has no score."""
        self._set_column('margin', margins)

    @property
    def num_pairs(self) -> int:
        return self._value('SELECT COUNT(*) FROM pairs')

    @property
    def num_asked(self) -> int:
        """Number of pairs to judge; pairs of equal responses are excluded."""
        return self._value('SELECT COUNT(*) FROM pairs WHERE answer_a != answer_b')

    @property
    def annotators_per_pair(self) -> int:
        return self.settings.get('annotators_per_pair', 1)

    # ------------------------------------------------------------------ people

    def join(self, name: str) -> int:
        """Returns the number of a person, who may be new. Raises ValueError for an empty or long name."""
        name = ' '.join(name.split())
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f'a name has 1 to {MAX_NAME} characters')
        with self._change():
            self._db.execute('INSERT OR IGNORE INTO people (name) VALUES (?)', (name,))
        return self._value('SELECT id FROM people WHERE name = ?', name)

    def name_of(self, person: int) -> str | None:
        return self._value('SELECT name FROM people WHERE id = ?', person)

    def next_pair(self, person: int) -> AskedPair | None:
        """Returns the pair that is assigned to a person, else a new one; None if there is none at this time."""
        start = f'{self.settings.get("seed", 0)} {self.name_of(person)}'

        def draw(pair: int, what: str) -> float:
            """Returns a number uniform in [0, 1), a hash of seed, person and arguments."""
            digest = hashlib.blake2b(f'{start} {pair} {what}'.encode(), digest_size=8).digest()
            return int.from_bytes(digest, 'big') / 2**64

        def rank(row: sqlite3.Row) -> tuple[float, ...]:
            unsure = math.inf if row['margin'] is None else abs(row['margin'])
            return row['id'] != held['pair'], -row['taken'], unsure, draw(row['id'], 'order')

        with self._change():
            query = 'SELECT pair, comment FROM judgements WHERE person = ? AND verdict IS NULL'
            held = self._db.execute(query, (person,)).fetchone() or {'pair': None, 'comment': ''}
            self._db.execute('DELETE FROM judgements WHERE person = ? AND verdict IS NULL', (person,))
            first = min(self._candidates(person, self.clock() - LEASE_S), key=rank, default=None)
            if first is None:
                return None
            pair, comment = first['id'], held['comment'] if first['id'] == held['pair'] else ''
            a_is_left = draw(pair, 'side') < 0.5
            self._db.execute(
                'INSERT INTO judgements (person, pair, a_is_left, asked, comment) VALUES (?, ?, ?, ?, ?)',
                (person, pair, a_is_left, self.clock(), comment),
            )
        query = 'SELECT shown, answer_a, answer_b FROM pairs WHERE id = ?'
        shown, *answers = self._db.execute(query, (pair,)).fetchone()
        left, right = answers if a_is_left else answers[::-1]
        return AskedPair(pair, shown, left, right, comment)

    def _candidates(self, person: int, since: float) -> list[sqlite3.Row]:
        """Returns the pairs that a person may judge; leases older than `since` have expired."""
        return self._db.execute(
            f"""SELECT id, margin, COALESCE(taken, 0) AS taken FROM pairs LEFT JOIN {TAKEN} t ON t.pair = id
            WHERE answer_a != answer_b AND COALESCE(taken, 0) < :places AND id NOT IN
            (SELECT pair FROM judgements WHERE person = :person AND verdict IS NOT NULL)""",
            {'person': person, 'since': since, 'places': self.annotators_per_pair},
        ).fetchall()

    def judge(self, person: int, pair: int, choice: str, comment: str = '') -> None:
        """Saves a judgement, durable on return. Repeating it changes only the comment.

        Raises:
            NotAsked: if the person was not shown the pair, has judged it differently, or has lost the lease on it.
            ValueError: for an unknown choice, or a comment above `MAX_COMMENT` characters.
        """
        if choice not in CHOICES:
            raise ValueError(f'{choice!r} is no choice; there are {", ".join(CHOICES)}')
        if len(comment) > MAX_COMMENT:
            raise ValueError(f'a comment has at most {MAX_COMMENT} characters')
        with self._change():
            row = self._db.execute(
                f"""SELECT a_is_left, verdict, COALESCE(taken, 0) AS taken FROM judgements m
                LEFT JOIN {TAKEN} t ON t.pair = m.pair WHERE m.person = :person AND m.pair = :pair""",
                {'person': person, 'pair': pair, 'since': self.clock() - LEASE_S},
            ).fetchone()
            if row is None:
                raise NotAsked('this pair is not yours to judge any more')
            verdict = {'left': 'ba'[row['a_is_left']], 'right': 'ab'[row['a_is_left']]}.get(choice, choice)
            if row['verdict'] not in (None, verdict):
                raise NotAsked('you have judged this pair otherwise; take that back first')
            if verdict != 'skip' and row['taken'] >= self.annotators_per_pair:
                raise NotAsked('this took so long that the pair went to somebody else')
            self._db.execute(
                """UPDATE judgements SET verdict = ?, comment = ?, judged = ?,
                number = COALESCE(number, (SELECT COALESCE(MAX(number), 0) + 1 FROM judgements))
                WHERE person = ? AND pair = ?""",
                (verdict, comment, self.clock(), person, pair),
            )

    def undo(self, person: int) -> bool:
        """Undoes a person's last judgement or skip: its pair is the next one again. Returns False if there is none."""
        with self._change():
            row = self._db.execute(
                'SELECT pair FROM judgements WHERE person = ? AND verdict IS NOT NULL ORDER BY number DESC', (person,)
            ).fetchone()
            if row is None:
                return False
            self._db.execute('DELETE FROM judgements WHERE person = ? AND verdict IS NULL', (person,))
            self._db.execute(
                """UPDATE judgements SET verdict = NULL, judged = NULL, number = NULL, asked = ?
                WHERE person = ? AND pair = ?""",
                (self.clock(), person, row['pair']),
            )
        return True

    # ------------------------------------------------------------------ what came out

    def judgements(self) -> list[Judgement]:
        """Returns all judgements, in the order in which they were made, skips included."""
        found = self._db.execute(
            """SELECT name, pair, verdict, a_is_left, comment FROM judgements JOIN people ON people.id = person
            WHERE verdict IS NOT NULL ORDER BY number"""
        )
        return [Judgement(row[0], row[1], row[2], bool(row[3]), row[4]) for row in found]

    def progress(self, person: int) -> dict[str, int]:
        """Returns the number of judgements by this person and by all, the number wanted, and the number of pairs that
        this person could still get if the leases of others expire."""
        given = "SELECT COUNT(*) FROM judgements WHERE verdict IN ('a', 'b', 'tie', 'both_bad')"
        return {
            'mine': self._value(f'{given} AND person = ?', person),
            'all': self._value(given),
            'wanted': self.num_asked * self.annotators_per_pair,
            'open': len(self._candidates(person, math.inf)),
        }

    def preferences(self) -> tuple[list[dict[str, Any]], int]:
        """Returns records for `chatgpt.data.load_preferences`, and the number of judged pairs that give none.

        There is one record per pair with a majority for one response: the prompt, `chosen`, `rejected`, `pair`,
        `votes_chosen`, `votes_rejected`, `votes_neither` (ties and both bad) and `comments`. Pairs with an empty
        response are excluded, since the loaders refuse them.
        """
        of_pair: dict[int, list[Judgement]] = {}
        for judgement in self.judgements():
            if judgement.verdict != 'skip':
                of_pair.setdefault(judgement.pair, []).append(judgement)
        rows = []
        for pair in self._db.execute('SELECT * FROM pairs ORDER BY id'):
            judgements = of_pair.get(pair['id'], [])
            votes = {side: sum(j.verdict == side for j in judgements) for side in 'ab'}
            better, worse = ('a', 'b') if votes['a'] > votes['b'] else ('b', 'a')
            texts = [pair[f'answer_{side}'] for side in (better, worse)]
            if votes[better] == votes[worse] or not all(text.strip() for text in texts):
                continue
            about = {'votes_chosen': votes[better], 'votes_rejected': votes[worse]}
            about['votes_neither'] = len(judgements) - votes['a'] - votes['b']
            comments = [j.comment for j in judgements if j.comment]
            record = json.loads(pair['prompt']) | {'chosen': texts[0], 'rejected': texts[1], 'pair': pair['id']}
            rows.append(record | about | {'comments': comments})
        return rows, len(of_pair) - len(rows)
