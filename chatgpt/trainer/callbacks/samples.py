"""Tables of sample texts with their scores, on the terminal and in run_dir/samples.jsonl.

They show the first prompts of a phase, which change with the data order; for fixed prompts use an `Evaluator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any

import torch

from chatgpt.nn.records import fetched, is_here
from chatgpt.trainer.callbacks.base import TrainerView, check_interval, say
from chatgpt.trainer.callbacks.jsonl import RunFileWriter
from chatgpt.types import Experience, Sample


def rows_of(
    experiences: SequenceOf[Experience], num_rows: int, tokenizer: Any = None, *, reference: bool = True
) -> list[dict[str, Any]]:
    """Returns the first `num_rows` of this rank as dicts: index, prompt, response, score, kl (nats, summed),
    num_tokens, ended; for a conversation also last_turn, which tables show in place of the prompt. Without a reference
    there is no kl.

    For an episode also end, success, and its parts in order: {'turn': text, 'rewards': {name: number}} and
    {'observation': text}.
    """
    rows = []
    for e in islice(filter(is_here, experiences), num_rows):
        kl = float(torch.where(e.response_mask, e.old_logprobs - e.ref_logprobs, 0.0).double().sum())
        rows.append(
            {
                'index': e.index,
                **prompt_row(e, tokenizer),
                'response': e.response_text or _text(e.response_ids, tokenizer),
                'score': float(e.score),
                **({'kl': kl} if reference else {}),
                'num_tokens': e.num_actions,
                'ended': e.ended,
                **episode_row(e, tokenizer),
            }
        )
    return rows


def prompt_row(sample: Sample | Experience, tokenizer: Any = None) -> dict[str, str]:
    """Returns the prompt's text, and for a conversation the last turn."""
    row = {'prompt': sample.prompt_text or _text(sample.prompt_ids, tokenizer)}
    return row | {'last_turn': sample.last_turn} if sample.last_turn else row


def episode_row(sample: Sample | Experience, tokenizer: Any) -> dict[str, Any]:
    """Returns the fields of an episode in `rows_of`; {} without an episode."""
    episode = sample.episode
    if episode is None:
        return {}
    parts: list[dict[str, Any]] = []
    at = 0
    for turn in episode.turns:
        if turn.start > at:
            parts.append({'observation': _text(sample.response_ids[at : turn.start], tokenizer)})
        parts.append({'turn': _text(sample.response_ids[turn.start : turn.stop], tokenizer), 'rewards': turn.rewards})
        at = turn.stop
    failure = {'message': episode.message} if episode.message else {}
    return {'end': episode.end, 'success': episode.success, 'parts': parts} | failure


def shown_parts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row for a table: for a conversation with the last turn as its prompt, for an episode with a response
    that includes observations in brackets, on one line."""
    if 'last_turn' in row:
        row = {name: value for name, value in row.items() if name != 'last_turn'} | {'prompt': row['last_turn']}
    if 'parts' not in row:
        return dict(row)
    texts = [part['turn'] if 'turn' in part else f'[{part["observation"].strip()}]' for part in row['parts']]
    return {name: value for name, value in row.items() if name != 'parts'} | {'response': ' '.join(texts)}


def _text(ids: Any, tokenizer: Any) -> str:
    """Returns the decoded text, or the ids if there is no tokenizer."""
    return (
        tokenizer.decode(ids, skip_special_tokens=True) if tokenizer is not None else ' '.join(map(str, ids.tolist()))
    )


def format_table(rows: SequenceOf[Mapping[str, Any]], columns: SequenceOf[str], *, width: int = 60) -> str:
    """Returns rows as aligned text under their column names. Line breaks show as ⏎; texts longer than `width` end with
    …."""
    cells = [[_cell(row.get(c, ''), width) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    lines = [
        '  '.join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in [list(columns), *cells]
    ]
    lines.insert(1, '  '.join('-' * w for w in widths))
    return '\n'.join(lines)


def _cell(value: Any, width: int) -> str:
    if isinstance(value, float):
        return f'{value:z.3f}'  # z: no -0.000
    text = str(value).replace('\r', '').replace('\n', '⏎').replace('\t', ' ')
    return text if len(text) <= width else text[: width - 1] + '…'


class SampleTable(RunFileWriter):
    """Shows prompts with responses and scores, in the first and the last learning phase and every `every` phases.

    Args:
        every: learning phases between tables.
        num_rows: rows of a table.
        width: maximum length of a text on the terminal; the file holds whole texts.
        show: print the table; False only writes the file.
    """

    def __init__(
        self, every: int = 10, num_rows: int = 4, *, width: int = 60, show: bool = True, filename: str = 'samples.jsonl'
    ) -> None:
        super().__init__(filename)
        self.every = check_interval('every', every)
        if num_rows < 1:
            raise ValueError(f'num_rows={num_rows} must be at least 1')
        if width < 8:
            raise ValueError(f'width={width} must be at least 8 characters')
        self.num_rows, self.width, self.show = num_rows, width, show

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        due = step == 1 or step % self.every == 0 or step == trainer.num_phases
        if not due or not trainer.last_experiences:
            return
        first = fetched(trainer.strategy, trainer.last_experiences[: self.num_rows])
        if not trainer.strategy.is_rank_0:
            return
        rows = rows_of(first, self.num_rows, trainer.tokenizer, reference='rollout/kl_mean' in metrics)
        self._file.write(trainer, step, rows)
        if self.show:
            columns = [name for name in ('score', 'kl', 'end') if name in rows[0]]
            shown = [shown_parts(row) for row in rows]
            table = format_table(shown, (*columns, 'prompt', 'response'), width=self.width)
            say(f'samples of phase {step}\n{table}')

    def on_log(
        self,
        trainer: TrainerView,
        stats: dict[str, float],
        batch: Mapping[str, SequenceOf[Any]],
        rewards: list[float],
        columns_to_log: list[str],
    ) -> None:
        columns = [c for c in columns_to_log if c in batch]
        if not columns or not trainer.strategy.is_rank_0:
            return
        count = min([self.num_rows, *(len(batch[c]) for c in columns)])
        rows: list[dict[str, Any]] = [{c: batch[c][i] for c in columns} for i in range(count)]
        for row, reward in zip(rows, rewards, strict=False):
            row['reward'] = float(reward)
        self._file.write(trainer, trainer.phase, rows)
        if self.show:
            shown = [*(['reward'] if rewards else []), *columns]
            say(f'samples of phase {trainer.phase}\n{format_table(rows, shown, width=self.width)}')
