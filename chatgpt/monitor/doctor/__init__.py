"""Finds faults of a run in its metrics: `diagnose` for a run's folder, `Diagnosis` during a run. Imports no torch.

Each finding has the numbers, the likely cause, and what to change and by how much; `explain` describes it in full.
"""

from chatgpt.monitor.doctor.diagnosis import Diagnosis, diagnose, worst_first
from chatgpt.monitor.doctor.finding import CHECKS, LEVELS, Finding
from chatgpt.monitor.doctor.history import History
from chatgpt.monitor.doctor.limits import LIMITS
from chatgpt.monitor.learning_rate import recommended_lr

__all__ = ['CHECKS', 'LEVELS', 'LIMITS', 'Diagnosis', 'Finding', 'History', 'diagnose', 'recommended_lr', 'worst_first']
