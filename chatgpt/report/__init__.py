"""A page that shows a run, or several: what the doctor found, curves, samples, settings. One file, opens anywhere."""

from chatgpt.report.page import write_report
from chatgpt.report.summary import what_improved

__all__ = ['what_improved', 'write_report']
