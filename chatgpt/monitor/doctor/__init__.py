"""Finds what is wrong with a run from its numbers: `diagnose` of a run's folder, `Diagnosis` of a run that goes on.

Each finding says what is seen, the likely cause, and what to change by how much; `explain` says more of each. No torch.
"""

from chatgpt.monitor.doctor.diagnosis import Diagnosis, diagnose, worst_first
from chatgpt.monitor.doctor.finding import CHECKS, LEVELS, Finding
from chatgpt.monitor.doctor.history import History
from chatgpt.monitor.doctor.limits import LIMITS
from chatgpt.monitor.learning_rate import recommended_lr

__all__ = ['CHECKS', 'LEVELS', 'LIMITS', 'Diagnosis', 'Finding', 'History', 'diagnose', 'recommended_lr', 'worst_first']
