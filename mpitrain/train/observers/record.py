"""What a run writes down about itself: metrics.jsonl, the progress line, TensorBoard where asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.backend.memory import resident
from mpitrain.errors import ConfigError
from mpitrain.train.observers.log import Metrics, Progress

if TYPE_CHECKING:
    from mpitrain.train.trainer import Plan


class Recorder:
    """Rates are means since the last written line, over training time alone: no evaluation, no saving.

    Only rank 0 has a file to write and a terminal to show; on the others all of this does nothing.
    """

    def __init__(self, metrics: Path | None, *, rank: int, quiet: bool = False, board: Callable[[], Any] | None = None):
        self.metrics = Metrics(metrics if rank == 0 else None)
        self.rank, self.quiet = rank, quiet
        self.board = board() if board is not None else None
        self.progress: Progress | None = None
        self._steps, self._seconds, self._exposed = 0, 0.0, 0.0

    def start(self, step: int, plan: Plan, notes: Sequence[str] = ()) -> None:
        self.plan = plan
        self.progress = Progress(plan.steps, rank=self.rank, quiet=self.quiet)
        if step:
            self.progress.message(f"resumed at step {step}")
        for note in notes:
            self.progress.message(note)

    def step(self, done: int, result: Mapping[str, Any], seconds: float, *, due: bool) -> None:
        """One update is complete; every `log.every` of them make a line."""
        assert self.progress is not None
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._exposed += result["comm_exposed_s"]
        step_s = self._seconds / self._steps
        shown = {"loss": result["loss"], "lr": result["lr"], "samples_per_s": self.plan.batch_size / max(step_s, 1e-9),
                 "step_s": step_s}
        self.progress.update(done, shown, due=due)
        if not due:
            return
        line = {"step": done, "epoch": (done - 1) // self.plan.steps_per_epoch, "loss": result["loss"], "lr": result["lr"],
                "grad_norm": result["grad_norm"], "samples_per_s": shown["samples_per_s"], "step_s": step_s,
                "comm_exposed_s": self._exposed / self._steps,
                "comm_exposed_share": self._exposed / max(self._seconds, 1e-9), "peak_rss_mb": resident(peak=True) / 2**20}
        tally = result.get("tally", ())
        if len(tally) and tally[1]:                           # of mixtures of experts
            line |= {"balance": tally[0] / tally[1], "dropped": tally[2] / tally[3]}
        self._write(done, "train", line)
        self._steps, self._seconds, self._exposed = 0, 0.0, 0.0

    def evaluation(self, done: int, metrics: Mapping[str, float], seconds: float) -> None:
        assert self.progress is not None
        line = {"step": done, "epoch": (done - 1) // self.plan.steps_per_epoch, "split": "validation", **metrics,
                "seconds": seconds}
        self._write(done, "validation", line)
        words = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.progress.message(f"step {done}  validation  {words}")

    def _write(self, done: int, group: str, line: Mapping[str, Any]) -> None:
        self.metrics.write(line)
        if self.board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{group}/{name}", value, done)

    def message(self, text: str) -> None:
        assert self.progress is not None
        self.progress.message(text)

    def saved(self, done: int) -> None:
        assert self.progress is not None
        self.progress.message(f"step {done}  saved")

    def sync(self) -> None:
        self.metrics.sync()

    def close(self) -> None:
        self.metrics.close()
        if self.progress is not None:
            self.progress.close()
        if self.board is not None:
            self.board.close()


def find_tensorboard() -> Any:
    """The class that writes event files. Raises ConfigError where its package is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError("log.tensorboard = true needs the package tensorboardX; pip install 'mpitrain[tb]'") from None
    return SummaryWriter
