"""The state of a run sent to another run, whose groups of ranks are alike: rank i of the one to rank i of the other.

    rank 0 of group A  --- values, m, v, running means, steps --->  rank 0 of group B
    rank 1 of group A  ------------------------------------------>  rank 1 of group B

Parameters, and each state of an optimizer, lie in one flat array a rank, so each is one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.checkpoint.kinds import Values
from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.errors import MeshError
from mpitrain.train.build.assembly import Job

MOST = 1 << 30                   # bytes of a message


def arrays_of(job: Job) -> list[Array]:
    """The arrays in which this rank keeps the run's state, in an order that is the same in all runs that are alike."""
    policy, optimizer = job.policy, job.state.optimizer
    values = policy.shards.values if policy.shards is not None and (policy.cuts_parameters or policy.masters) else policy.values
    flat = {"parameters": values} | ({} if optimizer is None else {f"{optimizer.prefix}/{one.kind}": one.flat
                                                                   for one in optimizer.held()})
    found: list[Array] = []
    for kind in job.state.kept:
        whole = flat.get(kind.prefix)
        if whole is not None and hasattr(whole, "dtype"):
            found.append(whole)
        else:                                                 # buffers, and what lies in parts
            found += [one.array for one in kind.placed()]
    return found


def numbers_of(job: Job) -> Iterator[tuple[Values, dict[str, np.ndarray[Any, Any]]]]:
    """The small arrays that all ranks of a run have alike; those of the data are no run's own."""
    for kind in job.state.kept:
        if isinstance(kind, Values) and kind.prefix != "data":
            yield kind, {name: np.array(value) for name, value in kind.get().items()}


def written(job: Job) -> None:
    """To be called when arrays have been written: drops what was made of the old ones."""
    job.policy.values_written()
    model = job.state.model
    model.round_parameters()
    for leaf in (*model.parameters(), *(buffer for _, buffer in model.named_buffers())):
        leaf.mark_changed()


class Exchange:
    """The ranks that have one place in their groups, connected; rank g of `between` is of group g. All ranks make one."""

    def __init__(self, world: Any, group: int, place: int):
        self.between, self.group = world.Split(place, group), group

    def agree(self, control: Objects, job: Job, what: str) -> None:
        """MeshError, on all ranks alike, unless this rank's run is like that of group 0: in its length, its mesh, and the shapes
        of its state. `what` names the run. It communicates."""
        mine = {"steps": job.plan.steps, "mesh": str(job.context.mesh)} | {
            name: list(shape) for name, shape in job.state.expected().items()}
        found = control.gather_objects([what, mine])
        with guard.symmetric():
            first, like = found[0]
            for other, theirs in found:
                for name in dict.fromkeys((*like, *theirs)):
                    if like.get(name) != theirs.get(name):
                        raise MeshError(f"runs that exchange weights are alike, and {other} has {name} = {theirs.get(name)}, "
                                        f"where {first} has {like.get(name)}; give all groups the same [model], [mesh], "
                                        "optimizer and number of steps")

    def send(self, job: Job, receivers: Sequence[int]) -> None:
        """Gives the state to runs of other groups, which `receive`."""
        arrays = [np.ascontiguousarray(asnumpy(array)).reshape(-1) for array in self._all(job)]
        waiting = [self.between.Isend(piece, dest=group, tag=tag) for group in receivers for tag, array in enumerate(arrays)
                   for piece in pieces(array)]
        for request in waiting:
            request.Wait()

    def receive(self, job: Job, sender: int) -> None:
        """Takes the state of a run of another group in the place of its own."""
        self._take(job, [self._received(array, sender, tag) for tag, array in enumerate(self._all(job))])

    def swap(self, job: Job, partner: int) -> list[np.ndarray[Any, Any]]:
        """Takes the state of another group's run, which takes this one's; returns this run's own, for `put_back`."""
        own = [asnumpy(array).reshape(-1).copy() for array in self._all(job)]
        theirs = [np.empty_like(array) for array in own]
        for tag, (mine, other) in enumerate(zip(own, theirs)):
            for out, into in zip(pieces(mine), pieces(other)):
                self.between.Sendrecv(out, dest=partner, sendtag=tag, recvbuf=into, source=partner, recvtag=tag)
        self._take(job, theirs)
        return own

    def put_back(self, job: Job, own: Sequence[np.ndarray[Any, Any]]) -> None:
        self._take(job, own)

    def close(self) -> None:
        """It communicates."""
        self.between.Free()

    def _all(self, job: Job) -> list[Array]:
        return [*arrays_of(job), *(array for _, numbers in numbers_of(job) for array in numbers.values())]

    def _received(self, like: Array, sender: int, tag: int) -> np.ndarray[Any, Any]:
        flat = np.empty(like.size, like.dtype)
        for piece in pieces(flat):
            self.between.Recv(piece, source=sender, tag=tag)
        return flat

    def _take(self, job: Job, flats: Sequence[np.ndarray[Any, Any]]) -> None:
        rest = iter(flats)
        for array in arrays_of(job):
            array[...] = array_module(array).asarray(next(rest)).reshape(array.shape)
        for kind, numbers in numbers_of(job):
            kind.put({name: next(rest).reshape(array.shape) for name, array in numbers.items()})
        written(job)


def pieces(flat: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The bytes of a flat array, whatever its format, in parts that MPI can count."""
    plain = flat.view(np.uint8)
    return [plain[start:start + MOST] for start in range(0, max(1, plain.size), MOST)]
