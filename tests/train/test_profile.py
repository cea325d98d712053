"""`train --profile`: one file that a trace viewer accepts, with every rank in it, and phases that fit into the steps."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from launch import mpirun
from runs import start, steps, train, write

from mpitrain.comm.job.clock import Offset
from mpitrain.parallel.gradients import timeline
from mpitrain.parallel.gradients.timeline import Span, Spans, StepTimes, no_span
from mpitrain.train.observers.profile import ROWS, bucket_times, cut_update, finish_trace, rank_events
from mpitrain.train.trainer import Trainer

SLACK = 0.002                             # microseconds: times are rounded to nanoseconds


def read(run):
    return json.loads((run / "trace.json").read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def spans(trace, rank):
    """name of the row -> (began, ended, name), in order of time."""
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == rank}
    found = defaultdict(list)
    for e in trace["traceEvents"]:
        if e["ph"] == "X" and e["pid"] == rank:
            found[rows[e["tid"]]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return {row: sorted(events, key=lambda e: (e[0], -e[1])) for row, events in found.items()}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    result = train(3, write(folder), "run.out=a", "train.steps=12", "train.eval_every=6", "train.micro_batches=6",
                   "comm.bucket_mb=0.00001", "checkpoint.every=6", "--profile")
    assert result.rc == 0, result.err
    assert "a/trace.json (open it in ui.perfetto.dev)" in result.out
    return folder / "a", read(folder / "a")


def test_every_rank_has_every_row(profiled):
    _, trace = profiled
    for rank in range(3):
        assert set(spans(trace, rank)) >= set(ROWS) - {"communication"} | {"reader 0"}
    about = trace["otherData"]
    assert len(about["clock_offset_s"]) == len(about["clock_error_s"]) == 3
    assert all(abs(offset) <= error for offset, error in zip(about["clock_offset_s"], about["clock_error_s"]))


def test_the_metrics_have_the_share_of_a_step_that_is_exposed(profiled):
    run, _ = profiled
    for line in steps(run):
        assert 0 <= line["comm_exposed_s"] <= line["step_s"]
        assert line["comm_exposed_share"] == pytest.approx(line["comm_exposed_s"] / line["step_s"])


def test_spans_of_a_row_nest_or_follow_each_other(profiled):
    _, trace = profiled
    for rank in range(3):
        for events in spans(trace, rank).values():
            open_until = []
            for began, ended, name in events:
                assert 0 <= began <= ended
                while open_until and open_until[-1] <= began + SLACK:
                    open_until.pop()
                assert not open_until or ended <= open_until[-1] + SLACK, (rank, name)
                open_until.append(ended)


def test_a_step_has_each_of_its_phases_once_and_they_fit_into_it(profiled):
    _, trace = profiled
    for rank in range(3):
        rows = spans(trace, rank)
        whole = [e for e in rows["compute"] if e[2].startswith("step")]
        assert [name for *_, name in whole] == [f"step {i}" for i in range(1, 13)]
        for began, ended, _ in whole:
            inner = [e for row in ("compute", "optimizer") for e in rows[row] if began <= e[0] and e[1] <= ended + SLACK
                     and not e[2].startswith("step")]
            names = [name for *_, name in inner]
            mine = [2 * rank, 2 * rank + 1]
            assert [name for name in names if "ward" in name] == [f"{way} {i}" for i in mine for way in ("forward", "backward")]
            assert sorted(set(names) - {name for name in names if "ward" in name}) == [
                "exchange of the count", "exchange of the loss", "update", "wait for gradients"]
            phases = sum(e[1] - e[0] for e in inner)
            assert phases <= ended - began + 10 * SLACK


def test_each_bucket_is_ready_starts_and_ends_in_this_order(profiled):
    _, trace = profiled
    for rank in range(3):
        events = [e for e in trace["traceEvents"] if e["pid"] == rank and e["ph"] in "be"]
        names = {e["id2"]["local"] for e in events}
        assert names == {f"bucket {i}" for i in range(4)}     # two layers' weights and biases
        for name in names:
            times = defaultdict(list)
            for e in events:
                if e["id2"]["local"] == name:
                    times[e["name"], e["ph"]].append(e["ts"])
            order = [(name, "b"), ("its turn", "b"), ("its turn", "e"), ("exchange", "b"), ("exchange", "e"), (name, "e")]
            for a, b in zip(order, order[1:]):
                assert len(times[a]) == len(times[b]) == 12
                assert all(x <= y for x, y in zip(times[a], times[b])), (a, b)
            assert sum(times[("exchange", "e")]) > sum(times[("exchange", "b")])


def test_inspect_says_where_it_is_and_overwrite_deletes_it(profiled, tmp_path):
    run, _ = profiled
    found = mpirun(1, "-m", "mpitrain", "inspect", run)
    assert f"profile: {run / 'trace.json'} (open it in ui.perfetto.dev)" in found.out
    result = train(1, write(tmp_path), f"run.out={run}", "train.steps=2", "--overwrite")
    assert result.rc == 0 and not (run / "trace.json").exists()


def test_a_run_that_is_stopped_leaves_its_trace(tmp_path):
    job = start(2, write(tmp_path), "run.out=a", "train.steps=100000", "--profile")
    job.wait_for("step 20/")
    job.signal(signal.SIGUSR1)
    assert job.finish().rc == 85
    kept = [name for *_, name in spans(read(tmp_path / "a"), 1)["compute"] if name.startswith("step")]
    assert 0 < len(kept) <= timeline.KEPT


def test_only_the_last_steps_are_kept_and_the_update_is_cut_where_the_last_bucket_landed():
    listen = Spans()
    for i in range(timeline.KEPT + 5):
        with listen(Spans.STEP, f"step {i}"):
            pass
    assert len(listen.groups) == timeline.KEPT and listen.groups[0][0].name == "step 5"
    times = StepTimes([1.0, 1.5], [1.0, 1.5], [2.0, 4.0], 1.75)
    group = [Span("compute", "gradients and update", 2.5, 6.0), Span("step", "step 1", 0.0, 7.0)]
    assert list(cut_update(group, times)) == [Span("compute", "wait for gradients", 2.5, 4.0),
                                              Span("optimizer", "update", 4.0, 6.0), Span("compute", "step 1", 0.0, 7.0)]
    assert list(bucket_times(times)) == [("bucket 0", 1.0, 1.0, 2.0, 0.25), ("bucket 1", 1.5, 1.5, 4.0, 2.0)]


def test_what_follows_backward_is_in_a_span_from_its_beginning_to_its_end(monkeypatch):
    """On a clock that only moves when told to: by 3 s in the update, by 2 s in the exchange of the loss."""
    now = [100.0]
    monkeypatch.setattr(timeline, "perf_counter", lambda: now[0])

    def passes(seconds, value=None):
        now[0] += seconds
        return value

    outcome = {"lr": 0.1, "grad_norm": None, "comm_exposed_s": 0.0}
    trainer = Trainer(pipeline=SimpleNamespace(run=lambda batches, flags: np.ones(1), waited_s=0.0,
                                               tallies=SimpleNamespace(take=lambda: np.zeros(0))),
                      update=SimpleNamespace(begin=lambda: None, finish=lambda again: passes(3.0, outcome)),
                      channel=SimpleNamespace(size=2, rank=0,
                                              prepare=lambda message, name: SimpleNamespace(run=lambda: passes(2.0))),
                      loader=None, evaluator=None, plan=None, span=(listen := Spans()))
    with listen(Spans.STEP, "step 1"):
        trainer.train_step([None])
    assert [(span.name, span.began, span.ended) for span in listen.groups[-1]] == [
        ("gradients and update", 100.0, 103.0), ("exchange of the loss", 103.0, 105.0), ("step 1", 100.0, 105.0)]


def test_a_span_that_nobody_listens_to_costs_next_to_nothing():
    with no_span("compute", "x") as nothing:
        assert nothing is None
    assert no_span("compute", "x") is no_span("data", "y")


def test_times_are_moved_to_the_clock_of_rank_0_and_start_at_zero():
    found = {"spans": [["compute", "step 1", 107.0, 109.0]], "buckets": [["bucket 0", 107.5, 108.0, 108.5, 0.25]]}
    events = rank_events(0, {"spans": [["compute", "step 1", 101.0, 102.0]], "buckets": []}, Offset(0.0, 0.0))
    trace = finish_trace(events + rank_events(1, found, Offset(5.0, 0.001)), [Offset(0.0, 0.0), Offset(5.0, 0.001)])
    assert spans(trace, 0)["compute"] == [(0.0, 1e6, "step 1")] and spans(trace, 1)["compute"] == [(1e6, 3e6, "step 1")]
    at = {(e["name"], e["ph"]): e["ts"] for e in trace["traceEvents"] if e["ph"] in "be"}
    assert at[("bucket 0", "b")] == 1.5e6 and at[("exchange", "b")] == 2e6 and at[("bucket 0", "e")] == 2.5e6
    assert trace["otherData"]["clock_error_s"] == [0.0, 0.001]
