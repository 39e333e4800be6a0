"""What is wrong with a run, from its numbers: `diagnose` of a run's folder, `Diagnosis` of a run that goes on.

Each finding says what is seen, the likely cause, and what to change by how much; docs/doctor.md explains each. No
torch.
"""

from chatgpt.doctor.diagnosis import Diagnosis, diagnose, worst_first
from chatgpt.doctor.finding import LEVELS, Finding
from chatgpt.doctor.history import History
from chatgpt.doctor.learning_rate import recommended_lr
from chatgpt.doctor.limits import LIMITS
from chatgpt.doctor.table import CHECKS

__all__ = ['CHECKS', 'LEVELS', 'LIMITS', 'Diagnosis', 'Finding', 'History', 'diagnose', 'recommended_lr', 'worst_first']
