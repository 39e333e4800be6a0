"""A page that shows a run, or several: curves, samples, settings, what the doctor found. One file that opens anywhere."""

from chatgpt.report.page import write_report
from chatgpt.report.summary import what_improved

__all__ = ['what_improved', 'write_report']
