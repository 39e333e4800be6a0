"""Bytes on disk: the format, atomic writing, safe reading, a run's folder. Knows no process group, trainer or
strategy."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.strategies.checkpoint.files import (
        load_object,
        load_tensors,
        save_object,
        save_tensors,
        write_atomically,
    )
    from chatgpt.strategies.checkpoint.folder import (
        CUT_SHORT,
        FolderClaim,
        claim_folder,
        latest,
        list_checkpoints,
        prune,
        recover,
        step_folder,
        step_of,
    )
    from chatgpt.strategies.checkpoint.layout import (
        CheckpointError,
        CheckpointMismatch,
        DictReader,
        Manifest,
        Piece,
        SubReader,
        TensorReader,
    )
    from chatgpt.strategies.checkpoint.reader import CheckpointReader
    from chatgpt.strategies.checkpoint.writer import CheckpointWriter, pieces_of, write_checkpoint

CHECKPOINT_MINUTES = 15.0
"""between checkpoints of a run that does not say how often"""
__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'CHECKPOINT_MINUTES',
    'CUT_SHORT',
    'CheckpointError',
    'CheckpointMismatch',
    'CheckpointReader',
    'CheckpointWriter',
    'DictReader',
    'FolderClaim',
    'Manifest',
    'Piece',
    'SubReader',
    'TensorReader',
    'claim_folder',
    'latest',
    'list_checkpoints',
    'load_object',
    'load_tensors',
    'pieces_of',
    'prune',
    'recover',
    'save_object',
    'save_tensors',
    'step_folder',
    'step_of',
    'write_atomically',
    'write_checkpoint',
]
