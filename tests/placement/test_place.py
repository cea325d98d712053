"""What a placement says of ranks that are not there."""

from __future__ import annotations

from typing import Any

from meshes import gpt, mlp

from mpitrain.config import CommConfig, MeshConfig, TrainConfig
from mpitrain.placement.place import Placement, place
from mpitrain.schedules.grid import COPIES, REPLICAS, Grid


def placed(model: Any, lengths: dict[str, int], mesh: dict[str, Any] | None = None, **comm: Any) -> Placement:
    return place(model, Grid(lengths), MeshConfig(**(mesh or {})), TrainConfig(micro_batches=5), CommConfig(**comm))


def test_the_other_stages_have_the_other_blocks() -> None:
    p = placed(gpt(layers=3), {"pp": 2}, {"stages": (2, 4)})
    first, last = (p.at_stage(index) for index in range(2))
    assert first.stage.bounds == last.stage.bounds == [0, 2, 6] and last.grid.rank == 1 and last.stage.is_last
    names = [name for stage in (first, last) for name, _ in stage.stage.model.named_parameters()]
    assert len(set(names)) == len(names) and "head.weight" in names, "each block's own, twins too"


def test_a_place_has_its_share_of_micro_batches_and_the_largest_is_known() -> None:
    p = placed(mlp(), {"dp": 2})
    assert p.own_micro_batches == (0, 2) and p.rounds == 3 and p.tree is None and p.part is None


def test_gradients_of_experts_are_added_up_over_fewer_axes_and_share_no_bucket_with_others() -> None:
    p = placed(gpt(heads=2, experts=4), {"dp": 2, "ep": 2})
    layout = p.layout()
    assert {p.sums_over(s.parameter) for s in layout.segments} == {REPLICAS, COPIES}
    for bucket in p.buckets(layout):
        assert len({p.sums_over(s.parameter) for s in bucket.segments}) == 1


def test_of_a_users_own_policy_nothing_is_known_to_be_cut() -> None:
    assert placed(mlp(), {"dp": 2}, sharding="own.py:policy").kind == "none"
    assert placed(mlp(), {"dp": 2}, sharding="gradients").kind == "gradients"
    assert placed(mlp(), {"tp": 2}, sharding="gradients").kind == "none", "no rank has a copy"
