"""Records sequences of every phase with their per-token arrays in `run_dir/rollouts`.

The first groups of the phase by sample index are recorded. The choice depends on neither scores nor ranks nor a random
state, and prompts come in random order, so the sample is fair. The entropy per token comes from the forwards of the
first learning epoch, at no further cost.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.functional.masking import segment_count
from chatgpt.monitor.run_folder import rollouts
from chatgpt.monitor.run_folder.lines import json_safe
from chatgpt.nn.records import fetched
from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval
from chatgpt.trainer.callbacks.token_texts import token_texts
from chatgpt.types import Batch, Episode, Experience

ARRAYS = ('old_logprobs', 'ref_logprobs', 'values', 'rewards', 'advantages', 'returns')
"""recorded fields of `Experience`, each (A,) fp32"""


def first_groups(experiences: SequenceOf[Experience], num_sequences: int) -> list[Experience]:
    """Returns the first whole groups by sample index that fit; if the first group does not, its beginning."""
    ordered = sorted(experiences, key=lambda e: e.index)
    groups: dict[int, list[Experience]] = {}
    for e in ordered:
        groups.setdefault(e.group, []).append(e)
    chosen: list[Experience] = []
    for members in groups.values():
        if chosen and len(chosen) + len(members) > num_sequences:
            break
        chosen += members[:num_sequences]
    return chosen


class RolloutRecorder(Callback):
    """Writes a parquet file of sequences per phase. Part of every online trainer with a `run_dir`.

    Args:
        every: learning phases between recordings; the first and the last phase are always recorded.
        num_sequences: maximum per phase, in whole groups (`first_groups`). 0 records nothing.
        max_mib: maximum size of the folder; beyond it phases are thinned out.
        max_phases: maximum number of files, likewise; see `run_folder.rollouts.phases_to_keep`.
    """

    def __init__(
        self, every: int = 1, num_sequences: int = 16, *, max_mib: float = 256.0, max_phases: int = 2000
    ) -> None:
        self.every = check_interval('every', every)
        for name, value, least in (
            ('num_sequences', num_sequences, 0),
            ('max_phases', max_phases, 2),
            ('max_mib', max_mib, 1),
        ):
            if value < least:
                raise ValueError(f'{name}={value} must be at least {least}')
        self.num_sequences, self.max_mib, self.max_phases = num_sequences, max_mib, max_phases
        self._folder: Path | None = None
        self._sizes: dict[int, int] = {}
        self._watches = False
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        """(sample index or -1 (B,), number of actions (B,), entropy (N,)) of each micro-batch of this rank in the first
        learning epoch"""

    # ------------------------------------------------------------------ hooks

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._begin(trainer, trainer.phase)

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        self._folder = None  # the phase may have changed: begin again at the next recording

    def on_learn_epoch_start(self, trainer: TrainerView, epoch: int) -> None:
        if epoch == 0:  # also of the passes of a critic that learns apart, in which the policy has no outputs
            self._watches = self._is_due(trainer, trainer.phase + 1)

    def on_policy_output(self, trainer: TrainerView, batch: Batch, output: Any) -> None:
        if self._watches and output.entropy is not None:
            # Nothing is copied to the host here: that would make the device wait in every micro-batch.
            index = torch.where(batch.sequence_mask, batch.columns['index'], -1)
            lengths = segment_count(batch.action_rows, batch.num_sequences)
            self._seen.append((index, lengths, output.entropy.detach()))

    def on_learn_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        self._watches = False

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        seen, self._seen = self._seen, []
        if not self._is_due(trainer, step) or not trainer.last_experiences:
            return
        chosen = fetched(trainer.strategy, first_groups(trainer.last_experiences, self.num_sequences))
        entropy = _entropies(trainer, seen, chosen)
        if trainer.strategy.is_rank_0:
            self._write(trainer, step, chosen, entropy, reference='rollout/kl_mean' in metrics)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._watches, self._seen = False, []

    # ------------------------------------------------------------------ the folder

    def _is_due(self, trainer: TrainerView, step: int) -> bool:
        if trainer.run_dir is None or not self.num_sequences:
            return False
        return step == 1 or step % self.every == 0 or step == trainer.num_phases

    def _begin(self, trainer: TrainerView, step: int) -> None:
        """Continues after `step`, like the other files of the run, on rank 0."""
        if trainer.run_dir is None or not self.num_sequences or not trainer.strategy.is_rank_0:
            return
        self._folder = trainer.run_dir / rollouts.FOLDER
        try:
            rollouts.begin(self._folder, step)
            self._sizes = rollouts.sizes_of(self._folder)
        except OSError as error:
            warnings.warn(f'{self._folder}: {error.strerror or error}', stacklevel=2)

    def _write(
        self,
        trainer: TrainerView,
        step: int,
        chosen: list[Experience],
        entropy: dict[int, SequenceOf[float]],
        *,
        reference: bool,
    ) -> None:
        """Writes a phase. A failure, for example of the disk or a tokenizer, is a warning and does not end the run."""
        if self._folder is None:
            self._begin(trainer, step - 1)
        assert self._folder is not None
        try:
            rows = rows_of_phase(chosen, step, trainer.tokenizer, entropy)
            if not reference:
                rows = [row | {'kl': None} for row in rows]
            path = rollouts.write_rollouts(self._folder, step, rows)
            self._sizes[step] = path.stat().st_size
            keep = rollouts.phases_to_keep(self._sizes, self.max_mib * 2**20, self.max_phases)
            for phase in self._sizes.keys() - keep:
                rollouts.file_of(self._folder, phase).unlink(missing_ok=True)
            self._sizes = {phase: self._sizes[phase] for phase in keep}
        except Exception as error:
            why = getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'
            warnings.warn(f'{self._folder}: phase {step} could not be recorded ({why})', stacklevel=2)


def rows_of_phase(
    experiences: SequenceOf[Experience], phase: int, tokenizer: Any, entropy: dict[int, SequenceOf[float]]
) -> list[dict[str, Any]]:
    """Returns the rows of `run_folder.rollouts.write_rollouts`. `entropy`: (A,) by sample index, for some samples."""
    if not experiences:
        return []
    lengths = [e.num_actions for e in experiences]
    # One copy to the host of everything together, not one per field and sequence.
    floats = torch.stack([torch.cat([getattr(e, name) for e in experiences]).float() for name in ARRAYS]).cpu()
    masks = torch.cat([e.response_mask for e in experiences]).cpu().split(lengths)
    rows = []
    for e, array, mask in zip(experiences, floats.split(lengths, dim=1), masks, strict=True):
        prompt_ids, token_ids = e.prompt_ids.tolist(), e.response_ids.tolist()
        prompt_tokens, tokens = token_texts(tokenizer, prompt_ids), _texts(tokenizer, e, token_ids)
        gap = torch.where(mask, array[0] - array[1], 0.0).double().sum()
        rows.append(
            {
                'phase': phase,
                'index': e.index,
                'group': e.group,
                'prompt': _plain(e.prompt_text or ''.join(prompt_tokens)),
                'last_turn': _plain(e.last_turn) or None,
                'response': _plain(e.response_text or ''.join(tokens)),
                'score': float(e.score),
                'shaped_score': float(e.shaped_score),
                'kl': float(gap),
                'finish_reason': e.finish_reason,
                'version': e.version,
                'prompt_ids': prompt_ids,
                'token_ids': token_ids,
                'prompt_tokens': prompt_tokens,
                'tokens': tokens,
                'mask': mask.numpy(),
                **{name: array[i].numpy() for i, name in enumerate(ARRAYS)},
                'entropy': entropy.get(e.index),
                'weighted_scores': [[float(w), float(s)] for w, s in e.weighted_scores],
                'columns': _plain(json.dumps(json_safe(e.columns), ensure_ascii=False)),
                'episode': None
                if e.episode is None
                else _plain(json.dumps(json_safe(_episode_json(e.episode)), ensure_ascii=False)),
            }
        )
    return rows


def _texts(tokenizer: Any, e: Experience, ids: list[int]) -> list[str]:
    """Returns a text per token; for an episode turn by turn, since the environment does not complete a character that a
    turn left incomplete."""
    borders = [at for turn in e.episode.turns for at in (turn.start, turn.stop)] if e.episode is not None else []
    borders = sorted({0, *borders, len(ids)})
    return [text for a, b in zip(borders, borders[1:], strict=False) for text in token_texts(tokenizer, ids[a:b])]


def _episode_json(episode: Episode) -> dict[str, Any]:
    """Returns the column 'episode' as JSON types."""
    turns = [{'start': t.start, 'stop': t.stop, 'rewards': t.rewards} for t in episode.turns]
    return {'turns': turns, 'end': episode.end, 'message': episode.message, 'success': episode.success}


def _entropies(
    trainer: TrainerView, seen: list[tuple[Tensor, Tensor, Tensor]], chosen: list[Experience]
) -> dict[int, SequenceOf[float]]:
    """Returns the entropy per token, (A,), by sample index, of the chosen samples that were learned. A collective."""
    mine: dict[int, Any] = {}
    if seen:
        wanted = {e.index for e in chosen}
        indices, lengths, entropies = map(torch.cat, zip(*seen, strict=True))
        values = entropies.float().cpu().numpy()
        start = 0
        for index, length in zip(indices.tolist(), lengths.tolist(), strict=True):
            stop = start + length
            if index in wanted and index not in mine:
                mine[index] = values[start:stop].copy()
            start = stop
    if trainer.strategy.world_size == 1:
        return mine
    return {index: own for rank in trainer.strategy.all_gather_object(mine) for index, own in rank.items()}


def _plain(text: str) -> str:
    """Replaces unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode('utf-8', 'replace').decode()
