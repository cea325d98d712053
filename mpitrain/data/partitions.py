"""Partitions: which rows belong to which worker of a federation, as a function of (labels, count, worker, seed) alone.

    iid             every worker a random part of the rows, of equal size
    shards:2        rows in the order of their labels, cut into 2 shards a worker, which are dealt out (McMahan et al., 2017)
    dirichlet:0.1   equally many rows for each worker, its classes in proportions drawn from Dirichlet(0.1, ..., 0.1)
                    (Hsu, Qi and Brown, 2019)
    sizes:1.0       random parts of log-normal sizes, whose logarithms have this standard deviation
    column:NAME     a worker for each value of another column of the data
    file.py:mine    mine(labels, count, worker, seed) -> the rows of that worker

Every row belongs to one worker. Draws come from NumPy's legacy generator, whose streams are the same in all versions: a run that
goes on after an update of NumPy finds its workers' rows where they were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.keyed import key, permute
from mpitrain.errors import ConfigError

Labels = NDArray[np.int64]               # (n,), of the training rows in their order; -1 where targets are no classes
Owners = NDArray[np.int64]               # (n,), the worker of each training row
Own = Callable[[Labels, int, int, int], Any]

NO_CLASS = -1
KEY = "workers.rows"


class Partition(ABC):
    """A rule, made of what stands behind the colon of its name ("" where there is nothing)."""

    needs_labels: ClassVar[bool] = False

    @abstractmethod
    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        """The worker of each of the n = len(labels) rows, 0 <= worker < count <= n."""

    def __call__(self, labels: Labels, count: int, worker: int, seed: int) -> NDArray[np.int64]:
        """The rows of one worker, ascending."""
        return np.flatnonzero(self.owners(labels, count, seed) == worker)


class Iid(Partition):
    def __init__(self, text: str = ""):
        refuse_argument("iid", text)

    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        return dealt(shuffled(len(labels), key(seed, "iid")), equal_sizes(len(labels), count))


class Sizes(Partition):
    """Worker k has a share exp(s z_k) of the rows, z_k standard normal, and one row at least."""

    def __init__(self, text: str = ""):
        self.spread = number_of("sizes", text, "the standard deviation of the logarithms of sizes")

    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        drawn = stream(seed, "sizes").standard_normal(count)
        shares = np.exp(self.spread * (drawn - drawn.max()))          # the largest is 1, so that none overflows
        return dealt(shuffled(len(labels), key(seed, "sizes order")), rounded_shares(shares, len(labels)))


class Shards(Partition):
    needs_labels = True

    def __init__(self, text: str = ""):
        self.each = int(text) if text.isdecimal() else 0
        if self.each < 1:
            raise ConfigError(f'{KEY} = "shards:{text}" cuts so many shards for each worker, a whole number of 1 or more, found '
                              f'"{text}"; set it to "shards:2"')

    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        n, shards = len(labels), count * self.each
        if shards > n:
            raise ConfigError(f'{KEY} = "shards:{self.each}" cuts {shards} shards for {count} workers, and there are {n} '
                              f"training rows; set fewer shards, or workers.count to {n // self.each} or less")
        mixed = shuffled(n, key(seed, "shards order"))
        by_label = mixed[np.argsort(labels[mixed], kind="stable")]
        sizes = equal_sizes(n, shards)
        owner_of_shard = np.empty(shards, np.int64)
        owner_of_shard[shuffled(shards, key(seed, "shards"))] = np.repeat(np.arange(count), self.each)
        found = np.empty(n, np.int64)
        found[by_label] = np.repeat(owner_of_shard, sizes)
        return found


class Dirichlet(Partition):
    """Each worker draws its proportions of the classes, then its rows by them, out of those that nobody has: so the last ones to
    draw get what is left. They draw in a random order."""

    needs_labels = True

    def __init__(self, text: str = ""):
        self.alpha = number_of("dirichlet", text, "the concentration of the classes' proportions")

    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        n = len(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        mixed = shuffled(n, key(seed, "dirichlet order"))
        of_class = [mixed[codes[mixed] == c] for c in range(len(classes))]
        left = np.array([len(rows) for rows in of_class], np.int64)
        draws, found, sizes = stream(seed, "dirichlet"), np.empty(n, np.int64), equal_sizes(n, count)
        for worker in shuffled(count, key(seed, "dirichlet turns")):
            wanted = self.counts(draws, int(sizes[worker]), left)
            for c, number in enumerate(wanted):
                found[of_class[c][left[c] - number:left[c]]] = worker
            left -= wanted
        return found

    def proportions(self, draws: np.random.RandomState, classes: int) -> NDArray[np.float64]:
        """Out of Dirichlet(alpha, ..., alpha); where alpha is so small that all gammas are 0, its limit: one class alone."""
        drawn = draws.standard_gamma(self.alpha, classes)
        only = draws.randint(classes)
        total = drawn.sum()
        found: NDArray[np.float64] = drawn / total if total > 0 else np.eye(classes)[only]
        return found

    def counts(self, draws: np.random.RandomState, size: int, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of `size` rows are of each class, of which `left` are left."""
        wanted, found = self.proportions(draws, len(left)), np.zeros(len(left), np.int64)
        while (missing := size - int(found.sum())) > 0:
            open_ = np.where(found < left, wanted, 0.0)
            if not open_.sum() > 0:                           # its classes are used up: as the rows that are left
                open_ = (left - found).astype(np.float64)
            found += draws.multinomial(missing, open_ / open_.sum())
            np.minimum(found, left, out=found)
        return found


class ByColumn(Partition):
    """The worker of a row is its value's place among the sorted values of `column`, which stands beside the data."""

    def __init__(self, text: str = ""):
        self.name = text
        self.values: NDArray[Any] | None = None               # (n,), of the training rows: whoever opens the data sets it
        if not text:
            raise ConfigError(f'{KEY} = "column:" names no column; set it to "column:NAME"')

    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        assert self.values is not None
        distinct, found = np.unique(self.values, return_inverse=True)
        if len(distinct) != count:
            raise ConfigError(f'{KEY} = "column:{self.name}" has {len(distinct)} different values in the training rows, each of '
                              f"which is a worker, and workers.count = {count}; set it to {len(distinct)}")
        owners: Owners = found.astype(np.int64)
        return owners


class OfUser(Partition):
    """A user's own function of (labels, count, worker, seed). ConfigError for rows that are none, or that two workers have."""

    def __init__(self, function: Own, name: str):
        self.function, self.name = function, name

    def owners(self, labels: Labels, count: int, seed: int) -> Owners:
        found, what = np.full(len(labels), -1, np.int64), f'{KEY} = "{self.name}"'
        for worker in range(count):
            try:
                rows = np.asarray(self.function(labels.copy(), count, worker, seed))
            except Exception as error:
                raise ConfigError(f"{what}, asked for the rows of worker {worker}, raised {type(error).__name__}: "
                                  f"{error}") from error
            if rows.ndim != 1 or rows.size and rows.dtype.kind not in "iu":
                raise ConfigError(f"{what} must give whole numbers, the rows of a worker, found {rows.dtype} of shape "
                                  f"{rows.shape} for worker {worker}")
            rows = rows.astype(np.int64)
            if rows.size and not 0 <= rows.min() <= rows.max() < len(labels):
                wrong = rows.min() if rows.min() < 0 else rows.max()
                raise ConfigError(f"{what} gives worker {worker} the row {wrong}; there are {len(labels)} training rows, counted "
                                  "from 0")
            if len(np.unique(rows)) < rows.size or (found[rows] >= 0).any():
                twice = int(next(row for row in rows if found[row] >= 0 or (rows == row).sum() > 1))
                other = f"worker {found[twice]} has already" if found[twice] >= 0 else "it has twice"
                raise ConfigError(f"{what} gives worker {worker} the row {twice}, which {other}; a row belongs to one worker")
            found[rows] = worker
        if (found < 0).any():
            raise ConfigError(f"{what} gives no worker the row {int((found < 0).argmax())}, nor {(found < 0).sum() - 1} others; "
                              "each row belongs to a worker; leave rows out of the data that nobody should have")
        return found


def rows_of_workers(partition: Partition, labels: Labels, count: int, seed: int) -> list[NDArray[np.int64]]:
    """The rows of each worker, ascending. ConfigError for more workers than rows, and for a worker without any."""
    n = len(labels)
    if count > n:
        raise ConfigError(f"workers.count = {count} is more than the {n} training rows, so some workers would have none; set it "
                          f"to {n} or less")
    if partition.needs_labels and (labels == NO_CLASS).any():
        name = type(partition).__name__.lower()
        raise ConfigError(f'{KEY} = "{name}:..." is of classes, a label of 0 or more for each row, and the targets of these data '
                          'are none; set it to "iid" or "sizes:1.0"')
    owners = partition.owners(labels, count, seed)
    sizes = np.bincount(owners, minlength=count).astype(np.int64)
    if not sizes.all():
        raise ConfigError(f"{KEY} gives worker {int(sizes.argmin())} no row; give each worker one, or set workers.count to "
                          f"{int((sizes > 0).sum())}")
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(sizes)[:-1])


def digest(rows: Sequence[NDArray[np.int64]]) -> str:
    """SHA-256 of who has which rows: ranks compare it, and a run that goes on."""
    found = sha256()
    for worker, own in enumerate(rows):
        found.update(f"{worker} {len(own)}\n".encode() + np.ascontiguousarray(own, "<i8").tobytes())
    return found.hexdigest()


def shuffled(n: int, base: int) -> NDArray[np.int64]:
    """0 .. n-1 in a keyed order."""
    return permute(np.arange(n, dtype=np.int64), n, base)


def stream(seed: int, name: str) -> np.random.RandomState:
    number = key(seed, "partition", name)
    return np.random.RandomState([number & 0xFFFFFFFF, number >> 32])


def equal_sizes(n: int, parts: int) -> NDArray[np.int64]:
    """n as `parts` whole numbers that differ by one at most."""
    bounds = np.arange(parts + 1, dtype=np.int64) * n // parts
    return np.diff(bounds)


def rounded_shares(shares: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    """n as whole numbers in about these proportions, 1 or more each: largest remainders."""
    free = n - len(shares)
    exact = shares / shares.sum() * free
    found = np.floor(exact).astype(np.int64)
    more = np.argsort(found - exact, kind="stable")[:free - int(found.sum())]
    found[more] += 1
    sizes: NDArray[np.int64] = found + 1
    return sizes


def dealt(rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> Owners:
    """Worker 0 gets the first sizes[0] of `rows`, worker 1 the next, ..."""
    found = np.empty(len(rows), np.int64)
    found[rows] = np.repeat(np.arange(len(sizes)), sizes)
    return found


def refuse_argument(name: str, text: str) -> None:
    if text:
        raise ConfigError(f'{KEY} = "{name}:{text}" takes nothing behind the name; set it to "{name}"')


def number_of(name: str, text: str, meaning: str) -> float:
    """A positive, finite number; ConfigError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f'{KEY} = "{name}:{text}" needs {meaning}, a number above 0, found "{text}"; set it to "{name}:1.0" if '
                          "in doubt")
    return value
