"""Proves a pipeline schedule for all stages at once, without MPI: everything runs once, in order, and nothing waits for ever.

Whoever runs a schedule sends without waiting, from memory that it owns. So a stage waits for data alone: a forward for the
one of the virtual stage before, a backward for the one of the virtual stage behind.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from mpitrain.errors import ConfigError, MpitrainError, name_and_text, place
from mpitrain.schedules.calling import answer, is_whole, shown
from mpitrain.schedules.pipeline import SCHEDULES, Action, Schedule
from mpitrain.schedules.steps import ScheduleError

Need: TypeAlias = tuple[int, Action]                         # The stage and its action whose message another action needs.

WORD = {"F": "forward", "B": "backward", "W": "weight gradient"}
KINDS = tuple(WORD)
LISTED = 12                    # An error message lists so many actions of a program,
LINKS = 8                      # or so many links of a circle.


def find_schedule(name: str, folder: Path | None = None, *, n_stages: int, n_micro: int, chunks: int = 1) -> Schedule:
    """The schedule called `name`, proved for these numbers; a user's own is ``package.module:name`` or ``file.py:name``.

    Files are relative to `folder` (the config's). ConfigError where there is none, ScheduleError where it is wrong.
    """
    found: Schedule = SCHEDULES.resolve(name, folder)
    prove(found, name, n_stages=n_stages, n_micro=n_micro, chunks=chunks)
    return found


def prove(found: Schedule, name: str, *, n_stages: int, n_micro: int, chunks: int = 1) -> None:
    """`check_pipeline` with errors, also those of a user's own function, that say which schedule it is about."""
    if not callable(found):
        raise ConfigError(f'pipeline schedule "{name}" must be a function of (stage, n_stages, n_micro) that yields actions, '
                          f'found {shown(found)}')
    what = f'pipeline schedule "{name}" with n_stages={n_stages}, n_micro={n_micro}, chunks={chunks}'
    try:
        check_pipeline(found, n_stages, n_micro, chunks)
    except MpitrainError as error:
        raise ScheduleError(f"{what}: {error.message}") from error
    except Exception as error:
        raise ScheduleError(f"{what} raised {name_and_text(error, place(error))}") from error


def check_pipeline(schedule: Schedule, n_stages: int, n_micro: int, chunks: int = 1, *, training: bool = True) -> list[int]:
    """The peak number of live activations of each stage, each of one micro-batch on one chunk. ScheduleError for a schedule
    that is wrong, also for one without backwards where it is for `training`.

    Activations are kept from a forward to its backward, or to its weight gradient where there are any.
    """
    programs = checked_programs(schedule, n_stages, n_micro, chunks, training=training)
    for _ in flow(programs, chunks):
        pass
    return [peak_of(program) for program in programs]


def checked_programs(schedule: Schedule, n_stages: int, n_micro: int, chunks: int = 1, *,
                     training: bool = True) -> list[list[Action]]:
    """Each stage's actions: each of each micro-batch and chunk once and in order. They may still wait in a circle (`flow`)."""
    if n_stages < 1 or n_micro < 0 or chunks < 1:
        raise ConfigError(f"there is no pipeline of {n_stages} stages, {n_micro} micro-batches and {chunks} chunks a stage; give "
                          f"at least 1 stage, 0 micro-batches and 1 chunk")
    programs = [in_order(actions_of(schedule, stage, n_stages, n_micro, chunks), stage, n_micro, chunks)
                for stage in range(n_stages)]
    kinds = "F" if not training else "FBW" if any(splits_backward(program) for program in programs) else "FB"
    for stage, program in enumerate(programs):
        complete(program, stage, n_stages, n_micro, chunks, kinds)
    return programs


def actions_of(schedule: Schedule, stage: int, n_stages: int, n_micro: int, chunks: int = 1) -> Iterator[Action]:
    """The actions of one stage, one at a time, each of them looked at. `chunks` is passed to a schedule that takes it."""
    names, keywords = "stage, n_stages, n_micro", {}
    if takes_chunks(schedule):
        names, keywords = names + ", chunks=", {"chunks": chunks}
    elif chunks > 1:
        raise ConfigError(f'it knows one chunk a stage, not {chunks}; set mesh.chunks = 1, or mesh.schedule = "interleaved" '
                          f"(your own takes a keyword chunks)")
    found = answer(schedule, names, stage, n_stages, n_micro, **keywords)
    if not hasattr(found, "__iter__") or isinstance(found, (str, bytes)):
        raise ScheduleError(f'it must be a generator of actions, found {shown(found)} instead; write yield Action("F", 0)')
    for index, action in enumerate(found):
        if not (isinstance(action, Action) and action.kind in KINDS and is_whole(action.micro) and is_whole(action.chunk)):
            raise ScheduleError(f'stage {stage}, action {index}: an action is an Action("F", "B" or "W", micro, chunk) of whole '
                                f"numbers, found {shown(action)}")
        yield action


def takes_chunks(schedule: Schedule) -> bool:
    """Whether a schedule has a parameter `chunks`."""
    try:
        return "chunks" in inspect.signature(schedule).parameters
    except ValueError:                                        # A callable of C has no signature to look at.
        return False


def splits_backward(program: Sequence[Action]) -> bool:
    """Whether a stage's weight gradients are actions of their own, so that B is the gradient of its input alone."""
    return any(action.kind == "W" for action in program)


def in_order(actions: Iterator[Action], stage: int, n_micro: int, chunks: int) -> list[Action]:
    """The actions as a list, in which nothing comes twice or too early. So an endless schedule is left soon."""
    program: list[Action] = []
    following = {(kind, chunk): 0 for kind in WORD for chunk in range(chunks)}        # the micro-batch whose turn it is
    before = {"B": "F", "W": "B"}
    for action in actions:
        kind, micro, chunk = action
        if not (0 <= micro < n_micro and 0 <= chunk < chunks):
            raise ScheduleError(f"stage {stage} runs {action}; there are {n_micro} micro-batches and {chunks} chunks, counted "
                                f"from 0")
        turn = following[kind, chunk]
        if micro < turn:
            raise ScheduleError(f"stage {stage} runs {action} twice")
        if micro > turn:
            raise ScheduleError(f"stage {stage} runs {action} before {Action(kind, turn, chunk)}; each {WORD[kind]} of a chunk "
                                f"comes in the order of the micro-batches, so that sums have one order")
        if kind in before and micro >= following[before[kind], chunk]:
            needed = action._replace(kind="F" if kind == "B" else "B")
            raise ScheduleError(f"stage {stage} runs {action} before its {needed}")
        following[kind, chunk] = micro + 1
        program.append(action)
    return program


def complete(program: Sequence[Action], stage: int, n_stages: int, n_micro: int, chunks: int, kinds: str) -> None:
    """ScheduleError unless a program that is in order has all there is to do."""
    if len(program) == len(kinds) * n_micro * chunks and not any(action.kind not in kinds for action in program):
        return
    listed = " ".join(map(str, program[:LISTED])) + (" ..." if len(program) > LISTED else "")
    words = [WORD[kind] for kind in kinds]
    what = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    of_chunks = f" on each of {chunks} chunks" if chunks > 1 else ""
    raise ScheduleError(f"stage {stage} of {n_stages} runs {listed or 'nothing'}; it should run {what} of each of {n_micro} "
                        f"micro-batches{of_chunks} once")


def flow(programs: Sequence[Sequence[Action]], chunks: int = 1) -> Iterator[tuple[int, Action, Need | None]]:
    """(stage, action, whose message it needs) of all programs, in an order in which data can flow. ScheduleError with the
    circle where there is none, after all that can run."""
    n_stages = len(programs)
    done: list[set[Action]] = [set() for _ in programs]
    waiting: list[dict[Action, int]] = [{} for _ in programs]          # The stages that wait, by the action they wait for.
    at, ready = [0] * n_stages, deque(range(n_stages))
    while ready:
        stage = ready.popleft()
        program, finished, asked = programs[stage], done[stage], waiting[stage]
        for index in range(at[stage], len(program)):
            action = program[index]
            need = needed_by(action, stage, n_stages, chunks)
            if need is not None and need[1] not in done[need[0]]:
                waiting[need[0]][need[1]] = stage
                break
            yield stage, action, need
            finished.add(action)
            at[stage] = index + 1
            if asked and action in asked:
                ready.append(asked.pop(action))
    needs = {waiter: (stage, action) for stage, asked in enumerate(waiting) for action, waiter in asked.items()}
    if needs:
        raise ScheduleError(f"deadlock: {circle(programs, at, needs)}")


def needed_by(action: Action, stage: int, n_stages: int, chunks: int) -> Need | None:
    """The stage and its action whose message an action needs: of the virtual stage before (F) or behind (B), if there is
    one."""
    kind, micro, chunk = action
    if kind == "F" and stage > 0:
        return stage - 1, action
    if kind == "B" and stage < n_stages - 1:
        return stage + 1, action
    if kind == "F" and chunk > 0:
        return n_stages - 1, Action(kind, micro, chunk - 1)
    if kind == "B" and chunk < chunks - 1:
        return 0, Action(kind, micro, chunk + 1)
    return None


def circle(programs: Sequence[Sequence[Action]], at: Sequence[int], needs: dict[int, Need]) -> str:
    """The stages that wait for each other, in words: who waits follows whom he waits for, until one comes again."""
    path = [min(needs)]
    while needs[path[-1]][0] not in path:
        path.append(needs[path[-1]][0])
    path = path[path.index(needs[path[-1]][0]):]
    links = [f"stage {stage} waits in {programs[stage][at[stage]]} for stage {needs[stage][0]}'s {needs[stage][1]}"
             for stage in path]
    if len(links) > LINKS:
        links[LINKS - 1:-1] = [f"{len(links) - LINKS} more"]
    return " -> ".join([*links, f"stage {path[0]}"])


def peak_of(program: Sequence[Action]) -> int:
    """The most activations that a stage holds at once; without backwards it holds the one that it computes."""
    kinds = {action.kind for action in program}
    last = "W" if "W" in kinds else "B" if "B" in kinds else "F"
    live = peak = 0
    for action in program:
        live += action.kind == "F"
        peak = max(peak, live)
        live -= action.kind == last
    return peak
