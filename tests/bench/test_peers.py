"""The benchmarks beside PyTorch and JAX: peers train the same models, wrong ones are refused, records say what was measured."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, Job, Result, clean_environment, mpirun

from mpitrain.bench.workloads import WORKLOADS

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make bench-train installs it)")
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch_side  # noqa: E402


def run(folder: Path, script: str, *arguments: str) -> Result:
    environment = {k: v for k, v in clean_environment().items() if not k.startswith("OPENBLAS_")}
    return Job([sys.executable, str(ROOT / "benchmarks" / script), *arguments], environment, folder).finish(170)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "r.json").read_text().splitlines()]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_the_formulas_count_what_pytorch_counts(name: str) -> None:
    """On its device without memory, where nothing is computed."""
    from torch.utils.flop_counter import FlopCounterMode
    workload = WORKLOADS[name]
    x, y = (torch.from_numpy(array).to("meta") for array in workload.samples(workload.batch, seed=0))
    with torch.device("meta"):
        model = torch_side.MODELS[name]()
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        outputs = model(x)
        torch.nn.functional.cross_entropy(outputs.flatten(0, -2), y.flatten()).backward()
    assert counter.get_total_flops() == workload.flops


def test_parameters_of_another_model_are_refused() -> None:
    values = [parameter.detach().numpy() for parameter in torch_side.MODELS["lenet"]().parameters()]
    torch_side.set_parameters(torch_side.MODELS["lenet"](), values)
    with pytest.raises(SystemExit, match=r"0.bias \(6,\) is not \(7,\): the two models are not the same"):
        torch_side.set_parameters(torch_side.MODELS["lenet"](), [values[0], np.zeros(7, np.float32), *values[2:]])


def test_each_precision_of_pytorch_trains() -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((4, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 4))]
    values = [parameter.detach().numpy().copy() for parameter in torch_side.lenet().parameters()]
    losses = {}
    for name, options in {"plain": {}, "channels last": {"channels_last": True}, "autocast": {"precision": "autocast"},
                          "medium": {"precision": "medium"}}.items():
        side = torch_side.TorchSide(torch_side.lenet(), batches, values, lr=1e-3, decay=0.01, **options)
        losses[name] = [side.step() for _ in range(3)]
        assert losses[name][2] < losses[name][0] and torch.get_float32_matmul_precision() == "highest"
    assert losses["channels last"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["autocast"] == pytest.approx(losses["plain"], rel=2e-2) and losses["autocast"] != losses["plain"]


@pytest.mark.parametrize("name", ["mlp", "lenet", "gpt-nano",
                                  *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet20", "gpt2"))])
def test_jax_trains_the_same_models(name: str) -> None:
    pytest.importorskip("jax", reason="JAX is not installed (make bench-train installs it)")
    import jax_side
    workload = WORKLOADS[name]
    if name == "gpt2":                                        # with biases; as it is, it has 124 million parameters
        model, ours = torch_side.GPT(2, 2, 16, 8, 11, bias=True), jax_side.partial(jax_side.gpt, layers=2, heads=2, bias=True)
        tokens = np.random.default_rng(0).integers(0, 11, (2, 3, 8))
        batches = [(tokens[0], tokens[1])]
    else:
        model, ours, batches = torch_side.MODELS[name](), jax_side.MODELS[name], [workload.samples(2, seed=0)]
    values = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    sides = torch_side.TorchSide(model, batches, values, lr=1e-3, decay=0.01), jax_side.JaxSide(ours, batches, values, lr=1e-3,
                                                                                                decay=0.01)
    theirs, losses = ([side.step() for _ in range(3)] for side in sides)
    assert losses == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_steps_are_measured_beside_pytorchs(tmp_path: Path) -> None:
    result = run(tmp_path, "train_vs_peers.py", "--models", "lenet", "--peers", "channels_last,eager", "--rounds", "1", "--steps",
                 "1", "--json", "r.json")
    assert result.rc == 0, result.out + result.err
    found = records(tmp_path)
    assert [(r["bench"], r["model"], r["peer"]) for r in found] == [("train_vs_peers", "lenet", name)
                                                                    for name in ("eager", "channels_last")]
    for r in found:
        assert r["ratio"] == pytest.approx(r["peer_seconds"] / r["seconds"]) and r["loss_difference"] <= 1e-4
        assert (r["ranks"], r["threads"], r["precision"]) == (1, 1, "float32")
    assert "lenet: batch 128; the losses of the first 4 steps differ by" in result.out


@pytest.mark.slow
def test_two_ranks_are_measured_beside_distributed_data_parallel(tmp_path: Path) -> None:
    result = run(tmp_path, "train_vs_peers.py", "--ranks", "2", "--models", "lenet", "--rounds", "1", "--steps", "1",
                 "--json", "r.json")
    assert result.rc == 0, result.out + result.err
    assert [(r["peer"], r["ranks"]) for r in records(tmp_path)] == [("ddp", 2), ("ddp_channels_last", 2)]


@pytest.mark.slow
def test_memory_is_that_of_processes_of_their_own(tmp_path: Path) -> None:
    result = run(tmp_path, "train_vs_peers.py", "--memory", "--models", "lenet", "--peers", "eager", "--rounds", "2",
                 "--json", "r.json")
    assert result.rc == 0, result.out + result.err
    ours, theirs = records(tmp_path)
    assert (ours["side"], theirs["side"], ours["ratio"]) == ("ours", "eager", 1.0)
    assert theirs["ratio"] == pytest.approx(ours["peak_mb"] / theirs["peak_mb"])
    for r in (ours, theirs):
        assert r["before_mb"] > 10 and r["more_mb"] == pytest.approx(r["peak_mb"] - r["before_mb"]) and r["more_mb"] > 0
    assert theirs["before_mb"] > ours["before_mb"] + 20, "PyTorch is loaded in its own process alone"


@pytest.mark.slow
def test_a_peer_that_trains_another_model_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import train_vs_peers
from mpitrain.comm.job import guard
from torch import nn
import torch_side
was = torch_side.lenet
def smooth():
    model = was()
    model[1] = nn.SiLU()
    return model
torch_side.MODELS["lenet"] = smooth
sys.argv[1:] = ["--models", "lenet", "--peers", "eager", "--rounds", "1"]
guard.LIMIT = 60.0             # PyTorch takes seconds to end on a busy machine
guard.Process().run(train_vs_peers.main)
""")
    environment = {"OPENBLAS_CORETYPE": "", "OPENBLAS_L2_SIZE": ""}
    result = mpirun(1, program, cwd=tmp_path, env=environment, timeout=170)
    assert result.rc == 79 and len(result.error_lines) == 1, result.out + result.err
    assert re.search(r"step=\d: lenet: our loss is", result.error_lines[0])
    assert "the two do not train the same model" in result.error_lines[0]


@pytest.mark.slow
def test_ops_are_measured_beside_pytorchs(tmp_path: Path) -> None:
    result = run(tmp_path, "kernels_vs_torch.py", "--ops", "softmax,cross_entropy,layer_norm,max_pool,adamw", "--pairs", "1",
                 "--json", "r.json")
    assert result.rc == 0, result.out + result.err
    found = records(tmp_path)
    both = ["forward", "forward + backward"]
    assert [(r["op"], r["what"]) for r in found] == [
        *((op, what) for op in ("softmax", "cross_entropy", "layer_norm", "max_pool") for what in both), ("adamw", "update")]
    for r in found:
        assert r["ratio"] == pytest.approx(r["torch_seconds"] / r["seconds"]) and 0 <= r["difference"] <= 2e-5


@pytest.mark.slow
def test_convolutions_are_measured_beside_pytorchs(tmp_path: Path) -> None:
    result = run(tmp_path, "convolution_vs_torch.py", "--shapes", "lenet1,down3", "--batch", "2", "--pairs", "1",
                 "--json", "r.json")
    assert result.rc == 0, result.out + result.err
    found = records(tmp_path)
    assert [(r["shape"], r["what"], r["peer"]) for r in found] == [
        (shape, what, peer) for shape, products in (("lenet1", ("forward", "weight")), ("down3", ("forward", "input", "weight")))
        for what in products for peer in ("torch", "channels_last")]
    for r in found:
        assert r["ratio"] == pytest.approx(r["torch_seconds"] / r["seconds"]) and 0 <= r["difference"] <= 2e-5
        flops = {"lenet1": 2 * 2 * 6 * 25 * 28 ** 2, "down3": 2 * 2 * 64 * 288 * 64}[r["shape"]]
        assert r["flops"] == flops and r["peak_fraction"] < 1


@pytest.mark.slow
def test_a_wrong_op_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import kernels_vs_torch
from mpitrain.comm.job import guard
from mpitrain.ops.activation import Softmax
was = Softmax.backward
Softmax.backward = staticmethod(lambda ctx, grad: was(ctx, 2 * grad))
sys.argv[1:] = ["--ops", "softmax", "--pairs", "1"]
guard.LIMIT = 60.0             # PyTorch takes seconds to end on a busy machine
guard.Process().run(kernels_vs_torch.main)
""")
    result = mpirun(1, program, cwd=tmp_path, env={"OPENBLAS_CORETYPE": "", "OPENBLAS_L2_SIZE": ""}, timeout=170)
    assert result.rc == 79 and len(result.error_lines) == 1, result.out + result.err
    assert "softmax: gradient 1 differs from PyTorch's by" in result.error_lines[0]


@pytest.mark.slow
def test_the_products_of_a_step_are_measured_beside_pytorchs(tmp_path: Path) -> None:
    result = run(tmp_path, "products_vs_torch.py", "--models", "mlp", "--rounds", "1", "--json", "r.json")
    assert result.rc == 0, result.out + result.err
    found = records(tmp_path)
    forward, first, second = [(128, 1024, 784), (128, 1024, 1024), (128, 10, 1024)], (1024, 784, 128), (1024, 1024, 128)
    assert [(r["m"], r["n"], r["k"]) for r in found if r["role"] == "forward"] == forward
    assert {(r["m"], r["n"], r["k"]) for r in found if r["role"] == "weight gradient"} == {first, second, (10, 1024, 128)}
    assert {(r["m"], r["n"], r["k"]) for r in found if r["role"] == "input gradient"} == {(128, 1024, 1024), (128, 1024, 10)}
    assert all(r["count"] == 1 and 0 < r["difference"] <= 1 and r["bias"] == (r["role"] == "forward") for r in found)


@pytest.mark.slow
def test_a_wrong_product_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import products_vs_torch
from mpitrain.comm.job import guard
was = products_vs_torch.product
def nearly(x, y, bias=None, out=None, operands=""):
    result = was(x, y, bias, out, operands)
    result *= 1.001
    return result
products_vs_torch.product = nearly
sys.argv[1:] = ["--models", "mlp", "--rounds", "1"]
guard.LIMIT = 60.0             # PyTorch takes seconds to end on a busy machine
guard.Process().run(products_vs_torch.main)
""")
    result = mpirun(1, program, cwd=tmp_path, env={"OPENBLAS_CORETYPE": "", "OPENBLAS_L2_SIZE": ""}, timeout=170)
    assert result.rc == 79 and len(result.error_lines) == 1, result.out + result.err
    assert "128 x 1024 x 784 (forward): our product differs from float64 by" in result.error_lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments", "message"), [
    ("train_vs_peers.py", ["--models", "lenat"], '--models knows no "lenat" (did you mean "lenet"?); choose from mlp'),
    ("train_vs_peers.py", ["--peers", "keras"], '--peers knows no "keras"; choose from eager, channels_last, compiled, jax'),
    ("kernels_vs_torch.py", ["--pairs", "0"], "--pairs must be at least 1, found 0"),
    ("products_vs_torch.py", ["--models", "gpt3"], '--models knows no "gpt3"'),
    ("products_vs_torch.py", ["--rounds", "0"], "--rounds must be at least 1, found 0")])
def test_a_mistake_is_one_line(script: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(tmp_path, script, *arguments)
    assert result.rc == 64 and message in result.err, result.out + result.err
