"""Finds the machine under which simulated collectives take the times that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.schedules.simulate import Machine, finish_times
from mpitrain.schedules.steps import Algorithm

ITERATIONS = 20
# Starts with sums that cost less than messages, and with sums that cost more: the longest way depends on which hides behind the
# other. From the first start alone 4 of 60 random machines were missed (all with gamma > 2 beta), from these none.
STARTS = [Machine(alpha=1e-6, beta=2e-10, gamma=2e-10 * ratio) for ratio in (0.25, 1.0, 4.0, 16.0)]


class Sample(NamedTuple):
    """One measurement: n ranks needed `seconds` for arrays of `nbytes` bytes; the interpreter ran the rounds, or something else
    did."""

    algorithm: Algorithm
    n: int
    nbytes: int
    seconds: float
    interpreted: bool = True


def fit(samples: Sequence[Sample], itemsize: int = 4) -> Machine:
    """The alpha, beta, gamma >= 0 with the least sum of squared relative errors: ((simulated - measured) / measured)^2.

    A simulated time is alpha times the messages, beta times the bytes sent and gamma times the bytes added up along the
    longest way to the end. For given ways that is linear least squares; the new machine may have other longest ways, so it is
    repeated until they stay, from several starts, and the best machine met is returned. ConfigError for samples that leave a
    constant undetermined.
    """
    samples = [Sample(*sample) for sample in samples]         # A caller may give plain tuples.
    for sample in samples:
        if not sample.seconds > 0:
            raise ConfigError(f"a sample of {sample.n} ranks and {sample.nbytes} bytes took {sample.seconds} seconds; "
                              f"measured times are above 0")
    return min((met for start in STARTS for met in improve(start, samples, itemsize)), key=lambda met: met[0])[1]


def improve(machine: Machine, samples: Sequence[Sample], itemsize: int) -> Iterator[tuple[float, Machine]]:
    """Machines and their errors, from `machine` on until the longest ways repeat."""
    seconds = np.array([sample.seconds for sample in samples])
    seen: list[list[tuple[int, int, int]]] = []
    for _ in range(ITERATIONS):
        ways = [max(finish_times(s.algorithm, s.n, -(-s.nbytes // itemsize), itemsize, machine)) for s in samples]
        yield float(((np.array([way.seconds for way in ways]) / seconds - 1) ** 2).sum()), machine
        counts = [(way.messages, way.sent, way.added) for way in ways]
        if counts in seen:
            return
        seen.append(counts)
        alpha, beta, gamma = least_squares(np.array(counts, np.float64), seconds)
        machine = Machine(alpha, beta, gamma)


def fit_interpreted(samples: Sequence[Sample], itemsize: int = 4) -> tuple[Machine, float, float]:
    """`fit`, with two constants more: (the machine, the interpreter's seconds of a collective, those of a message).

    Samples that the interpreter did not run have neither. Without any such sample its part of a message cannot be told from
    alpha, which has it then. ConfigError as of `fit`.
    """
    samples = [Sample(*sample) for sample in samples]
    apart = not all(sample.interpreted for sample in samples)
    seconds, mine = np.array([s.seconds for s in samples]), np.array([float(s.interpreted) for s in samples])
    best, found = np.inf, (fit(samples, itemsize), 0.0, 0.0)
    for start in STARTS:
        machine, of_message = start, 0.0
        for _ in range(ITERATIONS):
            ways = [max(finish_times(s.algorithm, s.n, -(-s.nbytes // itemsize), itemsize,
                                     machine._replace(alpha=machine.alpha + of_message * s.interpreted))) for s in samples]
            counts = np.array([(way.messages, way.sent, way.added) for way in ways], np.float64)
            columns = [counts, mine[:, None], *([(mine * counts[:, 0])[:, None]] if apart else [])]
            matrix = np.concatenate(columns, axis=1)
            constants = non_negative(matrix, seconds)
            error = float(((matrix @ constants / seconds - 1) ** 2).sum())
            alpha, beta, gamma = constants[:3]
            machine, of_message = Machine(alpha, beta, gamma), constants[4] if apart else 0.0
            if error >= best * (1 - 1e-9):
                break
            best, found = error, (machine, constants[3], of_message)
    return found


def least_squares(counts: Any, seconds: Any) -> list[float]:
    """The alpha, beta, gamma >= 0 nearest to the samples. ConfigError where these leave one undetermined."""
    rows = counts / seconds[:, None]
    scale = np.sqrt((rows**2).sum(axis=0))
    rank = np.linalg.matrix_rank(rows / np.where(scale > 0, scale, 1.0), tol=1e-6)
    if rank < 3:
        raise ConfigError(f"{len(seconds)} samples do not tell alpha, beta and gamma apart (rank {rank} of 3); "
                          f"measure at least two all-reduce algorithms, each on small and on large arrays")
    return non_negative(counts, seconds)


def non_negative(counts: Any, seconds: Any) -> list[float]:
    """The x >= 0 with the least |counts x / seconds - 1|: the best of the least squares over each set of columns.

    The non-negative optimum is the unrestricted one over the columns in which it is positive, so trying all sets (7 for 3
    columns) finds it. Columns are scaled to one size first: messages are a few, bytes are millions.
    """
    rows, columns = counts / seconds[:, None], counts.shape[1]
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0.0] = 1.0
    best, found = float(len(seconds)), np.zeros(columns)
    for chosen in chain.from_iterable(combinations(range(columns), count) for count in range(1, columns + 1)):
        weighted = rows[:, chosen] / scale[list(chosen)]
        solution = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)[0]
        error = float(((weighted @ solution - 1) ** 2).sum())
        if solution.min() >= 0 and error < best:
            best, found = error, np.zeros(columns)
            found[list(chosen)] = solution
    return [float(value) for value in found / scale]
