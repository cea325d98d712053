"""Copies that nodes share, and copies that ranks have of parts: the first rank of a node answers for its copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from meshes import job, mlp
from node_cut_mpi import nodes

from mpitrain.errors import DesyncError
from mpitrain.train import Job
from mpitrain.train.observers.agreement import Agreement
from mpitrain.train.observers.observer import Watched


def agreement(found: Job, comm: Any) -> Agreement:
    """An observer of a run that is about to start."""
    made = Agreement(found.state, found.channel)
    made.begin(Watched(comm.rank, comm.size, 0, found.plan, None, print))
    made.before_checkpoint(1)
    return made


def flip(found: Job, parameter: int = 0) -> None:
    found.policy.layout.segments[parameter].parameter.array.reshape(-1)[:1].view(np.uint32)[...] ^= 4


@pytest.mark.promise("D2")
def test_the_copies_of_nodes_are_compared_with_each_other(comm: Any) -> None:
    if comm.size != 4:
        pytest.skip("two nodes of two ranks")
    with nodes(comm, 2), job(comm, mlp, {}, node_shared=True) as found:
        compared = agreement(found, comm)
        comm.Barrier()
        if comm.rank == 3:                                    # the second node has one copy, whoever of it writes there
            flip(found)
        comm.Barrier()
        with pytest.raises(DesyncError, match=r"^step=2: ranks 0, 2 \(.*\) have different bits in the parameter"):
            compared.before_checkpoint(2)


@pytest.mark.promise("D2")
def test_a_difference_is_found_on_all_ranks_alike_and_a_single_copy_has_none(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("a copy needs another")
    for shared in (False, True):
        with job(comm, mlp, {}, node_shared=shared) as found:
            compared = agreement(found, comm)
            comm.Barrier()
            if comm.rank == comm.size - 1:
                flip(found)
            comm.Barrier()
            if shared:
                compared.before_checkpoint(2)
                continue
            who = r"ranks 0, 1 \(.*\) have different bits" if comm.size == 2 else rf"rank {comm.size - 1} \(.*\) has other bits"
            with pytest.raises(DesyncError, match=f"^step=2: {who}") as caught:
                compared.before_checkpoint(2)
            assert "all ranks agreed after step 1" in caught.value.message
