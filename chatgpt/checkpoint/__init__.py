"""Bytes on disk: the format, atomic writing, safe reading, a run's folder. Knows no process group, trainer or
strategy."""

from chatgpt.checkpoint.files import load_object, load_tensors, save_object, save_tensors, write_atomically
from chatgpt.checkpoint.folder import (
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
from chatgpt.checkpoint.layout import (
    CheckpointError,
    CheckpointMismatch,
    DictReader,
    Manifest,
    Piece,
    SubReader,
    TensorReader,
)
from chatgpt.checkpoint.reader import CheckpointReader
from chatgpt.checkpoint.writer import CheckpointWriter, pieces_of, write_checkpoint

__all__ = [
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
