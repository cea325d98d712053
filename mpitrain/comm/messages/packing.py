"""Stages whose messages are 16-bit: each rank packs what it sends, and adds in float32 what it unpacks.

Beside each element of the data and the inbox lies its packed value ("data16", "inbox16"); messages touch only those.

    plain    Send data[a:b)                      Receive inbox[c:d)            Reduce inbox + data -> data
    packed   pack data -> data16; Send data16    Receive into inbox16          add inbox16 to data

All ranks end with the same bits because a value is rounded where it is sent, also for the sender itself, and because the
result is rounded everywhere. A value that is forwarded as it came is not packed again; a sum that is sent next is packed in
the pass that adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.comm.messages.program import Operation, Stage, parts_of
from mpitrain.schedules.steps import Slice

ALIGNMENT = 64                                                # packed values begin at multiples of so many elements


def packed(stages: Sequence[Stage], results: Sequence[Slice], round_results: bool) -> list[Stage]:
    """Plain stages with 16-bit messages. `results` are the parts of the data that count at the end, and `round_results`
    says that other ranks hold them too, so that all must round them."""
    found: list[Stage] = []
    clean: set[Slice] = set()                                # the packed values of these parts equal the array's
    for index, stage in enumerate(stages):
        before = []
        for part, _ in stage.sends:
            if part not in clean:
                kept = _is_read(part, stages, index, results)
                before.append(Operation("round" if kept else "pack", (part, beside(part))))
                clean.add(part)
        arrived = [part for part, _ in stage.receives]
        clean = {part for part in clean if not any(meet(part, other) for other in arrived)} | set(arrived)
        after, written = _after(stage, arrived, stages, index, results)
        clean = {part for part in clean if not any(meet(part, other) for other in written)}
        found.append(Stage(tuple(before), tuple((beside(part), peer) for part, peer in stage.receives),
                           tuple((beside(part), peer) for part, peer in stage.sends), tuple(after)))
    if round_results and found:
        slices = {part for part in parts_of(stages) if part.buffer == "data"}
        last = tuple(Operation("round", (part, beside(part))) for result in results for part in outside(result, clean, slices))
        found[-1] = found[-1]._replace(after=found[-1].after + last)
    return list(_fused(found))


def _after(stage: Stage, arrived: list[Slice], stages: Sequence[Stage], index: int,
           results: Sequence[Slice]) -> tuple[list[Operation], list[Slice]]:
    """The operations that follow the messages, and the parts of the arrays that they write."""
    waiting, after, written = list(arrived), [], []
    for position, operation in enumerate(stage.after):
        *read, into = operation.parts
        direct = _added_once(operation, waiting)
        if direct is not None and _is_read(direct, stages, index, results, position + 1):
            direct = None
        for part in [part for part in waiting if part != direct and any(meet(part, other) for other in (*read, into))]:
            after.append(Operation("unpack", (beside(part), part)))
            waiting.remove(part)
        if direct is not None:
            waiting.remove(direct)
            operation = Operation("add", (beside(direct), into))
        after.append(operation)
        written.append(into)
    after += [Operation("unpack", (beside(part), part)) for part in waiting]
    return after, written


def _added_once(operation: Operation, waiting: list[Slice]) -> Slice | None:
    """The part that has just arrived and is added to another part in place, if that is what the operation does."""
    if operation.name != "sum":
        return None
    left, right, into = operation.parts
    for part, other in ((left, right), (right, left)):
        if part in waiting and other == into and not meet(part, into):
            return part
    return None


def _is_read(part: Slice, stages: Sequence[Stage], index: int, results: Sequence[Slice], position: int = 0) -> bool:
    """Whether the array's own values in `part` matter after the messages of stage `index` and `position` operations of it."""
    for number in range(index, len(stages)):
        stage = stages[number]
        if number > index and any(meet(part, other) for other, _ in stage.sends):
            return True
        if (number > index or position == 0) and any(covers(other, part) for other, _ in stage.receives):
            return False
        for operation in stage.after[position if number == index else 0:]:
            *read, into = operation.parts
            if any(meet(part, other) for other in read):
                return True
            if covers(into, part):
                return False
    return any(meet(part, result) for result in results)


def _fused(stages: list[Stage]) -> Iterator[Stage]:
    """A sum that is packed or rounded next is packed as it is added: one pass over memory rather than two."""
    for index, stage in enumerate(stages):
        after = list(stage.after)
        for position, (first, second) in enumerate(zip(stage.after, stage.after[1:])):
            if _follows(second, first):
                after[position:position + 2] = [_both(first, second)]
                break
        later = stages[index + 1] if index + 1 < len(stages) else None
        if after and later is not None and later.before and _follows(later.before[0], after[-1]):
            after[-1] = _both(after[-1], later.before[0])
            stages[index + 1] = later._replace(before=later.before[1:])
        yield stage._replace(after=tuple(after))


def _follows(second: Operation, first: Operation) -> bool:
    return first.name == "add" and second.name in ("round", "pack") and first.parts[1] == second.parts[0]


def _both(first: Operation, second: Operation) -> Operation:
    return Operation(f"add_{second.name}", (*first.parts, second.parts[1]))


def compacted(stages: Sequence[Stage], buffer: str = "data16") -> list[Stage]:
    """The stages with packed values in as little memory as their lives need, rather than beside the whole array: it stays in
    the cache. A part of `buffer` lives from the first stage that names it to the last."""
    lives: dict[Slice, list[int]] = {}
    for index, stage in enumerate(stages):
        for part in parts_of([stage]):
            if part.buffer == buffer:
                lives.setdefault(part, [index, index])[1] = index
    places = _places(lives)
    return [_renamed(stage, places) for stage in stages]


def _places(lives: dict[Slice, list[int]]) -> dict[Slice, Slice]:
    """The place of each part: the first gap that is wide enough between parts alive at the same time."""
    places: dict[Slice, Slice] = {}
    living: list[tuple[Slice, int]] = []                      # places in order, each with the last stage of its part
    for part, (first, last) in lives.items():
        living = sorted((place, end) for place, end in living if end >= first)
        start = 0
        for place, _ in living:
            if place.start - start >= part.stop - part.start:
                break
            start = -(-place.stop // ALIGNMENT) * ALIGNMENT
        places[part] = Slice(part.buffer, start, start + part.stop - part.start)
        living.append((places[part], last))
    return places


def _renamed(stage: Stage, places: dict[Slice, Slice]) -> Stage:
    def operations(those: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple(Operation(name, tuple(places.get(part, part) for part in parts)) for name, parts in those)

    def messages(those: Sequence[tuple[Slice, int]]) -> tuple[tuple[Slice, int], ...]:
        return tuple((places.get(part, part), peer) for part, peer in those)
    return Stage(operations(stage.before), messages(stage.receives), messages(stage.sends), operations(stage.after))


def beside(part: Slice) -> Slice:
    """The part that holds the packed values of `part`."""
    return part._replace(buffer=part.buffer + "16")


def meet(a: Slice, b: Slice) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def covers(a: Slice, b: Slice) -> bool:
    return a.buffer == b.buffer and a.start <= b.start and b.stop <= a.stop


def outside(part: Slice, others: set[Slice], slices: set[Slice]) -> list[Slice]:
    """The pieces of `part` in some of `slices` and none of `others`, cut where slices begin and end."""
    bounds = {bound for other in (part, *others, *slices) for bound in (other.start, other.stop)}
    inside = sorted(bound for bound in bounds if part.start <= bound <= part.stop)
    pieces = [part._replace(start=start, stop=stop) for start, stop in zip(inside, inside[1:])]
    return [piece for piece in pieces if any(covers(other, piece) for other in slices)
            and not any(covers(other, piece) for other in others)]
