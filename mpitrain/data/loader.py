"""Micro-batches of a rank, read ahead by threads.

Micro-batch i of M is rows [iB/M, (i+1)B/M) of the global batch of B rows (rounded down), on any number of ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from mpitrain.backend import use_pool
from mpitrain.data.augment import Augmentation
from mpitrain.data.checks import Source, check_exact, check_finite, check_labels
from mpitrain.data.columns import Columns, each_of
from mpitrain.data.keyed import key, sample_keys
from mpitrain.data.sampler import Sampler
from mpitrain.data.shards import Rows, Values
from mpitrain.data.tokens import IGNORE
from mpitrain.data.transforms import Transforms
from mpitrain.errors import MpitrainError

if TYPE_CHECKING:
    from mpitrain.data.tasks import Tasks


@dataclass
class MicroBatch:
    """The unit of arithmetic: some consecutive rows of one global batch."""

    x: Any                 # an array of rows, or `Columns` where inputs have names
    y: Values
    samples: Rows          # Dataset rows are the key of everything random about a sample.
    index: int             # The micro-batch's number in the global batch.
    first: int             # The place of its first row in the global batch.
    step: int
    there: tuple[Any, Any] | None = None     # x and y on a device, as the model takes them, where they have been sent ahead

    def __len__(self) -> int:
        return len(self.samples)


class SampleReader:
    """Rows of a dataset, checked and transformed: the part that training and evaluation share.

    With `n_classes`, labels are checked, but for those equal to `ignore`; `dtype` is the model's. `tasks` make inputs and targets
    of windows of tokens.
    """

    def __init__(self, source: Source, transforms: Transforms | None = None, *, n_classes: int | None = None,
                 ignore: int | None = None, dtype: Any = None, tasks: Tasks | None = None):
        self.tasks = tasks
        self.source, self.transforms, self.n_classes = source, transforms or Transforms(), n_classes
        tokens = source.kind == "tokens"
        self.ignore, self.dtype = IGNORE if tokens else ignore, None if tokens else dtype

    def read(self, rows: Rows, epoch: int | None = None) -> tuple[Any, Values]:
        """Inputs and targets; `epoch` is None outside of training."""
        source = self.source
        x, y = source.read(rows)
        x_name, y_name = source.names
        for array, name in each_of(x, x_name):
            check_finite(array, rows, source, name)
        check_finite(y, rows, source, y_name)
        if self.n_classes is not None and y.dtype.kind in "biu":
            if source.kind == "tokens":
                check_labels(x, rows, self.n_classes, source, x_name)
            check_labels(y, rows, self.n_classes, source, y_name, self.ignore)
        x = self.transforms(x)
        if self.dtype is not None and not isinstance(x, Columns):            # integers by name stay integers
            check_exact(x, rows, source, x_name, self.dtype)
        y = self.transforms.of_targets(y)
        return (x, y) if self.tasks is None else self.tasks(x, y, rows, epoch)


class Loader:
    """The micro-batches [`micro_start`, `micro_stop`) of each step, for one rank; the next steps are read meanwhile.

    `workers` threads (0: read when asked) keep `depth` steps ready. Nothing forks. What goes wrong in a thread is raised
    where the step would have been handed out. `span(row, name)` is entered around each read, on a row for each thread.
    `close` ends the threads.
    """

    def __init__(self, source: Source, sampler: Sampler, n_micro: int, micro_start: int = 0, micro_stop: int | None = None, *,
                 transforms: Transforms | None = None, augment: Sequence[Augmentation] = (), n_classes: int | None = None,
                 ignore: int | None = None, dtype: Any = None, tasks: Tasks | None = None, workers: int = 1, depth: int = 2,
                 span: Callable[[str, str], AbstractContextManager[None]] = lambda row, name: nullcontext()):
        self.reader = SampleReader(source, transforms, n_classes=n_classes, ignore=ignore, dtype=dtype, tasks=tasks)
        self.sampler, self.augment = sampler, list(augment)
        self.n_micro, self.micro = n_micro, range(micro_start, n_micro if micro_stop is None else micro_stop)
        assert 0 <= self.micro.start <= self.micro.stop <= n_micro
        self.workers, self.depth, self.span = workers, max(1, depth), span
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[int, Future[list[MicroBatch]]]] = deque()

    def load(self, step: int) -> list[MicroBatch]:
        """The micro-batches of one step, those without rows left out. Raises DataError with the step."""
        thread = threading.current_thread()
        row = "data" if thread is threading.main_thread() else f"reader {thread.name.rpartition('_')[2]}"
        size = self.sampler.size(step)
        bounds = [i * size // self.n_micro for i in range(self.micro.start, self.micro.stop + 1)]
        with self.span(row, f"read step {step + 1}"):
            rows = self.sampler.rows(step, bounds[0], bounds[-1])
            if not len(rows):
                return []
            try:
                x, y = self.reader.read(rows, self.sampler.epoch(step))
                if self.augment:
                    keys = sample_keys(key(self.sampler.seed, "augment", self.sampler.epoch(step)), rows)
                    for function in self.augment:
                        x = function(x, keys)
            except MpitrainError as error:
                error.step = step
                raise
        pieces = ((i, a, b, a - bounds[0], b - bounds[0]) for i, a, b in zip(self.micro, bounds, bounds[1:]) if b > a)
        return [MicroBatch(x[p:q], y[p:q], rows[p:q], i, a, step) for i, a, b, p, q in pieces]

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[tuple[int, list[MicroBatch]]]:
        """(step, micro-batches) from `start_step` on, without end unless `stop_step` is given."""
        self.close()
        steps = count(start_step) if stop_step is None else range(start_step, stop_step)
        if self.workers == 0:
            for step in steps:
                yield step, self.load(step)
            return
        self._pool = pool = ThreadPoolExecutor(self.workers, "mpitrain-loader", initializer=use_pool)
        asked = ((step, pool.submit(self.load, step)) for step in steps)
        self._waiting.extend(islice(asked, self.depth))
        while self._waiting:
            step, future = self._waiting.popleft()
            yield step, future.result()
            self._waiting.extend(islice(asked, 1))

    def close(self) -> None:
        """End the threads; what they were reading is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._waiting.clear()
