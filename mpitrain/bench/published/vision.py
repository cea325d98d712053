"""Horovod's efficiencies and TensorFlow's curves: data-parallel steps of image models, predicted by the step model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from mpitrain.bench.published.comparison import Comparison, Point, by_number, table
from mpitrain.bench.published.nets import FORWARD, SINGLE, Net, net
from mpitrain.machines import MachineFile, load_machine
from mpitrain.schedules.level_times import Level, level_seconds
from mpitrain.schedules.parameter_servers import server_seconds
from mpitrain.schedules.step_simulate import Bucket, Collective, Stage, Work, simulate_step
from mpitrain.schedules.stragglers import straggler_factor

WORKERS = ("dp",)
EFFICIENCY_BAR, EC2_BAR = 0.05, 0.10


def horovod() -> Comparison:
    """Efficiency of a ring over all GPUs, whose fused all-reduces travel behind the backward."""
    data = table("horovod")
    machine, batch, constants = load_machine(data["machine"]), data["batch"], data["constants"]
    points = []
    for row in data["rows"]:
        model = net(row["model"])
        alone = batch / single_gpu(model, batch, machine)
        for gpus, published in by_number(row["efficiency"]).items():
            predicted = alone / ring_step(model, alone, gpus, machine, constants)
            points.append(Point(f"{row['model']}, {gpus} GPUs", "share", published, predicted, EFFICIENCY_BAR * (gpus == 512)))
        for gpus, published in by_number(row.get("images_s", {})).items():
            predicted = gpus * batch / ring_step(model, alone, gpus, machine, constants)
            points.append(Point(f"{row['model']}, {gpus} GPUs", "images/s", published, predicted))
    return Comparison(data["title"], data["source"], machine, points)


def single_gpu(model: Net, batch: int, machine: MachineFile) -> float:
    """Images/s of one GPU: those of the DGX-1's by the ratio of peaks, of other models by multiply-adds between its ResNets."""
    data = table("tensorflow_dgx1")
    ratio = machine.flops["float32"] / load_machine(data["machine"]).flops["float32"]
    known = {row["model"]: by_number(row["images_s"])[1] for row in data["rows"] if row["batch"] == batch}
    if model.name in known:
        return ratio * known[model.name]
    small, large = net("resnet50"), net("resnet152")
    place = (model.multiply_adds - small.multiply_adds) / (large.multiply_adds - small.multiply_adds)
    return ratio / (1 / known["resnet50"] * (1 - place) + 1 / known["resnet152"] * place)


def ring_step(model: Net, compute: float, gpus: int, machine: MachineFile, constants: Mapping[str, float]) -> float:
    """Seconds of a step on so many GPUs; `compute` those of its compute."""
    backward = (1 - FORWARD) * compute

    def seconds(nbytes: float) -> float:
        return level_seconds("all_reduce", gpus, 1, nbytes, machine.levels, "ring")
    buckets = fused(model, backward, seconds, constants["fusion_bytes"], constants["cycle_s"])
    work = Work((Stage(FORWARD * compute, backward, buckets=buckets),))
    return simulate_step(work, {"dp": gpus}, "1f1b", 1, machine, algorithm="ring").total


def fused(model: Net, backward: float, seconds: Callable[[float], float], most: float, cycle: float) -> tuple[Bucket, ...]:
    """What travels together: when the network is free and the clock ticks, all that is ready, up to `most` bytes, a larger
    gradient alone. The buckets are ready when they leave, which may be after the backward."""
    waiting, found, free = model.gradients(), [], 0.0
    while waiting:
        leaves = ceil(max(free, waiting[0][0] * backward) / cycle - 1e-9) * cycle
        nbytes = waiting.pop(0)[1]
        while waiting and waiting[0][0] * backward <= leaves and nbytes + waiting[0][1] <= most:
            nbytes += waiting.pop(0)[1]
        found.append(Bucket(nbytes, leaves / backward, axes=WORKERS))
        free = leaves + seconds(nbytes)
    return tuple(found)


def ec2() -> Comparison:
    """From a server of 8 GPUs to 2, 4 and 8: gradients go to parameter servers, and parameters come back behind a barrier.
    Stragglers are those among all GPUs beyond those of one server, which its images/s have in them."""
    data = table("tensorflow_ec2")
    machine = load_machine(data["machine"])
    a_server = machine.levels[0].ranks
    points = []
    for row in data["rows"]:
        model, images = net(row["model"]), by_number(row["images_s"])
        mean = a_server * row["batch"] / images[a_server] / straggler_factor(a_server, machine.spread)
        servers = by_number(row.get("servers", {}))
        for gpus in (gpus for gpus in images if gpus > a_server):
            hosts = gpus // a_server
            step = server_step(model, mean, hosts, int(servers.get(gpus, hosts)), machine)
            step += mean * (straggler_factor(gpus, machine.spread) - 1)
            points.append(Point(f"{row['model']}, batch {row['batch']}, {gpus} GPUs", "images/s", images[gpus],
                                gpus * row["batch"] / step, EC2_BAR))
    return Comparison(data["title"], data["source"], machine, points)


def server_step(model: Net, compute: float, hosts: int, servers: int, machine: MachineFile) -> float:
    """Seconds of a step of so many hosts without stragglers; one aggregated gradient leaves a host."""
    link = machine.levels[-1]
    buckets = tuple(Bucket(nbytes, ready, axes=WORKERS, seconds=server_seconds(nbytes, hosts, servers, link).push)
                    for ready, nbytes in model.gradients())
    whole = model.parameters * SINGLE
    pull = Collective("from_servers", WORKERS, whole, seconds=server_seconds(whole, hosts, servers, link).pull)
    work = Work((Stage(FORWARD * compute, (1 - FORWARD) * compute, buckets=buckets),), after=(pull,))
    return simulate_step(work, {"dp": hosts}, "1f1b", 1, replace(machine, spread=0.0)).total


def dgx1() -> Comparison:
    """From one GPU to 2, 4 and 8 in a server: a ring, or parameters on the processor."""
    data = table("tensorflow_dgx1")
    machine = load_machine(data["machine"])
    points = []
    for row in data["rows"]:
        model, images = net(row["model"]), by_number(row["images_s"])
        for gpus in (gpus for gpus in images if gpus > 1):
            compute = row["batch"] / images[1]
            step = one_server_step(model, compute, gpus, row["update"], machine, data["constants"])
            points.append(Point(f"{row['model']}, {row['update']}, {gpus} GPUs", "images/s", images[gpus],
                                gpus * row["batch"] / step))
    return Comparison(data["title"], data["source"], machine, points)


def one_server_step(model: Net, compute: float, gpus: int, update: str, machine: MachineFile,
                    constants: Mapping[str, float]) -> float:
    """Seconds of a step of the GPUs of one server. The processor adds up what all of them write, and they read the parameters in
    the order in which the next forward needs them, behind its compute."""
    beta = constants["pcie_beta"] * min(gpus, constants["pcie_sharing"])
    node: Level = machine.levels[0]

    def seconds(nbytes: float) -> float | None:
        if update == "nccl":
            return None
        return max(node.alpha + nbytes * beta, gpus * nbytes * constants["cpu_gamma"])
    buckets = tuple(Bucket(nbytes, ready, axes=WORKERS, seconds=seconds(nbytes)) for ready, nbytes in model.gradients())
    whole = model.parameters * SINGLE
    read = () if update == "nccl" else (Collective("read", WORKERS, whole, seconds=node.alpha + whole * beta),)
    work = Work((Stage(FORWARD * compute, (1 - FORWARD) * compute, fetched_forward=read, buckets=buckets),))
    return simulate_step(work, {"dp": gpus}, "1f1b", 1, machine, algorithm="ring").total
