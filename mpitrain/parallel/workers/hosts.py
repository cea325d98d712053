"""Arrays of workers, which follow them from rank to rank: a worker trains where the round seats it.

    round 4   worker 17 on rank 2: its array is made there, and stays
    round 9   worker 17 on rank 0: rank 2 sends it, and forgets it

All ranks know where every array is, since they know everyone's seats. After a resume each lies with the rank that has it by its
number (`home`), on any number of ranks. A worker that has none yet stands for zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.messages.link import Link
from mpitrain.data.rounds import Rounds
from mpitrain.schedules.microtree import share


class Hosted:
    """One flat array of `length` for each worker that has been here: `arrays` by worker, those on this rank."""

    def __init__(self, rounds: Rounds, link: Link, length: int, dtype: Any, what: str):
        self.rounds, self.link, self.length, self.dtype, self.what = rounds, link, length, dtype, what
        self.arrays: dict[int, Array] = {}
        self.places: dict[int, int] = {}                      # of workers that have an array: the rank that holds it
        n = link.size
        self._rank_of_seat = [rank for rank in range(n) for _ in range(*share(rank, n, rounds.seats))]

    def home(self, worker: int) -> int:
        """The rank that a worker's array is read by from a checkpoint."""
        return worker * self.link.size // self.rounds.draw.count

    def ranks(self, round: int) -> dict[int, int]:
        """The rank on which each worker of a round trains."""
        arrived = self.rounds.draw.arrived(round)
        return {int(arrived[place]): self._rank_of_seat[seat]
                for seat, places in enumerate(self.rounds.seated(len(arrived))) for place in places}

    def gather(self, round: int) -> None:
        """Brings the arrays of a round's workers to the ranks where they train. All ranks call it; it communicates."""
        coming, leaving = {}, []
        for worker, rank in self.ranks(round).items():
            held = self.places.get(worker, rank)
            if held == rank:
                continue
            what = f"{self.what} of worker {worker}"
            if rank == self.link.rank:
                coming[worker] = self.link.receive((self.length,), self.dtype, held, worker, what)
            elif held == self.link.rank:
                leaving.append(self.link.send(self.arrays.pop(worker), rank, worker, what))
            self.places[worker] = rank
        for worker, message in coming.items():
            message.wait()
            self.arrays[worker] = message.array
        for message in leaving:
            message.wait()

    def keep(self, round: int, changed: dict[int, Array]) -> None:
        """Takes new arrays of this rank's workers of a round. All ranks call it, since all note where arrays are."""
        self.arrays |= changed
        self.places |= self.ranks(round)

    def restore(self, arrays: dict[int, Array], workers: list[int]) -> None:
        """Goes on with `arrays`, those of `workers` whose home this rank is."""
        self.arrays, self.places = arrays, {worker: self.home(worker) for worker in workers}

    @property
    def nbytes(self) -> int:
        """Of the arrays on this rank."""
        return sum(array.nbytes for array in self.arrays.values())


def zeros_of(hosted: Hosted, worker: int) -> Array:
    """The worker's array on this rank; fresh zeros where it has none yet."""
    found = hosted.arrays.get(worker)
    return np.zeros(hosted.length, hosted.dtype) if found is None else found
