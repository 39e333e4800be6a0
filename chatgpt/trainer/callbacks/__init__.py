"""Callbacks that observe, log, save and stop a run. Optional packages are imported only when needed."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.trainer.callbacks.base import Callback, CallbackList, TrainerView
    from chatgpt.trainer.callbacks.checkpoint import SaveCheckpoint
    from chatgpt.trainer.callbacks.doctor import Doctor
    from chatgpt.trainer.callbacks.early_stopping import EarlyStopping, StopOnPlateau
    from chatgpt.trainer.callbacks.ema import EMA
    from chatgpt.trainer.callbacks.evaluation import Evaluator
    from chatgpt.trainer.callbacks.jsonl import JsonLines, MetricsWriter, read_jsonl
    from chatgpt.trainer.callbacks.performance import PerformanceEvaluator, num_parameters
    from chatgpt.trainer.callbacks.progress import ProgressBar
    from chatgpt.trainer.callbacks.report import WriteReport
    from chatgpt.trainer.callbacks.rollouts import RolloutRecorder
    from chatgpt.trainer.callbacks.run_record import RunRecorder
    from chatgpt.trainer.callbacks.samples import SampleTable, format_table, rows_of
    from chatgpt.trainer.callbacks.trackers import TRACKERS, MLflow, TensorBoard, Trackio, WandB

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'EMA',
    'TRACKERS',
    'Callback',
    'CallbackList',
    'Doctor',
    'EarlyStopping',
    'Evaluator',
    'JsonLines',
    'MLflow',
    'MetricsWriter',
    'PerformanceEvaluator',
    'ProgressBar',
    'RolloutRecorder',
    'RunRecorder',
    'SampleTable',
    'SaveCheckpoint',
    'StopOnPlateau',
    'TensorBoard',
    'Trackio',
    'TrainerView',
    'WandB',
    'WriteReport',
    'format_table',
    'num_parameters',
    'read_jsonl',
    'rows_of',
]
