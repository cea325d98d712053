"""Pipeline schedules: which stage does what in which order, as plain data.

A schedule names forwards ("F") and backwards ("B") of micro-batches only; whoever runs it inserts the messages between stages.
One that also names weight gradients ("W") means by B the gradient of the stage's input alone. With one stage a schedule is
gradient accumulation. The Fs, Bs and Ws of a chunk each run in the order of the micro-batches in every schedule, so gradients
are added up in one order and the schedules agree to the bit.

A stage may hold several `chunks` of the model: chunk c of stage s is virtual stage c * n_stages + s, so that a micro-batch
passes all stages once for each chunk. `pipeline_check` proves schedules, `pipeline_simulate` times them and has the formulas
of idle time, `pipeline_draw` draws them, as they are drawn here: a column is a unit of time, a dot an idle one, and B without W
takes two units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from mpitrain.errors import ConfigError
from mpitrain.registry import Registry


class Action(NamedTuple):
    """Forward, backward or weight gradient of one micro-batch on one chunk: ``F0``, ``B3``, of chunk 2 ``W3.2``."""

    kind: Literal["F", "B", "W"]
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}.{self.chunk}" if self.chunk else f"{self.kind}{self.micro}"


Schedule: TypeAlias = Callable[..., Iterator[Action]]        # (stage, n_stages, n_micro[, chunks=]) -> that stage's actions
SCHEDULES: Registry[Schedule] = Registry("pipeline schedule")


@SCHEDULES.register("gpipe")
def gpipe(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., 2019): simple, and every micro-batch's activations live at once.

    Of p stages each idles (p - 1) (F + B) seconds, F and B the forward and the backward of one micro-batch on one stage.

        stage 0  F0 F1 F2 .  .  .  B0--- B1--- B2---
        stage 1  .  F0 F1 F2 B0--- B1--- B2--- .  .
    """
    yield from (Action("F", micro) for micro in range(n_micro))
    yield from (Action("B", micro) for micro in range(n_micro))


@SCHEDULES.register("1f1b")
def one_f_one_b(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """Fill the pipeline, then alternate one forward and one backward (Narayanan et al., 2019); at most n_stages - stage live.

    Stages idle as long as with `gpipe`, (p - 1) (F + B), and hold fewer activations.

        stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
        stage 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    """
    ahead = min(n_stages - stage - 1, n_micro)
    yield from (Action("F", micro) for micro in range(ahead))
    for micro in range(n_micro - ahead):
        yield Action("F", micro + ahead)
        yield Action("B", micro)
    yield from (Action("B", micro) for micro in range(n_micro - ahead, n_micro))


@SCHEDULES.register("zb_h1")
def zb_h1(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """1F1B whose weight gradients come where stages would idle: ZB-H1 of "Zero bubble pipeline parallelism" (Qi et al., 2023).

    Stage s runs W of a micro-batch s micro-batches after its B. So gradients pass back through the stages at once, and each
    of them holds the activations of at most p micro-batches, 1F1B's most. Stages idle (p - 1) (F + B - min(F, B, W)) seconds
    with p micro-batches or more: a third of 1F1B's where the three take the same time.

        stage 0  F0 F1 .  B0 W0 F2 B1 W1 B2 W2
        stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 W2
    """
    ahead = min(n_stages - stage - 1, n_micro)
    yield from (Action("F", micro) for micro in range(ahead))
    for micro in range(n_micro):
        if micro + ahead < n_micro:
            yield Action("F", micro + ahead)
        yield Action("B", micro)
        if micro >= stage:
            yield Action("W", micro - stage)
    yield from (Action("W", micro) for micro in range(max(0, n_micro - stage), n_micro))


@SCHEDULES.register("interleaved")
def interleaved(stage: int, n_stages: int, n_micro: int, *, chunks: int = 2) -> Iterator[Action]:
    """1F1B over the `chunks` of every stage (Narayanan et al., 2021): less idle time, more messages and activations.

    Micro-batches pass chunk after chunk in groups, of p where n_micro is a multiple of p (as in the paper), else of a few
    more, at most g. Stages idle (p - 1) (F + B) / chunks seconds, F and B of a whole stage, and hold the activations of at
    most (chunks - 1) g + 2 (p - s) - 1 chunks. Fewer than p micro-batches cannot fill the pipeline: then all forwards go
    first. ConfigError for less than 2 chunks.

        stage 0  F0   F1   F0.1 F1.1 .    .    B0.1----- .    B1.1----- B0------- B1-------
        stage 1  .    F0   F1   F0.1 B0.1----- F1.1 B1.1----- B0------- B1------- .    .
    """
    if chunks < 2:
        raise ConfigError(f'interleaved 1F1B needs at least 2 chunks a stage, found {chunks}; set mesh.chunks = 2 or more, or '
                          f'mesh.schedule = "1f1b", which is the same with 1')
    passes = list(in_groups(n_stages, n_micro, chunks))
    largest = max((stop - first for first, stop in groups(n_stages, n_micro)), default=0)
    ahead = (chunks - 1) * largest + 2 * (n_stages - stage - 1)
    if n_micro < n_stages or ahead > len(passes):
        ahead = len(passes)
    for index in range(len(passes) + ahead):
        if index < len(passes):
            yield Action("F", *passes[index])
        if index >= ahead:
            micro, chunk = passes[index - ahead]
            yield Action("B", micro, chunks - 1 - chunk)


def forward_only(stage: int, n_stages: int, n_micro: int, *, chunks: int = 1) -> Iterator[Action]:
    """What evaluation and inference run: forwards alone, nothing is kept. Stages idle (p - 1) F / chunks seconds.

    It trains nothing, so no configuration names it: it is not one of `SCHEDULES`.

        stage 0  F0 F1 F2 .
        stage 1  .  F0 F1 F2
    """
    yield from (Action("F", micro, chunk) for micro, chunk in in_groups(n_stages, n_micro, chunks))


def in_groups(n_stages: int, n_micro: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) in the order of interleaved forwards: a group passes one chunk after the other, then the next one.

    A group of at least n_stages fills the pipeline: its first is back from the last stage when its last has left the first.
    """
    for first, stop in groups(n_stages, n_micro):
        yield from ((micro, chunk) for chunk in range(chunks) for micro in range(first, stop))


def groups(n_stages: int, n_micro: int) -> Iterator[tuple[int, int]]:
    """As many almost equal groups [first, stop) of at least n_stages micro-batches as there can be; all in one if they are
    fewer."""
    n = max(1, n_micro // n_stages)
    yield from ((i * n_micro // n, (i + 1) * n_micro // n) for i in range(n))
