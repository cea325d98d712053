"""A profile of a run on a device: spans in the device's time, the same ones as on the host, and no wait in a step for them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import fakecuda
import fakegpu
import pytest
from device_counts import counted
from runs import write
from standing import ON_DEVICE, mpirun, train

from mpitrain import models
from mpitrain.backend import Device, namespace
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.start import start
from mpitrain.parallel.gradients.timeline import KEPT, StepTimes
from mpitrain.train.observers.device_spans import DeviceSpans
from mpitrain.train.trainer import UPDATE

DEVICE = Device("gpu", fakegpu.xp)


def rows_of(run: Path) -> dict[str, list[tuple[float, float, str]]]:
    """row -> (began, ended, name) in order of time, in microseconds."""
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            found[rows[e["tid"]]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return {row: sorted(spans, key=lambda span: (span[0], -span[1])) for row, spans in found.items()}


def test_a_run_on_the_device_has_the_spans_of_the_host_and_its_launches_beside_them(tmp_path: Path) -> None:
    config = write(tmp_path)
    more = "train.steps=6", "train.micro_batches=3", "train.eval_every=3", "--profile"
    assert train(1, config, *more, "run.out=cpu").rc == 0
    result = mpirun(1, ON_DEVICE, "train", config, *more, "train.device=gpu", "train.graph=off", "run.out=gpu", cwd=tmp_path)
    assert result.rc == 0, result.err
    host, device = rows_of(tmp_path / "cpu"), rows_of(tmp_path / "gpu")
    for row in ("compute", "optimizer", "evaluation"):
        assert [name for *_, name in device[row]] == [name for *_, name in host[row]], row
    work = [span for row in ("compute", "optimizer", "evaluation") for span in device[row]]
    assert sorted(name for *_, name in device["launches"]) == sorted(name for *_, name in work)
    assert set(host) | {"launches"} == set(device)
    steps = [span for span in device["compute"] if span[2].startswith("step")]
    assert len(steps) == 6 and all(ended <= began + 1 for (_, ended, _), (began, *_) in zip(steps, steps[1:]))
    by_name = {name: (began, ended) for began, ended, name in device["launches"] if name.startswith("step")}
    for began, ended, name in steps:              # on the stand-in a launch is done when it returns: both clocks are one
        assert (began, ended) == pytest.approx(by_name[name], abs=3000)


def test_a_profile_adds_no_wait_to_a_step_and_a_run_without_one_records_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_cupy", lambda: (fakegpu.xp, ""))
    load = Workload(lambda: models.mlp(12, [16], 4), 8, (12,), 4, 1)
    training = Training(load, start().comm, sections={"train": {"device": "gpu", "graph": "off", "micro_batches": 2}})
    training.run(3)
    made: list[Any] = []

    class Timed(fakecuda.Event):
        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False):
            super().__init__(block, disable_timing, interprocess)
            made.extend([] if disable_timing else [self])
    monkeypatch.setattr(fakecuda, "Event", Timed)

    def step() -> tuple[Any, ...]:
        with counted() as counts, training.job.timeline.span("step", "step 4"):
            training.launch()
        return counts.launches, counts.syncs, counts.up, counts.down

    without = step()
    assert not made
    spans = DeviceSpans(DEVICE)
    training.job.timeline.listener, training.job.timeline.landed = spans, spans.landed
    assert step() == without
    assert len(made) == 2 * len(spans.passed[-1].passed) + 1, "two for each span, and one where the gradients are there"
    training.close()


def test_spans_have_the_times_of_the_device_and_the_update_begins_where_gradients_had_landed(monkeypatch: pytest.MonkeyPatch
                                                                                           ) -> None:
    """Two steps and an evaluation, whose last event passes at 9 s of the device's clock, which is 1000 s of the host's."""
    seconds = [1.0, 1.25, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 9.0]

    def record(event: fakecuda.Event, stream: Any = None) -> None:
        event.seconds = seconds.pop(0)
    monkeypatch.setattr(fakecuda.Event, "record", record)
    monkeypatch.setattr("mpitrain.train.observers.device_spans.perf_counter", lambda: 1000.0)
    spans = DeviceSpans(DEVICE)
    with spans("step", "step 1"):
        with spans("compute", "forward 0"):
            pass
        with spans("compute", UPDATE):
            spans.landed()
    with spans("step", "step 2"), spans("data", "read"):
        pass
    with spans("evaluation", "evaluation"):
        pass
    assert [(s.row, s.name, s.began - 991, s.ended - 991) for s in spans.on_device()] == [
        ("compute", "forward 0", 1.25, 2.0), ("compute", "wait for gradients", 2.5, 3.0), ("optimizer", "update", 3.0, 3.5),
        ("compute", "step 1", 1.0, 4.0), ("compute", "step 2", 4.5, 5.0), ("evaluation", "evaluation", 5.5, 6.0)]


def test_events_of_the_last_steps_alone_are_kept() -> None:
    spans = DeviceSpans(DEVICE)
    for i in range(KEPT + 5):
        with spans("step", f"step {i}"):
            pass
    assert [span.name for span in spans.on_device()] == [f"step {i}" for i in range(5, KEPT + 5)]


def test_buckets_have_the_times_at_which_the_device_wrote_them_and_had_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins at 1 s of the device's clock and its backward ends at 2; the last event passes at 9, 1000 s of the host's.
    The second bucket has no events: its times are the host's."""
    seconds, host = [1.0, 1.25, 2.0, 4.0, 9.0], 991.0
    monkeypatch.setattr(fakecuda.Event, "record", lambda event, stream=None: setattr(event, "seconds", seconds.pop(0)))
    monkeypatch.setattr("mpitrain.train.observers.device_spans.perf_counter", lambda: 1000.0)
    spans, events = DeviceSpans(DEVICE), [fakecuda.Event() for _ in range(3)]
    with spans("step", "step 1"), spans("compute", "backward 0"):
        pass
    for event, at in zip(events, (1.5, 1.75, 3.0)):
        event.seconds = at
    times = StepTimes([500.0, 501.0], [500.5, host + 2.25], [501.0, host + 3.5], 500.25, [events, ()])
    nothing, found = spans.in_its_time([None, times])
    assert nothing is None
    assert found == StepTimes([host + 1.5, 501.0], [host + 1.75, host + 2.25], [host + 3, host + 3.5], host + 2)
    assert found.exposed_by_bucket() == [1.0, 0.5]


@pytest.mark.slow
def test_a_trace_of_two_ranks_has_buckets_that_begin_and_end_in_the_devices_time(tmp_path: Path) -> None:
    """The stand-in does all at once: a bucket's messages leave and it is back within its step."""
    result = mpirun(2, ON_DEVICE, "train", write(tmp_path), "train.steps=4", "--profile", "train.device=gpu",
                    "comm.algorithm=ring", "comm.wire_dtype=bfloat16", "run.out=gpu", cwd=tmp_path)
    assert result.rc == 0, result.err
    events = [e for e in json.loads((tmp_path / "gpu" / "trace.json").read_text())["traceEvents"] if e["pid"] == 0]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"].startswith("step")]
    began, ended = ([e["ts"] for e in events if e["ph"] == kind and e["name"] == "exchange"] for kind in "be")
    assert len(began) == len(ended) >= 4 and all(a <= b for a, b in zip(began, ended))
    assert all(any(low - 3000 <= a <= b <= high + 3000 for low, high in steps) for a, b in zip(began, ended))
