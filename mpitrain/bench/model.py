"""What an all-reduce costs on a machine of three numbers: the closed forms of ring and recursive doubling.

    n ranks, S bytes        ring                                            recursive doubling, n a power of two
                            2 (n-1) (alpha + S/n beta) + (n-1) S/n gamma    log2(n) (alpha + S beta + S gamma)

(Thakur, Rabenseifner, Gropp, 2005.) Off powers of two, recursive doubling begins with one exchange with reduction and ends with
one without.
"""

from __future__ import annotations

from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.schedules.collectives import recursive_doubling, ring
from mpitrain.schedules.steps import Algorithm


class Machine(NamedTuple):
    """Seconds to start a message, seconds to carry a byte, seconds to add up a byte."""

    alpha: float
    beta: float
    gamma: float


def simulate(algorithm: Algorithm, n: int, length: int, itemsize: int, machine: Machine) -> float:
    """Predicted seconds of an all-reduce of `length` elements; linear in the machine's three numbers."""
    nbytes, (alpha, beta, gamma) = length * itemsize, machine
    if algorithm is ring:
        part = nbytes / n
        return 2 * (n - 1) * (alpha + part * beta) + (n - 1) * part * gamma
    if algorithm is recursive_doubling:
        levels = n.bit_length() - 1
        folds = 1 if n > 1 << levels else 0
        return (levels + 2 * folds) * (alpha + nbytes * beta) + (levels + folds) * nbytes * gamma
    raise ConfigError(f"no cost is known of {algorithm}; it is for ring and recursive_doubling")
