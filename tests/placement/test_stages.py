"""Where a model is cut, and what cannot be cut; without MPI."""

from __future__ import annotations

from itertools import combinations

import pytest

from mpitrain import nn
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MeshError
from mpitrain.placement.stages import balanced, cut, find_bounds
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.validate import check_schedule


def model(n: int) -> nn.Sequential:
    return nn.Sequential(*((f"block{i}", nn.Linear(2, 2)) for i in range(n)))


def test_every_block_is_on_one_stage_in_order_and_parameters_keep_their_names() -> None:
    whole = model(7)
    for n_stages, chunks in ((1, 1), (2, 1), (3, 1), (7, 1), (2, 3)):
        held = [cut(whole, index, n_stages, chunks) for index in range(n_stages)]
        blocks = [block for v in range(n_stages * chunks) for block in
                  (held[v % n_stages].chunks[v // n_stages].blocks if n_stages > 1 else whole.blocks)]
        assert blocks == list(whole.blocks)
        names = [name for stage in held for name, _ in stage.model.named_parameters()]
        assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
        assert [stage.is_last for stage in held] == [False] * (n_stages - 1) + [True]


def test_a_schedule_that_is_no_function_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"must be a function of \(stage, n_stages, n_micro\) .* found 3 \(int\)"):
        check_schedule(Config(), Grid({}), 3, 4)                        # type: ignore[arg-type]


def test_stages_in_words() -> None:
    assert cut(model(5), 0, 2).describe(1) == "stage 1 (block2 .. block4)"
    assert cut(model(4), 0, 2, 2).describe(2) == "stage 0, chunk 1 (block2)"


@pytest.mark.parametrize(("n_blocks", "n_stages", "chunks", "counts", "words"), [
    (3, 4, 1, (), "mesh.pp=4 needs 4 blocks at least, and the model has 3; set mesh.pp=3"),
    (5, 2, 3, (), "mesh.pp=2 x mesh.chunks=3 needs 6 blocks at least, and the model has 5; set mesh.chunks=2"),
    (3, 2, 1, (1, 1), r"mesh.stages = \[1, 1\] must be 2 numbers of blocks, 1 or more each, that add up to the 3 blocks"),
    (3, 2, 1, (1, 1, 1), "must be 2 numbers"), (3, 2, 1, (0, 3), "1 or more each"), (8, 2, 2, (4, 4), "must be 4 numbers")])
def test_what_cannot_be_cut_so_is_told_in_numbers(n_blocks: int, n_stages: int, chunks: int, counts: tuple[int, ...],
                                                   words: str) -> None:
    with pytest.raises((MeshError, ConfigError), match=words):
        find_bounds(n_blocks, n_stages, chunks, counts)


def test_a_model_that_is_no_sequence_of_blocks_cannot_be_cut() -> None:
    with pytest.raises(MeshError, match="this one is a Linear; return an nn.Sequential of blocks, or set mesh.pp=1"):
        cut(nn.Linear(2, 2), 0, 2)


@pytest.mark.parametrize("costs", [[1.0] * 7, [5, 1, 1, 1, 1, 1], [1, 1, 1, 9], [0.0, 0.0, 3, 0.0], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_the_dearest_part_costs_the_least_that_any_cut_can_have(costs: list[float]) -> None:
    for parts in range(1, len(costs) + 1):
        found = balanced(costs, parts)
        assert sum(found) == len(costs) and min(found) >= 1 and len(found) == parts

        def dearest(bounds: tuple[int, ...]) -> float:
            return max(sum(costs[a:b]) for a, b in zip((0, *bounds), (*bounds, len(costs))))
        cuts = tuple(sum(found[:i]) for i in range(1, parts))
        assert dearest(cuts) == min(map(dearest, combinations(range(1, len(costs)), parts - 1)))
