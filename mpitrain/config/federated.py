"""Validation of [workers], as far as keys alone tell."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.config.messages import Refusal
from mpitrain.config.sections import Config, keys_of
from mpitrain.config.topology import WorkersConfig

MOST_SPREAD = 50.0                       # The slowest of 10^12 workers takes exp(7 spread) seconds a step, and sums are finite.
PACE = ("in_flight", "buffer", "staleness", "discount", "spread")


def workers(config: Config) -> Iterator[Refusal]:
    """Keys that would change nothing, and speeds that are no numbers."""
    w = config.workers
    given = [key for key in keys_of("workers") if key != "count" and getattr(w, key) != getattr(WorkersConfig, key)]
    if given and not w.count:
        yield (f"workers.{given[0]} is there, and there is no federation; set workers.count to the number of its workers, or "
               f"leave workers.{given[0]} out", (f"workers.{given[0]}", "workers.count"))
    elif not w.arrival and (paced := [key for key in PACE if key in given]):
        yield (f"workers.{paced[0]} is for workers that do not wait for each other; set workers.arrival to \"simulated\" or "
               f'"recorded", or leave workers.{paced[0]} out', (f"workers.{paced[0]}", "workers.arrival"))
    elif w.spread > MOST_SPREAD:
        yield (f"workers.spread must be at most {MOST_SPREAD:g}, found {w.spread:g}: it is the standard deviation of the "
               "logarithms of speeds, and clocks would overflow", ("workers.spread",))
