"""The fields of the lines of metrics.jsonl and of the progress line; `log` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.backend.memory import resident
from mpitrain.train.intervals import Step
from mpitrain.train.observers.log import Metrics, Progress
from mpitrain.train.observers.observer import Observer, Watched


class Rates(Observer):
    """Means since the last line that was due, over training time alone: no evaluation, no saving."""

    def begin(self, run: Watched) -> None:
        self.plan, self.more = run.plan, run.more
        self._steps, self._seconds, self._exposed = 0, 0.0, 0.0

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._exposed += fields.comm_exposed_s
        step_s = self._seconds / self._steps
        self.updated(step, fields, {"samples_per_s": self.plan.batch_size / max(step_s, 1e-9), "step_s": step_s})
        if self.plan.logs(step):
            self._steps, self._seconds, self._exposed = 0, 0.0, 0.0

    def updated(self, step: int, fields: Step, rates: Mapping[str, float]) -> None:
        """One more step is done, at these rates."""


class Lines(Rates):
    """Hands `write` a line of plain values for each step that is due, and for each evaluation."""

    def updated(self, step: int, fields: Step, rates: Mapping[str, float]) -> None:
        if not self.plan.logs(step):
            return
        line = {"step": step, "epoch": self.plan.epoch(step), "loss": fields.loss, "lr": fields.lr, "grad_norm": fields.grad_norm,
                **rates, "comm_exposed_s": self._exposed / self._steps,
                "comm_exposed_share": self._exposed / max(self._seconds, 1e-9), "peak_rss_mb": resident(peak=True) / 2**20}
        if fields.skipped:
            line["skipped"] = fields.skipped
        line |= self.more
        self.write(step, "train", line)

    def after_evaluation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        self.write(step, "validation", {"step": step, "epoch": self.plan.epoch(step), "split": "validation", **metrics,
                                        "seconds": seconds})

    def write(self, step: int, group: str, line: Mapping[str, Any]) -> None:
        """`group` is "train" or "validation"."""


class MetricsFile(Lines):
    """Appends to metrics.jsonl; only rank 0 of a run has one."""

    def __init__(self, path: Path):
        self.path = path
        self._file = Metrics(None)

    def begin(self, run: Watched) -> None:
        super().begin(run)
        self._file = Metrics(self.path)

    def write(self, step: int, group: str, line: Mapping[str, Any]) -> None:
        self._file.write(line)

    def before_checkpoint(self, step: int) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class Console(Rates):
    """Shows the run's progress (`every_s`: see Progress) and messages; only rank 0 of a run that is not quiet has one."""

    def __init__(self, every_s: float):
        self.every_s = every_s
        self.progress: Progress | None = None

    def begin(self, run: Watched) -> None:
        super().begin(run)
        self.progress = Progress(run.plan.steps, every_s=self.every_s)

    def updated(self, step: int, fields: Step, rates: Mapping[str, float]) -> None:
        assert self.progress is not None
        self.progress.update(step, {"loss": fields.mean, "lr": fields.lr, **rates}, due=self.plan.logs(step))

    def after_evaluation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        words = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.message(f"step {step}  validation  {words}")

    def message(self, text: str) -> None:
        if self.progress is not None:
            self.progress.message(text)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
