"""`mpitrain train --profile`: the last steps of all ranks as one trace file for chrome://tracing and ui.perfetto.dev.

    rank 0   compute         |step 41 [forward 0][backward 0][wait for gradients]            [exchange of the loss]|
             optimizer                                                          [update]
             communication       bucket 0: [its turn][exchange]   bucket 1: [exchange      ]
             data, evaluation, checkpoint, and a row for each thread that reads ahead

Spans are taken while the program runs and kept for the last steps only, so memory stays bounded; the file is written at the end,
with the clocks of all ranks shifted to that of rank 0. On a GPU the rows compute, optimizer and evaluation have the times of the
device (`device_spans`), and a row `launches` those of the host, which asks for the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.backend import CPU, Device
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job.clock import Offset, clock_offsets
from mpitrain.comm.job.together import on_first
from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.gradients.timeline import KEPT, Span, Spans, StepTimes, Timeline
from mpitrain.train.observers.observer import Observer, Watched
from mpitrain.train.trainer import UPDATE

if TYPE_CHECKING:
    from mpitrain.train.observers.device_spans import DeviceSpans

ROWS = ("compute", "communication", "data", "optimizer", "evaluation", "checkpoint")    # rows of reading threads follow
Event = dict[str, Any]


class Profile(Observer):
    """Keeps spans and the times of buckets of the last steps, and writes the trace at the end, also of a run that is stopped."""

    def __init__(self, timeline: Timeline, clocks: Channel, folder: RunFolder, device: Device = CPU):
        self.timeline, self.clocks, self.folder, self.spans = timeline, clocks, folder, Spans()
        self.on_device: DeviceSpans | None = None
        if device.name == "gpu":
            from mpitrain.train.observers.device_spans import DeviceSpans  # a run on the host needs none
            self.spans = self.on_device = DeviceSpans(device)

    def begin(self, run: Watched) -> None:
        self.tell = run.tell
        self.timeline.listen(self.spans)
        if self.on_device is not None:
            self.timeline.when_landed(self.on_device.landed)
            self.timeline.keeps_events = True

    def finish(self, step: int) -> Mapping[str, Any]:
        trace = self.trace()
        on_first(self.clocks, lambda: self.folder.write_text(self.folder.trace, trace_text(trace or {})))
        self.tell(f"profile: {self.folder.trace} (open it in ui.perfetto.dev)")
        return {}

    def trace(self) -> dict[str, Any] | None:
        """It communicates. None on the other ranks."""
        groups = list(self.groups())
        spans, steps = [span for group, times in groups for span in cut_update(group, times)], [times for _, times in groups]
        if self.on_device is not None:
            from mpitrain.train.observers.device_spans import launches
            spans = [*launches(spans), *self.on_device.on_device()]
            steps = self.on_device.in_its_time(steps)
        mine = {"spans": spans, "buckets": [bucket for times in steps if times is not None for bucket in bucket_times(times)]}
        offsets = clock_offsets(self.clocks)
        events: list[Event] = []
        for rank in range(self.clocks.size):                  # one rank after the other: rank 0 holds one rank's spans at a time
            found = self.clocks.broadcast_object(mine if rank == self.clocks.rank else None, rank)
            if offsets:
                events += rank_events(rank, found, offsets[rank])
        return finish_trace(events, offsets) if offsets else None

    def groups(self) -> Iterator[tuple[list[Span], StepTimes | None]]:
        """The recorded groups, oldest first: spans since a step began, and that step's buckets (None before the first one)."""
        groups = [(group, any(span.row == Spans.STEP for span in group)) for group in self.spans.groups]
        steps = list(self.timeline.steps)
        times = iter(steps[len(steps) - sum(is_step for _, is_step in groups):])
        for group, is_step in groups:
            yield group, next(times) if is_step else None


def cut_update(group: list[Span], times: StepTimes | None) -> Iterator[Span]:
    """The update's span is cut in two where the last bucket landed: waiting for gradients, then the optimizer."""
    for span in group:
        if span.name == UPDATE and times is not None:
            landed = min(max([span.began, *times.end]), span.ended)
            yield Span("compute", "wait for gradients", span.began, landed)
            yield Span("optimizer", "update", landed, span.ended)
        else:
            yield span._replace(row="compute") if span.row == Spans.STEP else span


def bucket_times(times: StepTimes) -> Iterator[tuple[str, float, float, float, float]]:
    """(name, ready, start, end, exposed seconds) of each bucket of a step."""
    for i, (start, end, exposed) in enumerate(zip(times.start, times.end, times.exposed_by_bucket())):
        yield f"bucket {i}", times.ready[i], start, end, exposed


def rank_events(rank: int, found: dict[str, Any], offset: Offset) -> list[Event]:
    """One rank's events in the trace event format; times in seconds of rank 0's clock, still."""
    spans = [Span(*span) for span in found["spans"]]
    rows = [*ROWS, *sorted({span.row for span in spans} - set(ROWS))]
    events: list[Event] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for tid, row in enumerate(rows):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": row}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
    events += [{"ph": "X", "name": span.name, "cat": span.row, "pid": rank, "tid": rows.index(span.row),
                "ts": span.began - offset.seconds, "dur": span.ended - span.began} for span in spans]
    for name, ready, start, end, exposed in found["buckets"]:
        for part, a, b in ((name, ready, end), ("its turn", ready, start), ("exchange", start, end)):
            common = {"cat": "communication", "name": part, "pid": rank, "tid": ROWS.index("communication"),
                      "id2": {"local": name}}               # each bucket has a track: several are in flight at once
            events.append({"ph": "b", "ts": a - offset.seconds, **common,
                           **({"args": {"exposed_s": exposed}} if part == name else {})})
            events.append({"ph": "e", "ts": b - offset.seconds, **common})
    return events


def finish_trace(events: list[Event], offsets: list[Offset]) -> dict[str, Any]:
    """The file's content: microseconds from the first event on, and how well the clocks agree."""
    zero = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round((event["ts"] - zero) * 1e6, 3)
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1e6, 3)
    about = {"steps_kept": KEPT, "clock_offset_s": [offset.seconds for offset in offsets],
             "clock_error_s": [offset.error for offset in offsets]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def trace_text(trace: dict[str, Any]) -> str:
    """One event a line, so that text tools can be used on it too."""
    lines = ",\n".join(json.dumps(event) for event in trace["traceEvents"])
    rest = json.dumps({name: value for name, value in trace.items() if name != "traceEvents"})
    return f'{{"traceEvents": [\n{lines}\n],\n{rest[1:]}\n'
