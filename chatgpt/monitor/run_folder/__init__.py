"""The folder of a run: record, metrics, samples, recorded sequences. Imports no torch."""

from chatgpt.monitor.run_folder.lines import JsonLines, json_safe, read_jsonl
from chatgpt.monitor.run_folder.reading import RunFolder
from chatgpt.monitor.run_folder.record import RunRecord, Start

__all__ = ['JsonLines', 'RunFolder', 'RunRecord', 'Start', 'json_safe', 'read_jsonl']
