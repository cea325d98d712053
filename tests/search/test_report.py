"""The report of a study, against the records that it is made of: as text, as one HTML file, and as lines while it runs."""

from __future__ import annotations

import re
import statistics
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from acted import accuracy, decisions
from standing import mpirun
from studies import STUDY, journal

from mpitrain.cli import main
from mpitrain.errors import CheckpointError, MissingError, UsageError
from mpitrain.search.decisions import Decisions
from mpitrain.search.drawing import scale_of
from mpitrain.search.front import Objective
from mpitrain.search.journal import Journal
from mpitrain.search.progress import StudyProgress
from mpitrain.search.pruners import PRUNERS, Done, Promote, Start
from mpitrain.search.report import Report, read_report
from mpitrain.search.report_html import html_of
from mpitrain.search.report_lines import report_lines, timeline
from mpitrain.search.table import Record, failure, result

BEGAN = 1_000_000.0
TWO = [Objective("accuracy", higher=True), Objective("ms", higher=False)]
LOSS = [Objective("loss", higher=False)]


def header(made: Decisions, **more: Any) -> Record:
    how = {"sampler": "random", "pruner": "asha", "eta": 3, "rungs": list(made.table.epochs), "order": "free",
           "objective": [one.text for one in made.table.objectives]}
    return {"trials": made.table.planned, "search": how, "higher": [one.higher for one in made.table.objectives], **more}


def acted_study(folder: Path, *, objectives: list[Objective] = TWO, groups: int = 2, fails: int = 5,
                trials: int = 27) -> list[Record]:
    """The journal of a study on groups of two ranks: a job takes a second for each epoch, and half a second goes by before the
    next; trial `fails` fails. All of its records."""
    made = decisions(PRUNERS["asha"](3), trials=trials, objectives=objectives)
    records: list[Record] = [{"kind": "job", "event": "begins", "groups": groups, "ranks": 2 * groups, "time": BEGAN}]
    free, busy = [BEGAN] * groups, dict[int, tuple[float, Start | Promote]]()
    while True:
        for group in range(groups):
            if group not in busy:
                action, new = made.next()
                records += [{**record, "time": free[group]} for record in new]
                if isinstance(action, Start | Promote):
                    epochs = made.table.epochs
                    worked = epochs[action.rung] - (epochs[action.trial.reached] if action.trial.reached >= 0 else 0)
                    busy[group] = (free[group] + 0.5 + worked, action)
                elif isinstance(action, Done) and not busy:
                    Journal(folder / "journal.jsonl").create(header(made))
                    Journal(folder / "journal.jsonl").append(*records)
                    return records
        group = min(busy, key=lambda one: busy[one][0])
        now, action = busy.pop(group)
        trial, rung = action.trial, action.rung
        about = {"group": group, "time": now, "busy_s": now - free[group] - 0.5}
        found = accuracy(trial, rung)
        values = {"accuracy": found, "loss": 1 - found, "ms": float(trial.values["train.batch_size"])}
        records.append(failure(trial.id, rung, "E_NAN", "<b>nan</b>", **about) if trial.id == fails else
                       result(trial.id, rung, values, **about))
        made.apply(records[-1])
        free[group] = now


def test_the_text_has_the_front_the_rungs_and_the_use_of_the_groups(tmp_path: Path) -> None:
    records = acted_study(tmp_path)
    report, last = read_report(tmp_path), [r for r in records if r["kind"] == "result" and r["rung"] == 2]
    said = list(report_lines(report))
    assert "27 of 27 trials have started, 1 failed (E_NAN 1)" in said[1]
    beaten = {a["trial"] for a in last for b in last
              if b["values"]["accuracy"] >= a["values"]["accuracy"] and b["values"]["ms"] <= a["values"]["ms"] and a is not b}
    front = {r["trial"] for r in last} - beaten
    assert {trial.id for trial in report.front()} == front
    assert {int(line.split()[1]) for line in said if line.startswith("  trial ")} == front
    first = [r["values"]["accuracy"] for r in records if r["kind"] == "result" and r["rung"] == 0]
    promoted = sum(r["kind"] == "promote" and r["rung"] == 1 for r in records)
    row = next(line.split() for line in said[said.index(next(line for line in said if line.startswith("epochs "))):]
               if line.startswith("1 "))
    assert row == ["1", "26", str(promoted), f"{max(first):.4f}", f"{statistics.median(first):.4f}"]
    busy, until = sum(r.get("busy_s", 0) for r in records), max(r["time"] for r in records)
    assert report.utilisation() == pytest.approx(busy / (2 * (until - BEGAN)))
    assert sum(span.stop - span.start for span in report.spans()) == pytest.approx(busy)
    assert f"at work {busy / (2 * (until - BEGAN)):.1%} of the time" in "\n".join(said)
    assert [line for line in said if line.startswith("trial ")][0].split() == [
        "trial", "state", "epochs", "accuracy", "-ms", "optimizer.lr", "model.hidden", "train.batch_size"]


def test_the_best_so_far_falls_where_less_is_better(tmp_path: Path) -> None:
    acted_study(tmp_path, objectives=LOSS)
    report = read_report(tmp_path)
    best = [value for _, value in report.best_so_far()]
    assert best == sorted(best, reverse=True) and len(best) > 1
    assert min(trial.results[2]["loss"] for trial in report.table.trials if 2 in trial.results) == \
        report.front()[0].results[2]["loss"]


def test_a_timeline_has_a_letter_for_each_piece_of_the_time(tmp_path: Path) -> None:
    acted_study(tmp_path, groups=1, fails=-1, trials=3)
    report = read_report(tmp_path)
    line = timeline(report.spans(), report.seconds())
    letters = [sum(max(0.0, min((i + 1) * report.seconds() / 60, s.stop) - max(i * report.seconds() / 60, s.start))
                   for s in report.spans()) / (report.seconds() / 60) for i in range(60)]
    assert all((letter == "#") == (share > 0.93) and (letter == " ") == (share < 0.08) for letter, share in zip(line, letters)
               if not 0.9 < share < 0.96 and not 0.05 < share < 0.1)


class Tags(HTMLParser):
    """The tags that a page opens and has not closed, and all that it would load."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.loads = list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "action", "data")]
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_its_marks_are_the_trials(tmp_path: Path) -> None:
    records = acted_study(tmp_path)
    page = html_of(read_report(tmp_path))
    tags = Tags(page)
    assert tags.open == [] and tags.loads == [] and "http" not in page and "<script" not in page
    drawings = [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    last = [r for r in records if r["kind"] == "result" and r["rung"] == 2]
    front = drawings[0].findall("circle")
    assert len(front) == len(last) and sum("stroke" in c.attrib for c in front) == len(read_report(tmp_path).front())
    outcomes = [r for r in records if r["kind"] in ("result", "fail")]
    work = next(d for d in drawings if d.attrib["aria-label"] == "what the groups were at work on")
    bars, scale = work.findall("rect"), (960 - 20 - 70) / read_report(tmp_path).seconds()
    assert len(bars) == len(outcomes)
    assert sum(float(bar.attrib["width"]) for bar in bars) == pytest.approx(scale * sum(r["busy_s"] for r in outcomes), rel=0.01)
    tried = [d for d in drawings if d.attrib["aria-label"].startswith("accuracy against ") and d is not drawings[0]]
    assert len(tried) == 3 and all(len(d.findall("circle")) == 26 for d in tried)      # a key each, all but the failed trial
    assert all(0 <= float(c.attrib["cx"]) <= float(d.attrib["width"]) and 0 <= float(c.attrib["cy"]) <= float(d.attrib["height"])
               for d in drawings for c in d.findall("circle"))
    assert page.count("<td>") == 27 * 8


def test_a_plots_points_are_where_their_values_say(tmp_path: Path) -> None:
    scale = scale_of([1e-4, 1e-2], 0, 100)
    assert scale.log and [scale.at(v) for v in (1e-4, 1e-3, 1e-2)] == [0, 50, 100] and [t for _, t in scale.ticks()] == [
        "0.0001", "0.001", "0.01"]
    assert scale_of([2, 4], 100, 0).at(3) == 50 and scale_of(["a", True], 0, 100).at("True") == 75
    assert scale_of([3, 3], 0, 100).at(3) == 50 and scale_of([], 0, 100).ticks() == [(50, "-")]


def test_text_of_a_study_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    made = decisions(PRUNERS["none"](), trials=1, rungs=(1,))
    journal_of = Journal(tmp_path / "journal.jsonl")
    journal_of.create(header(made))
    journal_of.append({"kind": "start", "trial": 0, "rung": 0, "values": {"model.<script>": '"><script>alert(1)</script>'}},
                      result(0, 0, {"accuracy": 0.5}, time=BEGAN))
    page = html_of(read_report(tmp_path))
    assert "<script" not in page and page.count("&lt;script&gt;") > 2


def test_a_study_that_was_killed_is_told_of_as_far_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acted_study(tmp_path)
    whole = (tmp_path / "journal.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    for end in (1, 2, 3, 9, len(lines) - 5):
        (tmp_path / "journal.jsonl").write_bytes(b"".join(lines[:end]) + lines[end][:20])
        report = read_report(tmp_path)
        said = list(report_lines(report))
        assert "the last line was torn" in said[2] and html_of(report)
    assert main(["inspect", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    assert "drawn in" in capsys.readouterr().out and (tmp_path / "report.html").stat().st_size > 5000
    (tmp_path / "journal.jsonl").write_bytes(lines[0] + lines[1][:-5] + b"\n" + lines[2])
    with pytest.raises(CheckpointError, match="line 2 of the journal is damaged"):
        main(["inspect", str(tmp_path)])


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="expected the folder of a study"):
        read_report(tmp_path)
    (tmp_path / "lost" / "trials").mkdir(parents=True)
    for name in ("config.toml", "study.json"):                # what a study leaves, whose journal is lost
        (tmp_path / "lost" / name).write_text("{}")
        with pytest.raises(MissingError, match="the journal is not there: restore it"):
            main(["inspect", str(tmp_path / "lost")])
        (tmp_path / "lost" / name).unlink()
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UsageError, match="--html is for the folder of a study"):
        main(["inspect", str(tmp_path / "run.toml"), "--html", "x.html"])
    Journal(tmp_path / "journal.jsonl").create({"other": 1})
    with pytest.raises(CheckpointError, match="header does not say what was searched"):
        read_report(tmp_path)
    with pytest.raises(UsageError, match="--ranks is for a configuration"):
        main(["inspect", str(tmp_path), "--ranks", "2"])


def told_lines(records: list[Record], every: float, *, watched: bool = False, began: float = BEGAN) -> list[tuple[float, str]]:
    """The lines of a study's progress, and when they came."""
    now, said = [began], list[tuple[float, str]]()
    progress = StudyProgress(every, watched=watched, tell=lambda text: said.append((now[0], text)), clock=lambda: now[0])
    table = decisions(PRUNERS["none"](), objectives=TWO).table
    for record in records:
        table.apply(record)
        now[0] = max(now[0], record["time"])
        progress(record, table)
    progress.finish()
    return said


@pytest.mark.parametrize(("every", "watched", "expected"), [(10.0, False, 10.0), (10.0, True, 1.7), (0.0, False, 0.0)])
def test_lines_of_progress_come_as_often_as_asked_and_at_the_end(tmp_path: Path, every: float, watched: bool,
                                                                 expected: float) -> None:
    records = acted_study(tmp_path)
    said, until = told_lines(records, every, watched=watched), max(r["time"] for r in records)
    outcomes = [r for r in records if r["kind"] in ("result", "fail")]
    gaps = [b - a for (a, _), (b, _) in zip(said[:-2], said[1:-1])]      # the last line comes at the end
    assert min(gaps) >= expected and said[-1][0] == until
    assert len(said) <= 2 + (until - BEGAN) / expected if expected else len(said) == len(outcomes)
    at = ", ".join(f"{epochs}: {sum(r['kind'] == 'result' and r['rung'] == rung for r in records)}"
                   for rung, epochs in enumerate((1, 3, 9)))
    best = read_report(tmp_path).table.best()
    assert best is not None and f"(trial {best.id}, epoch 9)" in said[-1][1] and "ETA" not in said[-1][1]
    assert said[-1][1].startswith(f"study 27/27 trials, 1 failed; epochs {at}; best accuracy") and "ETA about" in said[0][1]


def test_records_of_an_earlier_job_are_not_progress(tmp_path: Path) -> None:
    records = acted_study(tmp_path)
    said = told_lines(records, 0.0, began=BEGAN + 20)
    assert len(said) == sum(r["kind"] in ("result", "fail") and r["time"] >= BEGAN + 20 for r in records)


def test_a_study_on_two_groups_tells_of_itself_in_lines_and_is_inspected(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout of a job is no terminal here: whole lines alone come through the launcher."""
    (tmp_path / "study.toml").write_text(STUDY)
    done = mpirun(2, "-m", "mpitrain", "search", tmp_path / "study.toml", "run.out=study", "log.progress_s=0", cwd=tmp_path,
                  timeout=120)
    assert done.rc == 0, done.err
    told = [line for line in done.out.splitlines() if line.startswith("study ")]
    assert told and told[-1].startswith("study 9/9 trials; epochs 1: 9, 2: 3, 4: 1; best accuracy ")
    assert main(["inspect", str(tmp_path / "study")]) == 0
    said, results = capsys.readouterr().out, [r for r in journal(tmp_path / "study") if r["kind"] == "result"]
    best = max((r for r in results if r["rung"] == 2), key=lambda r: r["values"]["accuracy"])
    assert f"best after 4 epochs: trial {best['trial']}, accuracy {best['values']['accuracy']:.4f}" in said
    report: Report = read_report(tmp_path / "study")
    assert {span.group for span in report.spans()} == {0, 1} and 0 < (report.utilisation() or 0) <= 1
