"""The folder of a run and how it is read: record, metrics, samples, sequences. No torch."""

from chatgpt.monitor.run_folder.lines import JsonLines, json_safe, read_jsonl
from chatgpt.monitor.run_folder.reading import RunFolder
from chatgpt.monitor.run_folder.record import RunRecord, Start

__all__ = ['JsonLines', 'RunFolder', 'RunRecord', 'Start', 'json_safe', 'read_jsonl']
