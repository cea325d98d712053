"""Pieces of benchmarks/gpu.py for two ranks that share a GPU. Every rank runs all of a piece; records of rank 0 count."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from gpu_steps import workload
from gpu_tools import ROUNDS, Bench, Record, in_ranks

from mpitrain import models
from mpitrain.backend import asnumpy
from mpitrain.bench.train import WARM_UP, Training
from mpitrain.bench.workloads import WORKLOADS, Workload
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError
from mpitrain.parallel.gradients.ipc_sum import IpcSum
from mpitrain.parallel.gradients.nccl_sum import NcclSum
from mpitrain.parallel.gradients.replicas import checksum

BUCKET = 1 << 20                             # numbers: 4 MiB, as comm.bucket_mb has them


def slowest(bench: Bench, comm: Any, work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median seconds of the slowest rank."""
    found = []
    for _ in range(bench.size(rounds, 1)):
        bench.device.synchronize()
        comm.Barrier()
        began = time.perf_counter()
        work()
        bench.device.synchronize()
        found.append(max(comm.allgather(time.perf_counter() - began)))
    return statistics.median(found)


@in_ranks("ipc")
def ipc(bench: Bench, comm: Any) -> Iterator[Record]:
    """A sum of as many numbers as GPT-2 has, in the memory of the GPU and by messages; the refusal of NCCL."""
    n, xp = bench.size(124_000_000, 5000), bench.xp
    channel = Channel(comm.Dup(), "gradients", algorithm="direct")
    try:
        NcclSum(channel, bench.device)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    shared = IpcSum(channel, bench.device)
    arena = shared.allocate(4 * n)[:4 * n].view(np.float32)
    there, begin = xp.empty(n, np.float32), xp.asarray(np.random.default_rng(comm.rank).standard_normal(n, dtype=np.float32))
    places = [(start, min(start + BUCKET, n)) for start in range(0, n, BUCKET)]
    named: Any = [SimpleNamespace(name=f"bucket {a}", apart=None) for a, _ in places]
    sums = [shared.prepare(bucket, [arena[a:b]]) for bucket, (a, b) in zip(named, places)]
    messages = [channel.prepare(there[a:b], f"bucket {a} by messages") for a, b in places]

    def run(works: list[Any]) -> None:
        for work in [one.start() for one in works]:
            work.wait()
    arena[...] = begin
    there[...] = begin
    run(sums)
    run(messages)
    wanted = asnumpy(begin)
    channel.allreduce(wanted, name="of the host")
    equal = all(comm.allgather(all(bool((asnumpy(array) == wanted).all()) for array in (arena, there))))
    in_memory, by_messages = (slowest(bench, comm, lambda works=works: run(works)) for works in (sums, messages))
    yield {"what": f"sum of {n} numbers of 2 ranks", "ipc": in_memory, "messages": by_messages, "faster": by_messages / in_memory,
           "equal": equal, "refusal": refusal}
    channel.close()


@in_ranks("staged")
def staged(bench: Bench, comm: Any) -> Iterator[Record]:
    """How much longer a step takes with an exchange by messages, of what that takes alone. Both ranks compute in either."""
    from mpi4py import MPI
    load, sections = workload(bench, "gpt2 4 x 1024"), {"train": {"device": "gpu", "precision": "bfloat16", "graph": "off"}}
    alone = Training(load, MPI.COMM_SELF, sections=sections)
    alone.run(WARM_UP)
    without = slowest(bench, comm, alone.launch, 9)
    alone.close()
    both = Training(load, comm, sections=sections)
    both.run(WARM_UP)
    with_it = slowest(bench, comm, both.launch, 9)
    both.check("staged")
    n = both.model.count_parameters()
    both.close()
    channel, gradients = Channel(comm.Dup(), "gradients"), bench.xp.zeros(n, np.float32)
    sums = [channel.prepare(gradients[a:a + BUCKET], f"bucket {a}") for a in range(0, n, BUCKET)]

    def exchange() -> None:
        for work in [one.start() for one in sums]:
            work.wait()
    exchange()
    seconds = slowest(bench, comm, exchange)
    yield {"what": f"exchange of {n} numbers of 2 ranks by messages", "step": with_it, "step_without": without,
           "exchange": seconds, "exposed": max(0.0, with_it - without) / seconds}
    channel.close()


def scales_of_torch(bench: Bench, steps: int, planted: tuple[int, ...], interval: int) -> list[float]:
    """The scale after each step of torch.amp.GradScaler, where the gradients of those `planted` are infinite."""
    import torch
    parameter = torch.nn.Parameter(torch.ones(1, device=bench.torch))
    optimizer, found = torch.optim.SGD([parameter], lr=1e-3), []
    scaler = torch.amp.GradScaler(bench.torch, init_scale=65536.0, growth_interval=interval)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        if step in planted:
            parameter.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@in_ranks("loss scale")
def loss_scale(bench: Bench, comm: Any) -> Iterator[Record]:
    """An infinite gradient on one of two ranks, in some of 50 steps: who skips, and by which scales, beside PyTorch."""
    steps, planted, interval = 50, (3, 4, 11, 27, 28, 29, 40), 6
    load = Workload(lambda: models.mlp(12, [16], 4), 8, (12,), 4, 1) if bench.tiny else WORKLOADS["mlp"]
    ours = Training(load, comm, sections={"train": {"device": "gpu", "precision": "float16", "graph": "off"}})
    policy, pipeline = ours.job.policy, ours.job.trainer.pipeline
    policy.loss_scale.interval, scale = interval, policy.loss_scale.scale
    pipeline.scale = lambda grad: scale(grad) * (math.inf if step in planted and comm.rank == step % comm.size else 1)
    scales, skipped, alike, before = [], [], True, ""
    for step in range(steps):
        ours.launch()
        after = checksum({"values": policy.values})
        skipped += [step] if after == before else []
        alike &= len(set(comm.allgather((after, float(policy.loss_scale.record()["scale"]))))) == 1
        scales.append(float(policy.loss_scale.record()["scale"]))
        before = after
    yield {"what": f"float16, {steps} steps of 2 ranks, {len(planted)} of them with an infinite gradient on one",
           "skipped": skipped == list(planted), "alike": alike,
           "as_torch": scales == scales_of_torch(bench, steps, planted, interval)}
    ours.close()
