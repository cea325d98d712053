"""Running statistics of batch norm for the path of a supernet that is in use, measured on training rows.

What training has seen is a mixture of all paths, whose means and variances are those of none of them (Guo et al. 2020, section
3.4). So the statistics of a path are measured when it is evaluated, or cut out: the first training rows go through it in chunks,
and the running values become the means of what the chunks have. Each chunk has a row of its own in a table that ranks add up, so
the result has the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.comm.mesh import Mesh
from mpitrain.data.loader import SampleReader
from mpitrain.nn import Module, collect_statistics, defer_statistics
from mpitrain.nn.elastic import ElasticBatchNorm2d
from mpitrain.nn.statistics import Running
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.schedules.grid import REPLICAS

ROWS, CHUNK = 512, 64            # training rows, and how many of them go through the model at once


def normed(model: Module) -> list[ElasticBatchNorm2d]:
    """The layers of a model whose statistics are measured for a path."""
    return [module for module in model.modules() if isinstance(module, ElasticBatchNorm2d) and module.running is not None]


class Calibration:
    """All ranks make one and call `run` alike; `rows` are the numbers of the training rows, of which the first count."""

    def __init__(self, inference: Inference, reader: SampleReader, rows: Any, mesh: Mesh):
        self.inference, self.reader, self.mesh = inference, reader, mesh
        self.rows = np.asarray(rows[:ROWS], np.int64)
        self.n_chunks = max(1, len(self.rows) // CHUNK)           # the last one has the rest: no chunk of a few rows
        self.layers = [normed(chunk) for chunk in inference.stage.chunks]
        self.channel = mesh.channel(REPLICAS, "calibration")

    def run(self) -> None:
        """The statistics of the path in use. It communicates."""
        mine = [*range(self.mesh.place, self.n_chunks, self.mesh.n_places)]
        running = [[layer.running for layer in layers if layer.running is not None] for layers in self.layers]
        tables = [np.zeros((self.n_chunks, sum(layer.size for layer in layers))) for layers in running]
        forwards = self.inference.forwards
        again = [self.n_chunks - 1] * (-(-self.n_chunks // self.mesh.n_places) - len(mine))      # ranks run equally often
        self.inference.forwards = [self._measured(*of_chunk, mine) for of_chunk in zip(forwards, self.layers, running, tables)]
        try:
            for _ in self.inference.run(map(self._read, mine + again)):
                pass
        finally:
            self.inference.forwards = forwards
        for layers, table in zip(running, tables):
            if table.size:
                self.channel.allreduce(table.reshape(-1), name="calibration")
                _write(layers, table)

    def _read(self, chunk: int) -> tuple[Any, Any]:
        stop = len(self.rows) if chunk == self.n_chunks - 1 else (chunk + 1) * CHUNK
        return self.reader.read(self.rows[chunk * CHUNK:stop])

    def _measured(self, forward: Callable[[Any], Any], layers: list[ElasticBatchNorm2d], running: list[Running], table: Any,
                  mine: list[int]) -> Callable[[Any], Any]:
        done = iter([*mine, None])

        def measuring(x: Any) -> Any:
            defer_statistics(running)
            collect_statistics(running)                           # what was recorded before is not ours
            for layer in layers:
                layer.calibrating = True
            try:
                output = forward(x)
            finally:
                for layer in layers:
                    layer.calibrating = False
            found = collect_statistics(running)
            if (chunk := next(done)) is not None:
                table[chunk] = found
            return output
        return measuring


def _write(layers: Sequence[Running], table: Any) -> None:
    """Running values become the means over the chunks."""
    sums, start = table.sum(axis=0), 0
    for layer in layers:
        count = sums[start + layer.size - 1]
        for buffer in layer.buffers:
            buffer.array[...] = buffer.xp.asarray(sums[start:start + buffer.size] / count).reshape(buffer.shape)
            buffer.mark_changed()
            start += buffer.size
        start += 1
