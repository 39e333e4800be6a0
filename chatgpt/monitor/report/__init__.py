"""The report of one run or several: findings of the doctor, curves, samples, settings, in one HTML file."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.monitor.report.page import write_report as write_report
    from chatgpt.monitor.report.series import what_improved as what_improved

__getattr__, __dir__ = on_demand(__name__)
