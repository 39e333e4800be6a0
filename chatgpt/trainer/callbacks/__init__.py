"""Callbacks: what watches a run, logs it, saves it and stops it. Optional packages are imported only when needed."""

from chatgpt.trainer.callbacks.base import Callback, CallbackList
from chatgpt.trainer.callbacks.checkpoint import SaveCheckpoint
from chatgpt.trainer.callbacks.doctor import Doctor
from chatgpt.trainer.callbacks.early_stopping import EarlyStopping, StopOnPlateau
from chatgpt.trainer.callbacks.ema import EMA
from chatgpt.trainer.callbacks.evaluation import Evaluator
from chatgpt.trainer.callbacks.jsonl import JsonLines, MetricsWriter, read_jsonl
from chatgpt.trainer.callbacks.memory import MemoryAdvice
from chatgpt.trainer.callbacks.mlflow import MLflow
from chatgpt.trainer.callbacks.performance import PerformanceEvaluator, num_parameters
from chatgpt.trainer.callbacks.progress import ProgressBar
from chatgpt.trainer.callbacks.report import WriteReport
from chatgpt.trainer.callbacks.rollouts import RolloutRecorder
from chatgpt.trainer.callbacks.run_record import RunRecorder
from chatgpt.trainer.callbacks.samples import SampleTable, format_table, rows_of
from chatgpt.trainer.callbacks.self_check import RatioCheck, RatioWarning
from chatgpt.trainer.callbacks.tensorboard import TensorBoard
from chatgpt.trainer.callbacks.trackers import TRACKERS
from chatgpt.trainer.callbacks.trackio import Trackio
from chatgpt.trainer.callbacks.wandb import WandB

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
    'MemoryAdvice',
    'MetricsWriter',
    'PerformanceEvaluator',
    'ProgressBar',
    'RatioCheck',
    'RatioWarning',
    'RolloutRecorder',
    'RunRecorder',
    'SampleTable',
    'SaveCheckpoint',
    'StopOnPlateau',
    'TensorBoard',
    'Trackio',
    'WandB',
    'WriteReport',
    'format_table',
    'num_parameters',
    'read_jsonl',
    'rows_of',
]
