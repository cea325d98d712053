"""A whole run on a device: the same losses as on the host."""

import re
from pathlib import Path

import numpy as np
import pytest
from fakegpu import open_device
from runs import GPT, SMALL, record, steps, write, write_tokens
from standing import ON_DEVICE, mpirun, train

from mpitrain.checkpoint import store
from mpitrain.train.intervals import Plan, Step
from mpitrain.train.observers.observer import Watched
from mpitrain.train.observers.record import Console


@pytest.mark.parametrize(("n", "model"), [(1, "mlp"), (2, "mlp"), (2, "gpt"), (2, "pp")])
def test_a_run_on_the_stand_in_has_the_losses_of_the_host(tmp_path: Path, n: int, model: str) -> None:
    """Whole runs: reading, steps with clipping and dropout, evaluation, checkpoints; messages of 2 ranks go through the host. One
    is in TF32, which the stand-in multiplies as float32."""
    if model == "mlp":
        config, more = write(tmp_path), ["train.steps=12"]
    else:
        write_tokens(tmp_path)
        config, more = write(tmp_path, GPT), ["mesh.pp=2", "model.dropout=0.0"] * (model == "pp")
    assert train(n, config, *more, "run.out=cpu").rc == 0
    result = mpirun(n, ON_DEVICE, "train", config, *more, "train.device=gpu", "run.out=gpu",
                    *["train.precision=tf32"] * (n == 1), cwd=tmp_path)
    assert result.rc == 0, result.err
    on_host, on_device = (steps(tmp_path / name) for name in ("cpu", "gpu"))
    np.testing.assert_allclose([line["loss"] for line in on_device], [line["loss"] for line in on_host], rtol=2e-5)
    np.testing.assert_allclose([line["grad_norm"] for line in on_device], [line["grad_norm"] for line in on_host], rtol=2e-4)


def test_gradients_added_up_by_nccl_or_sent_from_memory_of_the_gpu_are_those_sent_from_the_host(tmp_path: Path) -> None:
    """With several buckets and micro-batches; the sum of two ranks has no order, so the bits are equal."""
    config = write(tmp_path)
    ways = ["library=mpi", "library=nccl", "device_buffers=on"]
    for way in ways:
        result = mpirun(2, ON_DEVICE, "train", config, "train.device=gpu", "train.steps=12", "train.micro_batches=4",
                        "comm.bucket_mb=0.002", f"comm.{way}", f"run.out={way}", cwd=tmp_path)
        assert result.rc == 0, result.err
    assert len({record(tmp_path / way)["parameters_sha256"] for way in ways}) == 1


def test_nccl_is_refused_for_two_ranks_of_one_gpu_and_on_the_host(tmp_path: Path) -> None:
    config = write(tmp_path)
    result = mpirun(2, ON_DEVICE, "train", config, "train.device=gpu", "comm.library=nccl", cwd=tmp_path,
                    env={"MPITRAIN_FAKE_BUS": "0"})
    assert result.rc == 78 and "ranks 0 and 1 have one GPU" in result.error_lines[0]
    on_host = train(2, config, "comm.library=nccl")
    assert on_host.rc == 78 and 'comm.library = "nccl" adds up gradients of train.device = "gpu"' in on_host.error_lines[0]


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_added_up_in_the_memory_of_one_gpu_are_those_of_direct_messages(tmp_path: Path, n: int) -> None:
    """To the bit, with several buckets and micro-batches, of which ranks of three have different numbers."""
    config = write(tmp_path)
    for library in ("mpi", "ipc"):
        result = mpirun(n, ON_DEVICE, "train", config, "train.device=gpu", "train.steps=12", "train.micro_batches=4",
                        "comm.algorithm=direct", "comm.bucket_mb=0.002", f"comm.library={library}", f"run.out={library}",
                        cwd=tmp_path, env={"MPITRAIN_FAKE_BUS": "0"})
        assert result.rc == 0, result.err
    sent, shared = (record(tmp_path / name) for name in ("mpi", "ipc"))
    assert sent["parameters_sha256"] == shared["parameters_sha256"]
    assert [run["choices"]["exchange"]["way"] for run in (sent, shared)] == ["messages, direct", "the memory of one GPU"]


def test_ranks_that_do_not_share_a_gpu_cannot_add_up_in_its_memory(tmp_path: Path) -> None:
    config = write(tmp_path)
    result = mpirun(2, ON_DEVICE, "train", config, "train.device=gpu", "comm.library=ipc", cwd=tmp_path)
    assert result.rc == 78 and 'comm.library = "ipc" is for ranks that share a GPU, but rank 0 has ' in result.error_lines[0]
    on_host = train(2, config, "comm.library=ipc")
    assert on_host.rc == 78 and 'comm.library = "ipc" adds up gradients of train.device = "gpu"' in on_host.error_lines[0]


def test_an_mpi_that_crashes_with_memory_of_the_gpu_is_refused_in_one_line(tmp_path: Path) -> None:
    config, crashes = write(tmp_path), {"MPITRAIN_FAKE_MPI": "import os; os.kill(os.getpid(), 11)"}
    result = mpirun(2, ON_DEVICE, "train", config, "train.device=gpu", "comm.device_buffers=on", cwd=tmp_path, env=crashes)
    assert result.rc == 78 and len(result.error_lines) == 1
    assert ('comm.device_buffers = "on", but MPI takes no addresses of GPU memory on rank 0: a process that sent some to itself '
            'was ended by SIGSEGV; set it "off", or ') in result.error_lines[0]


NET = """
import os, signal
from mpitrain import nn
class Fails(nn.Linear):
    steps = 0
    def forward(self, x):
        Fails.steps += self.training
        if Fails.steps == 5 and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))
        return super().forward(x)
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", Fails(64, 32)), ("b", nn.Linear(32, 10)))
"""


@pytest.mark.parametrize(("how", "rc", "said"), [("SIGKILL", 137, "rank=1/3"), ("SIGSTOP", 75, "E_STALL rank=1/3")])
def test_a_rank_that_dies_or_stands_still_while_others_wait_for_its_gradients_ends_the_job(tmp_path: Path, how: str, rc: int,
                                                                                          said: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))
    result = mpirun(3, ON_DEVICE, "train", config, "train.device=gpu", "train.graph=off", "comm.library=ipc",
                    "train.stall_s=4", cwd=tmp_path,
                    env={"MPITRAIN_FAKE_BUS": "0", "HOW": how})
    assert result.rc == rc and said in result.error_lines[0], result.err


PLANTED = """
import os
from mpitrain import nn
from mpitrain.autograd import Function
from mpitrain.backend import asnumpy
from mpitrain.kernels.optimizer import FOUND, SCALE
from mpitrain.parallel.policies.loss_scale import LossScale
RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
decide, steps = LossScale.finish, []
def finish(self, *given):
    numbers = decide(self, *given)
    steps.append(f"{asnumpy(numbers)[FOUND]:.0f} {asnumpy(numbers)[SCALE]:.0f}")
    with open(f"{os.environ['TOLD']}-{RANK}", "a") as file:
        print(steps[-1], hash(asnumpy(Planted.last.weight.master).tobytes()), file=file)
    return numbers
LossScale.finish = finish
class Spoil(Function):
    half = "own"
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, grad):
        grad = grad * 1
        if RANK == "1" and len(steps) + int(os.environ["BEGIN"]) in (3, 7):
            grad[0, 0] = float("inf")
        return grad,
class Planted(nn.Linear):
    def forward(self, x):
        Planted.last = self
        return Spoil.apply(super().forward(x))
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", Planted(64, 32)), ("b", nn.Linear(32, 10)))
"""


def test_a_gradient_of_one_rank_that_is_infinite_in_float16_leaves_out_the_step_of_all(tmp_path: Path) -> None:
    """Whole runs of 2 ranks: in steps 4 and 8 parameters keep their bits on both, and the scale halves on both; also in one
    that goes on after its 6th."""
    (tmp_path / "net.py").write_text(PLANTED)
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))
    for name, begin, end, *more in (("whole", 0, 10), ("cut", 0, 6), ("cut", 6, 10, "--resume")):
        result = mpirun(2, ON_DEVICE, "train", config, "train.device=gpu", "train.precision=float16", "train.graph=off",
                        "optimizer.schedule=constant", f"train.steps={end}", f"run.out={name}", *more, cwd=tmp_path,
                        env={"TOLD": str(tmp_path / f"{name}-told"), "PYTHONHASHSEED": "0", "BEGIN": str(begin)})
        assert result.rc == 0, result.err
    one, two, cut = ((tmp_path / name).read_text() for name in ("whole-told-0", "whole-told-1", "cut-told-1"))
    assert one == two == cut, "on both ranks, and where the run went on"
    found, scales, weights = zip(*map(str.split, one.splitlines()))
    assert [step for step in range(10) if found[step] == "1"] == [3, 7]
    assert scales == ("65536",) * 3 + ("32768",) * 4 + ("16384",) * 3
    assert [step for step in range(9) if weights[step] == weights[step + 1]] == [3, 7]        # told before the update of a step
    assert store.latest(tmp_path / "whole/checkpoints").read("loss_scale/left_out") == 2
    assert record(tmp_path / "whole")["parameters_sha256"] == record(tmp_path / "cut")["parameters_sha256"]


def test_a_loss_that_is_not_finite_ends_a_run_on_a_device_and_nothing_is_saved_after_it(tmp_path: Path) -> None:
    result = mpirun(1, ON_DEVICE, "train", write(tmp_path), "train.device=gpu", "run.out=gpu", "optimizer.lr=1e30",
                    "log.every=100", "optimizer.clip_norm=0.0", "optimizer.warmup_steps=0", "checkpoint.every=25", cwd=tmp_path)
    assert result.rc == 79 and "the loss of micro-batch 0, from row 0 of the batch on, is " in result.error_lines[0]
    assert not list((tmp_path / "gpu").glob("checkpoints/step-*"))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
def test_a_run_on_the_gpu_has_the_losses_of_the_host(tmp_path, n):
    open_device("cupy")
    curves = []
    for device in ("cpu", "gpu"):
        result = train(n, write(tmp_path), f"train.device={device}", f"run.out={device}", timeout=120)
        assert result.rc == 0, result.err
        curves.append([line["loss"] for line in steps(tmp_path / device)])
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_auto_trains_where_there_is_no_gpu_and_gpu_says_what_is_missing(tmp_path):
    config = write(tmp_path)
    assert train(1, config, "train.device=auto", "train.steps=8").rc == 0
    result = train(1, config, "train.device=gpu", "run.out=g", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.rc == 78 and 'train.device = "gpu", but CuPy' in result.error_lines[0]


@pytest.mark.parametrize("clip_norm", [0.0, 1e35])
def test_a_loss_of_a_device_that_is_not_finite_is_recorded_with_its_own_step(tmp_path: Path, clip_norm: float) -> None:
    """Whoever reads it first, in that step or one later: the host's record of a bad step must not be lost on a device."""
    config = write(tmp_path)
    result = mpirun(1, ON_DEVICE, "train", config, "train.device=gpu", "train.steps=9", "train.eval_every=9", "log.every=9",
                    "optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.schedule=constant", f"optimizer.clip_norm={clip_norm}",
                    "run.out=run", cwd=tmp_path)
    assert result.rc == 79 and "the loss of micro-batch" in result.error_lines[0], result.err
    steps_of = [int(path.stem.partition("-")[2]) for path in (tmp_path / "run" / "errors").glob("step-*.json")]
    assert len(steps_of) == 1 and re.search(rf"step={steps_of[0]}\b", result.error_lines[0])


def test_the_console_asks_for_the_loss_of_a_device_only_where_it_shows_it() -> None:
    read: list[int] = []

    class Late:
        def __float__(self) -> float:
            read.append(step)
            return 1.0
    console = Console(1e9)
    plan = Plan(steps=5, steps_per_epoch=5, batch_size=1, eval_every=0, checkpoint_every=0, keep_best=False, log_every=0)
    console.begin(Watched(0, 1, 0, plan, None, print))
    for step in range(1, 6):
        console.after_step(step, Step(Late(), 1e-3, None, 0.0), 1.0)
    assert read == [1, 5]
