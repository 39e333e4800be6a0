"""Callbacks that observe, log, save and stop a run. Optional packages are imported only when needed."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.trainer.callbacks.base import Callback as Callback
    from chatgpt.trainer.callbacks.base import CallbackList as CallbackList
    from chatgpt.trainer.callbacks.base import TrainerView as TrainerView
    from chatgpt.trainer.callbacks.checkpoint import SaveCheckpoint as SaveCheckpoint
    from chatgpt.trainer.callbacks.doctor import Doctor as Doctor
    from chatgpt.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from chatgpt.trainer.callbacks.early_stopping import StopOnPlateau as StopOnPlateau
    from chatgpt.trainer.callbacks.ema import EMA as EMA
    from chatgpt.trainer.callbacks.evaluation import Evaluator as Evaluator
    from chatgpt.trainer.callbacks.jsonl import JsonLines as JsonLines
    from chatgpt.trainer.callbacks.jsonl import MetricsWriter as MetricsWriter
    from chatgpt.trainer.callbacks.jsonl import read_jsonl as read_jsonl
    from chatgpt.trainer.callbacks.performance import PerformanceEvaluator as PerformanceEvaluator
    from chatgpt.trainer.callbacks.performance import num_parameters as num_parameters
    from chatgpt.trainer.callbacks.progress import ProgressBar as ProgressBar
    from chatgpt.trainer.callbacks.report import WriteReport as WriteReport
    from chatgpt.trainer.callbacks.rollouts import RolloutRecorder as RolloutRecorder
    from chatgpt.trainer.callbacks.run_record import RunRecorder as RunRecorder
    from chatgpt.trainer.callbacks.samples import SampleTable as SampleTable
    from chatgpt.trainer.callbacks.samples import format_table as format_table
    from chatgpt.trainer.callbacks.samples import rows_of as rows_of
    from chatgpt.trainer.callbacks.trackers import TRACKERS as TRACKERS
    from chatgpt.trainer.callbacks.trackers import MLflow as MLflow
    from chatgpt.trainer.callbacks.trackers import TensorBoard as TensorBoard
    from chatgpt.trainer.callbacks.trackers import Trackio as Trackio
    from chatgpt.trainer.callbacks.trackers import WandB as WandB

__getattr__, __dir__ = on_demand(__name__)
