"""How many threads a rank gets, and what is said where there are more of them than cores."""

from __future__ import annotations

import os

import pytest
from runs import record, train, write
from threadpoolctl import threadpool_info, threadpool_limits

from mpitrain.kernels.product import one_thread
from mpitrain.train.machine import threads
from mpitrain.train.machine.threads import Place, chosen, crowded, granted_cores, pin, share


def ranks(*cores: tuple[int, ...], limit: float = 0.0) -> list[Place]:
    return [Place("node7", bound, limit) for bound in cores]


EIGHT = tuple(range(8))


@pytest.mark.parametrize(("node", "wanted"), [
    (ranks(EIGHT), 8),                                            # alone, not bound
    (ranks(EIGHT, EIGHT), 4),                                     # two unbound ranks share all
    (ranks(EIGHT, EIGHT, EIGHT), 2),
    (ranks(*[EIGHT] * 20), 1),                                    # more ranks than cores
    (ranks((0, 1, 2, 3), (4, 5, 6, 7)), 4),                       # bound: each has its own
    (ranks((4, 5), *[(4, 5)] * 3), 1),                            # a cpuset of two cores for four ranks: not two each
    (ranks((0, 1, 2, 3), (2, 3, 4, 5)), 3),                       # half of what they have in common
    (ranks((0, 1, 2), (0, 1, 2), (0, 1, 2)), 1),                  # thirds add up to a whole
    (ranks(EIGHT, limit=3.5), 3),                                 # a control group grants less than the cores
    (ranks(EIGHT, EIGHT, limit=3.5), 1),
    (ranks(EIGHT, limit=0.5), 1),
    (ranks((0,), limit=16.0), 1)])
def test_a_rank_gets_its_part_of_the_cores_bound_to_it(node: list[Place], wanted: int) -> None:
    assert share(node) == wanted
    assert wanted == 1 or wanted * len(node) <= len({core for place in node for core in place.cores})


@pytest.mark.parametrize(("environment", "wanted"), [
    ({}, 0), ({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}, 2),
    ({"MKL_NUM_THREADS": "5", "OMP_NUM_THREADS": "3"}, 5), ({"OMP_NUM_THREADS": "4,2"}, 4), ({"OMP_NUM_THREADS": "many"}, 0),
    ({"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "2"}, 2)])
def test_a_library_s_own_variable_goes_before_that_of_all(environment: dict[str, str], wanted: int) -> None:
    assert chosen(environment) == wanted


def test_pinning_takes_the_configuration_then_the_environment_then_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(None):
        assert pin(0, ranks((0, 1), (0, 1))) == 1
        assert {pool["num_threads"] for pool in threadpool_info()} == {1}
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert pin(0, ranks((0,), (0,))) == 2, "a user's word is not overridden"
        assert pin(1, ranks((0, 1))) == 1
    one_thread.cache_clear()


def test_more_threads_than_cores_are_said_with_the_numbers_and_the_cure() -> None:
    assert crowded(2, ranks((0, 1), (0, 1))) == (
        "4 threads of 2 ranks take turns on 2 cores of node7: start fewer, bind them to more cores, or set train.threads lower")
    assert crowded(1, ranks((3,), (3,))).startswith("2 threads of 2 ranks take turns on 1 core of node7: ")
    assert "on 2 cores of node7 (its control group grants the time of 2.5): " in crowded(4, ranks(EIGHT, limit=2.5))
    assert crowded(3, ranks((0, 1), (2, 3, 4, 5))) == (
        "a rank's 3 threads take turns on 2 cores of node7, to which it is bound: bind it to more, or set train.threads = 2")


def test_ranks_outnumber_cores_or_what_their_group_grants() -> None:
    assert [granted_cores(node) for node in (ranks((0, 1), (0, 1), (1,)), ranks(EIGHT), ranks(EIGHT, limit=2.5))] == [2, 8, 2]
    assert granted_cores(ranks((0,), limit=0.5)) == 1


@pytest.mark.parametrize(("number", "node"), [(1, ranks((0, 1), (0, 1))), (2, ranks((0, 1), (2, 3))), (8, ranks(EIGHT)),
                                              (1, ranks((0,), limit=0.5))])
def test_nothing_is_said_where_each_thread_has_a_core(number: int, node: list[Place]) -> None:
    assert crowded(number, node) == ""


def test_a_run_records_its_threads_and_cores_and_says_once_that_they_are_too_many(tmp_path) -> None:
    config = write(tmp_path)
    many = len(os.sched_getaffinity(0)) + 1
    result = train(2, config, "train.steps=2", f"train.threads={many}", timeout=150)
    assert result.rc == 0, result.err
    assert result.out.count(f"{2 * many} threads of 2 ranks take turns on") == 1
    about = record(tmp_path / "runs/run")
    assert about["threads"] == many and len(about["bound_cores"]) == 2
