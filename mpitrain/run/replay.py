"""Replaying a step of a run: each rank computes it by itself, from a checkpoint, and the bits are compared.

    the ranks differ now                   -> the node of that rank
    the ranks agree, the record differs    -> the code, its numerics, or something that happened then

One rank computes a global batch micro-batch by micro-batch. So the loss has the bits of any data-parallel run, wherever the
parameters have them: in the step after a checkpoint always, in later ones if gradients are added in one order on any ranks.

Where the run went back to a checkpoint (`train.on_nan = "rewind"`) that is gone, an older one, or the beginning, leads to the
same state: the replay keeps it when it passes there, and goes back to it as the run did.
"""

from __future__ import annotations

import json
import math
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend import asnumpy
from mpitrain.checkpoint import folders, store
from mpitrain.checkpoint.hashes import array_line, array_sha256, total_sha256
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job import guard
from mpitrain.comm.job.together import on_first
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config
from mpitrain.config.sections import CommConfig, MeshConfig
from mpitrain.errors import CheckpointError, DesyncError, MissingError, UsageError
from mpitrain.parallel.pipeline.late import parts_of
from mpitrain.placement.place import micro_batches
from mpitrain.run.session import Session
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.from_config import build, checkpoint_folder
from mpitrain.train.machine import fingerprint

Found = dict[str, Any]                   # plain numbers and hashes of a step, as a rank computes them
COMPARED = ("loss", "grad_norm", "gradient_sha256")


def replay(config: Config, folder: Path, comm: Any, files: Callable[[], Any], *, step: int,
           micro_batch: int | None = None) -> tuple[Found, DesyncError | None]:
    """The numbers of a step of the run in `folder`, or of one micro-batch of it, and what is wrong with them, if anything is.

    Steps count from 1, micro-batches from 0. All ranks of `comm` call it; `files` says on rank 0 what is in the data files. It
    communicates. Raises what the step raised.
    """
    mesh, run = Mesh(comm, dp=comm.size), RunFolder(folder)
    channel = mesh.channel(mesh.axes, "replay")
    about = on_first(channel, lambda: read_about(run, step))
    description = on_first(channel, files)
    found = None if about["checkpoint"] is None else load(run.checkpoints / about["checkpoint"])
    back = {one["step"]: one["to"] for one in about["run"].get("rewinds", ())}
    own = compute(by_itself(config, about["run"]), description, found, step, micro_batch, back)
    everyone = channel.gather_objects({**own, "rank": comm.rank, "host": socket.gethostname()})
    mesh.close()
    recorded, last = about["recorded"], about["parameters"]
    if micro_batch is not None or own_parameters(config, about["run"], found) or \
            not comparable(config, about["run"], own, step, sums=False):
        recorded, last = {}, None
    elif not comparable(config, about["run"], own, step, sums=True):
        recorded, last = {"loss": recorded["loss"]} if recorded else {}, None
    changes = fingerprint.changes(about["run"].get("numerics"), own["numerics"]) if own["numerics"] else ""
    wrong = odd_ranks(everyone, recorded, step) or (None if micro_batch is not None else other_than_recorded(
        own, recorded, last, step, len(everyone), changes))
    shown = {name: value for name, value in own.items() if name not in ("numerics", "parameters")}
    return {"step": step, "micro_batch": micro_batch, "ranks": len(everyone), **shown, "recorded": recorded}, wrong


def read_about(run: RunFolder, step: int) -> Found:
    """The records of a run: run.json, the line of the step, the checkpoint before it, and the parameters after it, as hashes."""
    try:
        about = json.loads(run.run_json.read_text())
        lines: list[Found] = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    except FileNotFoundError as error:
        raise MissingError("expected the folder of a run, with run.json and metrics.jsonl", file=error.filename) from None
    except ValueError as error:
        raise CheckpointError(f"the records of the run are damaged: {error}", file=run.path) from None
    if step < 1:
        raise UsageError(f"steps count from 1, found --step {step}")
    if about.get("status") == "done" and step > about["steps"]:
        raise UsageError(f"the run has {about['steps']:,} steps, found --step {step}")
    line: Found = next((line for line in lines if line.get("step") == step and "split" not in line), {})
    before, after = None, None
    for path in folders.candidates(run.checkpoints):            # the newest first
        at = folders.step_of(path)
        if at > step or before is not None or any(back["to"] < at < back["step"] < step for back in about.get("rewinds", ())):
            continue
        try:
            checkpoint = load(path)
            checkpoint.verify()
        except CheckpointError:
            continue                                          # an older one, or the beginning, takes longer
        if checkpoint.step == step:
            after = {name.partition("/")[2]: array_sha256(checkpoint.read(name)) for name in checkpoint.arrays
                     if name.startswith("parameters/")}
        else:
            before = path.name
    return {"run": about, "recorded": {name: line[name] for name in COMPARED if line.get(name) is not None},
            "checkpoint": before, "parameters": after}


def by_itself(config: Config, about: Found) -> Config:
    """The configuration of one rank that computes the micro-batches of all ranks of the run."""
    if config.workers.count:
        raise UsageError("replay computes the micro-batches of a step, and a federation's step is a round of workers; train it "
                         "again, on one rank too: it has the same bits")
    if config.privacy.unit != "none":
        raise UsageError("replay computes the rows of a step again, and those of a private run are drawn by a key that nothing "
                         "has written down; see what a run without [privacy] does in its place")
    grid = Grid({axis: int(length) for axis, length in about["mesh"].items()})
    if grid.n_sites > 1:
        raise UsageError(f"replay computes a step of one model, and this run has {grid.n_sites} sites with one each; train it "
                         "again on as many ranks: it has the same bits")
    n_micro = micro_batches(grid, config.mesh, config.train)
    return replace(config, mesh=MeshConfig(), comm=CommConfig(), optimizer=replace(config.optimizer, offload="none"),
                   train=replace(config.train, micro_batches=n_micro, threads=int(about["threads"])))


def own_parameters(config: Config, about: Found, found: Checkpoint | None) -> bool:
    """Whether the run's ranks computed with other parameters than checkpoints have: rounded ones, or each with its own."""
    drifted = found is not None and any(name.startswith("drift/") for name in found.arrays)
    return about["ranks"] > 1 and (bool(config.comm.compress_parameters) or drifted)


def comparable(config: Config, about: Found, own: Found, step: int, *, sums: bool) -> bool:
    """Whether the run computed the loss (`sums`: the sum of gradients, too) in the order of one rank."""
    cut = any(about["mesh"].get(axis, 1) > 1 for axis in ("tp", "cp", "ep"))
    same_order = config.train.reproducible == "layout" or about["ranks"] == 1
    return not cut and (same_order or (not sums and step == own["from"] + 1))


def compute(config: Config, description: Any, found: Checkpoint | None, step: int, micro_batch: int | None,
            back: Mapping[int, int]) -> Found:
    """This rank's numbers, without any other rank. `back` has the steps at which the run went back, and where to."""
    from mpi4py import MPI
    session = Session(config, MPI.COMM_SELF)
    session.open(config, lambda: description)
    job = build(config, session.inputs, session.mesh, quiet=True)
    if config.distil.teaches:
        from mpitrain.train.build.teacher import give_teacher  # few runs have one
        give_teacher(job, config, session.inputs)
    if found is not None:
        job.resume(found)
    elif config.model.init_from:
        job.load(store.latest(checkpoint_folder(config.folder / config.model.init_from), purpose=store.START))
    policy, load_step, start = job.policy, job.trainer.loader.load, job.policy.step
    policy.want_norm, norm = True, None
    with np.errstate(all="ignore"):
        repeat(job, found, step, back)
        batch = load_step(step - 1)
        if micro_batch is None:
            mean, _, norm, *_ = job.trainer.train_step(batch)
            loss = float(mean)
        else:
            chosen = [micro for micro in batch if micro.index == micro_batch]
            if not chosen:
                raise UsageError(f"step {step} has micro-batches 0 to {batch[-1].index}, found --micro-batch {micro_batch}")
            policy.begin()
            loss = math.fsum(parts_of(job.trainer.pipeline.run(chosen)))
            policy.reducer.finish()
    hashes = gradients_of(job)
    parameters = {p.key: array_sha256(asnumpy(p.master)) for p in job.context.stage.model.parameters()}
    session.close()
    return {"from": start, "loss": loss, "loss_hex": float(loss).hex(), "grad_norm": norm,
            "gradient_sha256": total_sha256(hashes.values()), "gradients": {name: line.split("\t")[3].strip()
                                                                            for name, line in hashes.items()},
            "parameters": parameters, "numerics": job.numerics}


def repeat(job: Job, found: Checkpoint | None, step: int, back: Mapping[int, int]) -> None:
    """The steps before `step`, with the returns of `back`; one that the run has not recorded goes to `found`."""
    states = {} if found is None else {found.step: found}
    with tempfile.TemporaryDirectory(prefix="mpitrain-replay-") as scratch:
        for done in range(job.policy.step, step - 1):
            if done in back.values() and done not in states:
                states[done] = load(store.save(Path(scratch), done, job.state.pieces(), {}))
            job.trainer.train_step(job.trainer.loader.load(done))
            to = back.get(done + 1, -1 if found is None else found.step)
            if job.policy.blamed and job.config.train.on_nan == "rewind" and to in states:
                job.state.restore(states[to])


def gradients_of(job: Job) -> dict[str, str]:
    """The lines of `checkpoint.hashes` of all gradients, by the parameters' names."""
    flat = asnumpy(job.policy.reducer.gradients)
    return {s.name: array_line(s.name, flat[s.start:s.stop].reshape(s.shape)) for s in job.policy.layout.segments}


def odd_ranks(everyone: Sequence[Found], recorded: Found, step: int) -> DesyncError | None:
    """The error that names the ranks whose bits are not those of the record, or, without one, of most ranks."""
    groups: dict[tuple[Any, ...], list[Found]] = {}
    for one in everyone:
        groups.setdefault(tuple(one[name] for name in COMPARED), []).append(one)
    if len(groups) == 1:
        return None
    like_record = [group for group in groups.values() if recorded and all(group[0][name] == recorded[name] for name in recorded)]
    largest = sorted(groups.values(), key=len, reverse=True)
    right = like_record[0] if len(like_record) == 1 else largest[0] if len(largest[0]) > len(largest[1]) else None
    odd = [one for one in everyone if right is None or one not in right]
    one, other = odd[0], (right or largest[1])[0]
    names = ", ".join(f"rank {found['rank']} ({found['host']})" for found in odd)
    first = next((f'the gradient of "{name}"' for name, sha in one["gradients"].items() if other["gradients"][name] != sha), "")
    where = "the loss" if one["loss"] != other["loss"] else first or "the norm"
    whose = ("the ranks compute different bits, and neither is known to be right" if right is None else
             "that node, not the code: the others have the recorded bits" if like_record else "that node, not the code")
    return DesyncError(f"{names} computes other bits than rank {other['rank']} ({other['host']}), first in {where}: {whose}",
                       step=step)


def other_than_recorded(own: Found, recorded: Found, last: Found | None, step: int, ranks: int,
                        changes: str) -> DesyncError | None:
    """The error of a step that all ranks compute alike now, and the run computed otherwise."""
    names = [name for name in recorded if own[name] != recorded[name]]
    found = [f"{name} {recorded[name]!r} recorded, {own[name]!r} now" for name in names]
    changed = [name for name, sha in (last or {}).items() if own["parameters"].get(name) != sha]
    if changed:
        found.append(f'{len(changed)} parameters of the checkpoint after the step, first "{changed[0]}"')
    if not found:
        return None
    who = f"{ranks} ranks now agree on other bits than recorded" if ranks > 1 else \
        "other bits than recorded, on one rank; run it on two hosts to tell a node from the code"
    return DesyncError(f"{who}: {'; '.join(found)}. The code or its numerics have changed, or it was a fault that is gone"
                       f"{f' ({changes})' if changes else ''}", step=step)


def raise_alike(error: DesyncError | None) -> None:
    """Raises an error that all ranks have."""
    if error is not None:
        with guard.symmetric():
            raise error
