"""What a model card is made of: what the run's folder holds, or what the trainer knows."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from chatgpt.report.summary import what_improved
from chatgpt.run_folder import RunFolder, RunRecord


@dataclass(kw_only=True)
class ModelFacts:
    """What is known of a model, and of the run that trained it."""

    record: RunRecord | None = None
    """None: of a model that is saved without a run"""
    metrics: SequenceOf[Mapping[str, Any]] = ()
    eval: SequenceOf[Mapping[str, Any]] = ()
    samples: SequenceOf[Mapping[str, Any]] = ()
    """rows with prompt, response and score, of one phase"""
    findings: SequenceOf[Mapping[str, Any]] = ()
    improved: str = ''
    """in a line"""
    source: str | None = None
    """what the model was loaded from: a hub name or a folder"""
    parameters: int | None = None
    family: str | None = None
    rank: int | None = None
    """of the adapters, where the model is these alone"""
    run_name: str | None = None
    title: str | None = None
    """None is the name of the model's folder, or of the run's where the former says nothing"""
    more: dict[str, Any] = field(default_factory=dict)
    """further front matter: license, language, datasets, tags"""

    @classmethod
    def of(cls, run: RunFolder, **more: Any) -> ModelFacts:
        """Of a run's folder."""
        samples = run.eval_samples or run.samples
        last = samples[-1]['step'] if samples else None
        return cls(
            record=run.record,
            metrics=run.metrics,
            eval=run.eval,
            samples=[row for row in samples if row['step'] == last],
            findings=run.findings,
            run_name=run.name,
            improved=what_improved(run),
            **more,
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.record.settings if self.record is not None else {}
