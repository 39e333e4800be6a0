"""What a run leaves in its folder, and reading it again: its record, its metrics, its samples, its sequences. No torch.

Left out: checkpoints (`chatgpt.checkpoint`) and trained models.
"""

from chatgpt.run_folder.lines import JsonLines, json_safe, read_jsonl
from chatgpt.run_folder.reading import RunFolder
from chatgpt.run_folder.record import RunRecord, Start

__all__ = ['JsonLines', 'RunFolder', 'RunRecord', 'Start', 'json_safe', 'read_jsonl']
