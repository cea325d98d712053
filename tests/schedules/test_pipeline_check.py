"""The checker of pipelines refuses what would hang or compute something else, and says why; it refuses nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules.pipeline import Action, forward_only, gpipe, one_f_one_b, zb_h1
from mpitrain.schedules.pipeline_check import check_pipeline, find_schedule
from mpitrain.schedules.steps import ScheduleError


def parsed(text: str) -> list[Action]:
    """"F0 B0.1" as actions."""
    return [Action(word[0], int(word[1:].partition(".")[0]), int(word.partition(".")[2] or 0)) for word in text.split()]


def written(*programs: str):
    """A schedule of one program a stage, each in words; it takes any number of chunks."""
    return lambda stage, n_stages, n_micro, chunks=1: iter(parsed(programs[stage]))


REFUSED = [      # programs of the stages, micro-batches, chunks, what is said
    (["F0 F1 B1 B0"], 2, 1, "stage 0 runs B1 before B0; each backward of a chunk comes in the order of the micro-batches, so"),
    (["F1 F0 B0 B1"], 2, 1, "stage 0 runs F1 before F0; each forward of a chunk"),
    (["F0 B0 B0"], 1, 1, "stage 0 runs B0 twice"),
    (["F0 B0", "B0 F0"], 1, 1, "stage 1 runs B0 before its F0"),
    (["F0 W0 B0"], 1, 1, "stage 0 runs W0 before its B0"),
    (["F0.1 B0.1 B0 F0"], 1, 2, "stage 0 runs B0 before its F0"),
    (["F0 B0 F1 B1"], 1, 1, "stage 0 runs F1; there are 1 micro-batches and 1 chunks, counted from 0"),
    (["F0 F-1"], 1, 1, "stage 0 runs F-1; there are 1 micro-batches"),
    (["F0 F0.1"], 1, 1, "stage 0 runs F0.1; there are 1 micro-batches and 1 chunks"),
    (["F0 B0"], 2, 1, "stage 0 of 1 runs F0 B0; it should run forward and backward of each of 2 micro-batches once"),
    (["F0 F1"], 2, 1, "stage 0 of 1 runs F0 F1; it should run forward and backward of each of 2"),
    (["F0 B0", ""], 1, 1, "stage 1 of 2 runs nothing; it should run forward and backward of each of 1"),
    (["F0 B0", "F0 B0 W0"], 1, 1, "stage 0 of 2 runs F0 B0; it should run forward, backward and weight gradient of each of 1"),
    (["F0 B0"], 1, 2,
     "stage 0 of 1 runs F0 B0; it should run forward and backward of each of 1 micro-batches on each of 2 chunks once"),
    (["F0.1 F0 B0.1 B0"], 1, 2, "deadlock: stage 0 waits in F0.1 for stage 0's F0 -> stage 0"),
    (["F0 B0 F1 B1", "F0 F1 B0 B1"], 2, 1,
     "deadlock: stage 0 waits in B0 for stage 1's B0 -> stage 1 waits in F1 for stage 0's F1 -> stage 0"),
    (["F0 B0 F1 B1", "F0 B0 F1 B1", "F0 F1 B0 B1"], 2, 1,       # stage 0 waits for the circle and is none of it
     "deadlock: stage 1 waits in B0 for stage 2's B0 -> stage 2 waits in F1 for stage 1's F1 -> stage 1"),
]


@pytest.mark.parametrize(("programs", "n_micro", "chunks", "said"), REFUSED)
def test_a_wrong_schedule_is_refused_with_the_reason(programs: list[str], n_micro: int, chunks: int, said: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        check_pipeline(written(*programs), len(programs), n_micro, chunks)
    assert refusal.value.message.startswith(said)
    assert not said.startswith("deadlock") or refusal.value.message == said


def test_a_long_circle_is_told_in_short() -> None:
    with pytest.raises(ScheduleError) as refusal:
        check_pipeline(written(*["F0.1 F0 B0.1 B0"] * 64), 64, 1, 2)
    links = refusal.value.message.removeprefix("deadlock: ").split(" -> ")
    assert links[:2] == ["stage 0 waits in F0.1 for stage 63's F0", "stage 63 waits in F0.1 for stage 62's F0.1"]
    assert links[-3:] == ["56 more", "stage 1 waits in F0.1 for stage 0's F0.1", "stage 0"] and len(links) == 10


def test_forwards_alone_train_nothing() -> None:
    with pytest.raises(ScheduleError, match="^stage 0 of 2 runs F0 F1; it should run forward and backward of each"):
        check_pipeline(forward_only, 2, 2)
    with pytest.raises(ScheduleError, match="runs F0 F1 B0 B1; it should run forward of each of 2 micro-batches once$"):
        check_pipeline(gpipe, 2, 2, training=False)
    with pytest.raises(ScheduleError, match="^stage 0 of 1 runs F0 B0; it should run forward of each of 2 micro-batches once$"):
        check_pipeline(written("F0 B0"), 1, 2, training=False)


def test_activations_are_kept_until_the_weight_gradient() -> None:
    assert check_pipeline(written("F0 B0 F1 B1 W0 W1"), 1, 2) == [2]
    assert check_pipeline(written("F0 B0 W0 F1 B1 W1"), 1, 2) == [1]


def endless(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    for micro in itertools.count():
        yield Action("F", micro)


NONSENSE = [
    (lambda stage: [], "it is called with (stage, n_stages, n_micro), and it does not take them: "),
    (lambda stage, *, chunks: [], "it is called with (stage, n_stages, n_micro, chunks=), and it does not take them: "),
    (lambda stage, n_stages, n_micro: None, 'it must be a generator of actions, found None instead; write yield Action("F", 0)'),
    (lambda stage, n_stages, n_micro: "F0 B0", "it must be a generator of actions, found 'F0 B0' (str) instead"),
    (lambda stage, n_stages, n_micro: ["F0"], 'stage 0, action 0: an action is an Action("F", "B" or "W", micro, chunk) of whole '
                                              "numbers, found 'F0' (str)"),
    (lambda stage, n_stages, n_micro: [("F", 0)], "stage 0, action 0: an action is an Action"),
    (lambda stage, n_stages, n_micro: [Action("F", 0), Action("X", 0)], "stage 0, action 1: an action is an Action"),
    (lambda stage, n_stages, n_micro: [Action("F", 0.0)], "stage 0, action 0: an action is an Action"),
    (lambda stage, n_stages, n_micro: [Action([], 0, 0)], "stage 0, action 0: an action is an Action"),
    (endless, "stage 0 runs F2; there are 2 micro-batches"),
]


@pytest.mark.parametrize(("schedule", "said"), NONSENSE)
def test_what_is_no_schedule_is_refused(schedule, said: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        check_pipeline(schedule, 1, 2)
    assert refusal.value.message.startswith(said)


def test_chunks_for_a_schedule_that_knows_none_are_refused() -> None:
    with pytest.raises(ConfigError, match='^it knows one chunk a stage, not 2; set mesh.chunks = 1, or mesh.schedule = "interl'):
        check_pipeline(one_f_one_b, 2, 2, 2)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_a_pipeline_of_nothing_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"^there is no pipeline of .* give at least 1 stage, 0 micro-batches and 1 chunk$"):
        check_pipeline(gpipe, *numbers)


def can_end(programs: Sequence[Sequence[Action]], chunks: int) -> bool:
    """Whether stages that run whatever they can come to their ends: counted by tries, knowing nothing of circles."""
    n, done = len(programs), set()
    rest = [list(program) for program in programs]
    for _ in range(sum(map(len, rest))):
        for stage, program in enumerate(rest):
            if program:
                kind, micro, chunk = program[0]
                at = chunk * n + stage
                before = {"F": at - 1, "B": at + 1}.get(kind)
                if before in (None, -1, n * chunks) or (kind, micro, before) in done:
                    done.add((kind, micro, at))
                    del program[0]
    return not any(rest)


def programs_in_order(seed: int) -> tuple[list[list[Action]], int, int]:
    """Any programs whose stages by themselves are in order: they deadlock as often as not."""
    draw = random.Random(seed)
    n_stages, n_micro, chunks, kinds = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 2), draw.choice(["FB", "FBW"])
    programs: list[list[Action]] = []
    for _ in range(n_stages):
        turn = {(kind, chunk): 0 for kind in kinds for chunk in range(chunks)}
        program: list[Action] = []
        while len(program) < len(turn) * n_micro:
            kind, chunk = draw.choice([
                (kind, chunk) for kind, chunk in turn
                if turn[kind, chunk] < (n_micro if kind == "F" else turn["F" if kind == "B" else "B", chunk])])
            program.append(Action(kind, turn[kind, chunk], chunk))
            turn[kind, chunk] += 1
        programs.append(program)
    return programs, n_micro, chunks


def test_exactly_the_schedules_that_end_are_accepted() -> None:
    ended = 0
    for seed in range(400):
        programs, n_micro, chunks = programs_in_order(seed)
        schedule = written(*(" ".join(map(str, program)) for program in programs))
        if can_end(programs, chunks):
            assert len(check_pipeline(schedule, len(programs), n_micro, chunks)) == len(programs)
            ended += 1
        else:
            with pytest.raises(ScheduleError, match="^deadlock: stage"):
                check_pipeline(schedule, len(programs), n_micro, chunks)
    assert 100 < ended < 300


OWN = """
from mpitrain.schedules.pipeline import Action, one_f_one_b

def good(stage, n_stages, n_micro):
    yield from one_f_one_b(stage, n_stages, n_micro)

def backwards_first(stage, n_stages, n_micro):
    yield Action("B", 0)

def fails(stage, n_stages, n_micro):
    yield Action("F", 1 // (n_stages - 2))

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_schedules.py").write_text(OWN)
    return tmp_path


def test_names_are_found_and_proved(folder: Path) -> None:
    find = partial(find_schedule, folder=folder, n_stages=2, n_micro=4)
    assert find("zb_h1") is zb_h1
    own = find("own_schedules.py:good")
    assert list(own(0, 2, 3)) == list(one_f_one_b(0, 2, 3))
    for name, said in (("backwards_first", "with n_stages=2, n_micro=4, chunks=1: stage 0 runs B0 before its F0"),
                       ("fails", "with n_stages=2, n_micro=4, chunks=1 raised ZeroDivisionError at own_schedules.py:11")):
        with pytest.raises(ScheduleError) as refusal:
            find(f"own_schedules.py:{name}")
        assert refusal.value.message.startswith(f'pipeline schedule "own_schedules.py:{name}" {said}')
    with pytest.raises(ConfigError, match=r'number" must be a function of \(stage, n_stages, n_micro\) .*, found 3 \(int\)$'):
        find("own_schedules.py:number")
    with pytest.raises(ConfigError, match=r'^unknown pipeline schedule "1f1" \(did you mean "1f1b"\?\)'):
        find("1f1")
    with pytest.raises(ScheduleError, match='"interleaved" with n_stages=2, n_micro=4, chunks=1: interleaved 1F1B needs at'):
        find("interleaved")
