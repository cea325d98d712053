"""Saved models of runs in use on the ranks of a communicator: their outputs, their metrics, the scales of their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.config import Config, changed
from mpitrain.config.shrink_sections import DistilConfig
from mpitrain.run import calibrating, evaluating
from mpitrain.run.evaluating import InUse
from mpitrain.run.ranks import Ranks

if TYPE_CHECKING:
    from mpitrain.run.paths import Paths
    from mpitrain.shrink.graph import Graph
    from mpitrain.shrink.importance import Importance
    from mpitrain.train.build.saved import SavedModel


@dataclass(frozen=True)
class Evaluated:
    """The validation metrics of the checkpoint of a step, equal on all ranks."""

    step: int
    metrics: dict[str, float]
    tables: dict[str, Any] = field(default_factory=dict)     # metrics that are no numbers, with the names of classes


class SavedRun(Ranks):
    """What a run has saved, in use on the ranks of `comm`, on any mesh: without an optimizer and gradients.

    A step is that of a checkpoint, "best", or None, the newest. What was saved is one model, also of a run with several sites.
    """

    def __init__(self, config: Config, comm: Any, **options: Any):
        super().__init__(changed(config, mesh={"site": 1, "dp": 0}) if config.mesh.site > 1 else config, comm, **options)

    @contextmanager
    def use(self, source: Path, step: int | str | None = None) -> Iterator[InUse]:
        """This rank's part of the model of a checkpoint of the run in `source`; errors inside are as those of a method."""
        with self.at_work():
            yield evaluating.use(self.config, self.open(), source, step)

    def calibrate(self, saved: SavedModel, layers: Sequence[str], rows: int) -> dict[str, float]:
        """The scales of the inputs of layers (paths) of a whole saved model, over the first training rows; equal on any ranks."""
        with self.at_work():
            return calibrating.calibrate(self.open(), saved, layers, rows)

    def sensitivities(self, saved: SavedModel, graph: Graph, rows: int) -> Importance:
        """How much the loss of the first training rows depends on each channel of a whole saved model; equal on any ranks."""
        with self.at_work():
            return calibrating.sensitivities(self.config, self.open(), saved, graph, rows)

    @contextmanager
    def paths(self, source: Path, step: int | str | None = None) -> Iterator[Paths]:
        """The paths of a saved supernet of the run in `source`; errors inside are as those of a method."""
        from mpitrain.run.paths import Paths
        with self.use(source, step) as used:
            yield Paths(self.config, self.open(), used, self.process.pulse.span)

    def evaluate(self, source: Path, step: int | str | None = None) -> Evaluated:
        """The metrics, on the validation data, of a checkpoint of the run in the folder `source`."""
        with self.at_work():
            return Evaluated(*evaluating.evaluate(self.config, self.open(), source, self.process.pulse.span, step))


def with_whole_models(config: Config) -> Config:
    """That of a saved model of which each rank has all; nothing is learned from a teacher."""
    return changed(config, mesh={"site": 1, "pp": 1, "dp": 0, "ep": 1, "cp": 1, "tp": 1}, distil=vars(DistilConfig()))
