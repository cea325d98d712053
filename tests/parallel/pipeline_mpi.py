"""A model cut into stages computes what one rank computes, to the bit: every schedule, kind of model and way of cutting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import cut_models
import pytest
from cut_models import Result, train

from mpitrain import nn
from mpitrain.errors import DesyncError
from mpitrain.schedules.pipeline import SCHEDULES, Action

MODELS = {"gpt": cut_models.gpt, "mlp": cut_models.mlp, "convolutional": cut_models.convolutional, "lenet": cut_models.lenet}


@cache
def alone(kind: str, **options: Any) -> Result:
    from mpi4py import MPI
    return train(MPI.COMM_SELF, kind, MODELS[kind](), **options)


def same(comm: Any, kind: str, *, cut: dict[str, Any] | None = None, pp: int = 0, **options: Any) -> None:
    """The bits of one rank, whatever `cut` says about stages; `options` are for both."""
    found = train(comm, kind, MODELS[kind](), pp=pp or comm.size, **options, **(cut or {}))
    assert found == alone(kind, **options)


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_has_the_bits_of_one_rank(comm: Any, kind: str) -> None:
    same(comm, kind, reproducible="layout")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_every_schedule_has_the_bits_of_one_rank(comm: Any, schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" and comm.size > 1 else 1
    for kind in ("gpt", "convolutional"):
        same(comm, kind, reproducible="layout", cut={"schedule": "1f1b" if comm.size == 1 else schedule, "chunks": chunks})


def test_without_the_mode_a_pipeline_of_one_copy_adds_in_the_same_order_too(comm: Any) -> None:
    same(comm, "convolutional")
    same(comm, "mlp", cut={"schedule": "zb_h1"})


def test_stages_and_data_parallel_ranks_together_have_the_bits_of_one_rank(comm: Any) -> None:
    if comm.size % 2:
        pytest.skip("pp = 2 wants an even number of ranks")
    for kind in ("gpt", "convolutional"):
        same(comm, kind, pp=2, reproducible="layout", micro_batches=8)
    if comm.size > 2:
        same(comm, "convolutional", pp=2, reproducible="layout", micro_batches=8, cut={"schedule": "interleaved", "chunks": 2})


def test_a_cut_by_hand_and_stages_of_one_block_change_nothing(comm: Any) -> None:
    counts = [len(cut_models.gpt()) - comm.size + 1] + [1] * (comm.size - 1)
    for stages in (counts, counts[::-1], "time"):
        same(comm, "gpt", reproducible="layout", cut={"stages": stages})


@pytest.mark.parametrize("micro_batches", [1, 3, 16])
def test_any_number_of_micro_batches_and_a_short_last_batch(comm: Any, micro_batches: int) -> None:
    """24 rows in batches of 16: the second has 8, so that some of 16 micro-batches have no rows."""
    for schedule in ("1f1b", "zb_h1"):
        same(comm, "mlp", reproducible="layout", rows=24, micro_batches=micro_batches, cut={"schedule": schedule})


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_recomputed_blocks_change_nothing(comm: Any, schedule: str) -> None:
    found = train(comm, "gpt", MODELS["gpt"](), pp=comm.size, reproducible="layout", recompute=True,
                  schedule=schedule)
    assert found == alone("gpt", reproducible="layout")


def test_dropout_has_the_mask_of_its_place_in_the_model(comm: Any) -> None:
    chunks = 2 if comm.size > 1 else 1
    cut = {"schedule": "interleaved", "chunks": 2} if chunks > 1 else {}
    from mpi4py import MPI
    wanted = train(MPI.COMM_SELF, "gpt", cut_models.gpt(0.3), reproducible="layout")
    assert train(comm, "gpt", cut_models.gpt(0.3), pp=comm.size, reproducible="layout", **cut) == wanted
    assert wanted.losses != alone("gpt", reproducible="layout").losses


def test_the_check_can_fail(comm: Any) -> None:
    """Another number of micro-batches adds in another order; one more row is another loss."""
    one = alone("mlp", reproducible="layout", micro_batches=3)
    found = train(comm, "mlp", MODELS["mlp"](), pp=comm.size, reproducible="layout", micro_batches=5)
    assert found.hashes["parameters_sha256"] != one.hashes["parameters_sha256"]
    assert found.losses == pytest.approx(one.losses, rel=1e-5) and found.metrics == pytest.approx(one.metrics, rel=1e-5)


def backwards_late(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """A schedule of one's own: forwards in pairs, then their backwards."""
    for first in range(0, n_micro, 2):
        both = range(first, min(first + 2, n_micro))
        yield from (Action("F", micro) for micro in both)
        yield from (Action("B", micro) for micro in both)


def test_a_schedule_of_ones_own_has_the_same_bits(comm: Any) -> None:
    same(comm, "gpt", reproducible="layout", cut={"schedule": backwards_late})


def test_a_schedule_that_is_not_the_same_on_all_ranks_is_refused(comm: Any) -> None:
    """Each rank's would be proved, and together they would wait for each other."""
    def own(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
        return (SCHEDULES["gpipe"] if comm.rank else backwards_late)(stage, n_stages, n_micro)

    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(DesyncError, match="ranks disagree about the actions of the schedule own"):
        train(comm, "mlp", MODELS["mlp"](), pp=comm.size, schedule=own)


def test_one_layer_in_several_blocks_is_trained_as_on_one_rank(comm: Any) -> None:
    """Its parameters are in the norm and in what is saved, and each use has a mask of its own."""
    from mpi4py import MPI
    for mode in ("layout", "run"):
        results = []
        for ranks in (MPI.COMM_SELF, comm):
            layer, drop = nn.Linear(12, 12), nn.Dropout(0.3)
            blocks = [(f"{kind}{i}", block) for i in range(4) for kind, block in (("use", layer), ("drop", drop))]
            model = nn.Sequential(*blocks, ("head", nn.Linear(12, 5)))
            results.append(train(ranks, "mlp", model, pp=ranks.size, reproducible=mode, clip_norm=0.02))
        alone, found = results
        assert found.losses == pytest.approx(alone.losses, rel=1e-6) and found.norm == pytest.approx(alone.norm, rel=1e-6)
        assert mode == "run" or found == alone


class Stop(nn.Module):
    """Passes nothing back: what comes before it takes no part in training."""

    def forward(self, x: Any) -> Any:
        return x.detach()


def test_blocks_that_no_gradient_reaches_stay_as_they_are(comm: Any) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(*((f"before{i}", nn.Linear(12, 12)) for i in range(4)), ("stop", Stop()),
                             *((f"after{i}", nn.Linear(12, 12)) for i in range(4)))
    from mpi4py import MPI
    for schedule in ("1f1b", "zb_h1"):
        found = train(comm, "mlp", model(), pp=comm.size, reproducible="layout", schedule=schedule)
        assert found == train(MPI.COMM_SELF, "mlp", model(), reproducible="layout")
