"""`mpitrain bench published`: its bars, that its data are what the sources say, and that nothing starts MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mpitrain.bench.published import megatron, nets, vision
from mpitrain.bench.published.command import SETS, made
from mpitrain.bench.published.comparison import Comparison, Point, table
from mpitrain.bench.published.gpt import Gpt, Layout, step_of, work_of
from mpitrain.cli import main
from mpitrain.comm.job import signals
from mpitrain.errors import UsageError
from mpitrain.machines import load_machine


@cache
def comparisons() -> dict[str, Comparison]:
    return {found.title: found for name in SETS for found in made(name)}


def of(word: str) -> Comparison:
    return next(found for title, found in comparisons().items() if word in title)


def test_horovods_efficiencies_at_512_gpus_are_within_5_points() -> None:
    barred = [point for point in of("Horovod").points if point.bar]
    assert [point.what for point in barred] == [f"{name}, 512 GPUs" for name in ("inception_v3", "resnet101", "vgg16")]
    assert [point.published for point in barred] == [0.90, 0.90, 0.68] and all(abs(point.error) <= 0.05 for point in barred)


def test_each_of_the_15_points_on_ec2_is_within_10_percent() -> None:
    points = of("EC2").points
    assert len(points) == 15 and all(abs(point.error) <= 0.10 for point in points)
    assert vision.EC2_BAR == 0.10


def test_a_dgx_with_parameters_on_the_processor_is_within_5_percent() -> None:
    points = [point for point in of("DGX-1").points if ", cpu," in point.what]
    assert len(points) == 9 and all(abs(point.error) <= 0.05 for point in points)


def test_megatrons_ten_models_are_within_12_percent_and_6_in_the_mean() -> None:
    found = of("table 1")
    assert len(found.points) == 10 and found.mean_error <= 0.06 and max(abs(point.error) for point in found.points) <= 0.12


def test_zero3_is_within_25_percent_and_in_the_right_order() -> None:
    rows = [point for point in of("table 2").points if point.what.endswith("ZeRO-3")]
    assert len(rows) == 6 and all(abs(point.error) <= 0.25 for point in rows)
    for size in ("174.6", "529.6"):
        rates = [point.predicted for point in rows if point.what.startswith(size)]
        assert rates == sorted(rates, reverse=True)


def test_what_the_text_says_of_the_figures_is_what_is_predicted() -> None:
    claims = of("table 2").claims
    assert [claim.text.partition(":")[0] for claim in claims] == ["figure 13", "figure 14", "figure 15", "figure 12", "figure 17",
                                                                  "table 2"]
    assert [claim.text for claim in claims if not claim.holds] == []


def test_parameters_and_flops_by_formula_are_the_tables() -> None:
    data = table("megatron")
    for numbers in data["rows"]:
        row = dict(zip(data["columns"], numbers))
        gpt = Gpt(row["layers"], row["width"], row["heads"])
        assert round(gpt.parameters / 1e9, 1) == row["billions"]
    gpt = Gpt(96, 12_288, 96)
    work = work_of(gpt, Layout(1, 1, 1, 1), load_machine("dgx-a100"))
    assert round(gpt.parameters / 1e9, 1) == 174.6
    moved = (9 * 96 * 2048 + 16 * 12_288 + 22 * 12_288) * 2048 * 96 * 4 / 2.039e12      # bytes beside products: four passes
    products = work.stages[0].compute - moved
    assert products * 312e12 * 0.66 == pytest.approx(gpt.flops(1), rel=1e-9)


def test_models_of_the_curves_have_the_parameters_and_multiply_adds_of_torchvisions_tables() -> None:
    known = {"inception_v3": (23_834_568, 5.713), "resnet50": (25_557_032, 4.089), "resnet101": (44_549_160, 7.801),
             "resnet152": (60_192_808, 11.514), "vgg16": (138_357_544, 15.470), "alexnet": (61_100_840, 0.714)}
    for name, (parameters, giga) in known.items():
        net = nets.net(name)
        assert net.parameters == parameters and round(net.multiply_adds / 1e9, 3) == giga
        shares = [sum(share[i] for share in net.shares) for i in (0, 1)]
        assert shares == pytest.approx([1.0, 1.0])
    layers, parameters = nets.inception()
    assert parameters == sum(weights for weights, _ in layers) + 2 * sum(
        outputs for _, outputs, *_ in table("inception_v3")["layers"][:-1]) + 1000


def test_gradients_of_the_last_layers_are_ready_first() -> None:
    gradients = nets.net("vgg16").gradients()
    assert gradients[2][1] > 0.7 * sum(nbytes for _, nbytes in gradients) and gradients[2][0] < 0.01        # its widest layer
    assert gradients[-1][0] == pytest.approx(1.0) and [ready for ready, _ in gradients] == sorted(ready for ready, _ in gradients)


def test_what_is_ready_when_the_network_is_free_travels_together() -> None:
    net = nets.Net("made up", 40, 4, ((0.25, 0.25),) * 4)     # four layers of 40 bytes, a quarter of the backward each
    slow = vision.fused(net, 1.0, lambda nbytes: 10.0, 1000, 0.1)
    assert [(bucket.nbytes, bucket.ready) for bucket in slow] == [(40, pytest.approx(0.3)), (120, pytest.approx(10.3))]
    fast = vision.fused(net, 1.0, lambda nbytes: 0.01, 1000, 0.05)
    assert [bucket.nbytes for bucket in fast] == [40] * 4
    cut = vision.fused(net, 1.0, lambda nbytes: 10.0, 80, 0.1)
    assert [bucket.nbytes for bucket in cut] == [40, 80, 40]


def test_errors_of_shares_are_differences_and_of_others_relative() -> None:
    assert Point("a", "share", 0.9, 0.88).error == pytest.approx(-0.02)
    assert Point("a", "images/s", 200, 220).error == pytest.approx(0.1)
    assert Point("a", "images/s", 200, 220, 0.05).within is False and Point("a", "images/s", 200, 220).within


def test_a_wrong_network_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars are about something: links of a tenth of the speed miss them."""
    def slow(name: str) -> object:
        machine = load_machine(name)
        levels = tuple(vision.replace(level, beta=10 * level.beta) for level in machine.levels)
        return vision.replace(machine, levels=levels)
    monkeypatch.setattr(vision, "load_machine", slow)
    assert all(not point.within for point in vision.horovod().points if point.bar)
    assert sum(not point.within for point in vision.ec2().points) == 15
    gpt, layout = Gpt(40, 6144, 48), Layout(8, 1, 256, 1024)
    machine = load_machine("dgx-a100")
    assert step_of(gpt, layout, machine).total < 0.8 * step_of(gpt, layout, slow("dgx-a100")).total     # type: ignore[arg-type]


def test_each_stage_of_a_cut_has_its_layers() -> None:
    assert [megatron.chunks_of(*sizes) for sizes in ((24, 1), (48, 2), (60, 4), (105, 35), (64, 64))] == [1, 2, 3, 3, 1]


WITHOUT_MPI = "import sys; sys.modules['mpi4py'] = None; from mpitrain.cli import main; sys.exit(main(sys.argv[1:]))"


def bench(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_MPI, "bench", "published", *words], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, **environment})


def test_the_command_prints_and_writes_without_mpi_and_on_one_rank_only(tmp_path: Path) -> None:
    result = bench(tmp_path, "--sets", "horovod", "--json", "r.json")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Horovod on Pascal GPUs") and "spread" in lines[1] and lines[1].startswith("machine pascal-roce")
    assert lines[-2].startswith("mean error")
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["bench"] == "published" and "docs/benchmarks.rst" in record["source"] and record["machine"] == "pascal-roce"
    assert [point["bar"] for point in record["points"]].count(0.05) == 3 and record["points"][1]["published"] == 0.90
    other = bench(tmp_path, "--sets", "horovod", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    assert (other.returncode, other.stdout) == (0, "")


def test_an_unknown_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ignore", lambda: None)
    with pytest.raises(UsageError, match='--sets knows no "horovd"'):
        main(["bench", "published", "--sets", "horovd"])
