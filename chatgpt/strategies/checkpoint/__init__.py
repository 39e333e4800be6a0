"""Checkpoint files: format, atomic writing, safe reading, and the folder of a run. Independent of process groups,
trainers and strategies."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.strategies.checkpoint.files import save_tensors
    from chatgpt.strategies.checkpoint.folder import (
        CUT_SHORT,
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
        TensorReader,
    )
    from chatgpt.strategies.checkpoint.reader import CheckpointReader
    from chatgpt.strategies.checkpoint.writer import CheckpointWriter, pieces_of, write_checkpoint

CHECKPOINT_MINUTES = 15.0
"""default interval of a run's checkpoints"""
__getattr__, __dir__ = on_demand(__name__)

__all__ = ['CHECKPOINT_MINUTES', 'CUT_SHORT', 'CheckpointError', 'CheckpointMismatch', 'CheckpointReader']
__all__ += ['CheckpointWriter', 'DictReader', 'Manifest', 'Piece', 'TensorReader', 'claim_folder', 'latest']
__all__ += ['list_checkpoints', 'pieces_of', 'prune', 'recover', 'save_tensors', 'step_folder', 'step_of']
__all__ += ['write_checkpoint']
