"""Text of a model in stages: tokens a second beside one rank, and a model twice a rank's memory on 4 ranks of limited memory.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python benchmarks/generate_ranks.py speed [--layers 12] [--width 768] [--pairs 4]
    python benchmarks/generate_ranks.py memory [--layers 12] [--width 768]

`speed`: 4 texts on 2 ranks with mesh.pp = 2, so 2 groups of 2 go round, in turns with one rank that has 2 texts at a time, whose
speed times 2 is the bound; beside one rank that has all 4 at once; and two ranks that have 2 texts at a time each, by themselves.
A job each, timed from the first token of all texts on.
`memory`: after MPI has started and everything is imported, each rank may have half as much more data (RLIMIT_DATA) as the model's
parameters take, keys and values included. One rank must fail then, and 4 stages must not. Random weights; all texts are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pinned  # first: it sets what NumPy reads

# isort: split
import numpy as np
from largest_model import held, launched

from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.config import changed, load_config, load_run
from mpitrain.data import Transforms
from mpitrain.infer.engine import Engine
from mpitrain.infer.generate import Request, Writer
from mpitrain.infer.sample import Sampling
from mpitrain.models import MODELS
from mpitrain.train.build.saved import SavedModel, save

TEXTS, PROMPT, BLOCK, VOCABULARY, BAR = 4, 8, 128, 256, 0.6


def prepare(folder: Path, layers: int, width: int) -> int:
    """A run with random weights in `folder`; the bytes of its parameters."""
    size: dict[str, Any] = {"layers": layers, "heads": width // 64, "width": width, "block": BLOCK, "vocabulary": VOCABULARY}
    model = MODELS["gpt"](**size)
    model.initialize(1)
    config = load_config(None, ["model.name=gpt", "data.transform=[]"])
    config.model.arguments.clear()                            # the built-in run's keys are the mlp's
    config.model.arguments.update(size)
    save(folder, SavedModel(model.eval().requires_grad_(False), config, 0, Transforms(), {}), {"by": "a benchmark"})
    return 4 * model.count_parameters()


def inside(options: argparse.Namespace) -> int:
    """What each rank of a job does; rank 0 prints a JSON line."""
    comm = start().comm
    config = changed(load_run(options.folder, []), train={"threads": 1}, mesh={"pp": options.stages})
    before = held()
    if options.limit:
        said = Path("/proc/self/status").read_text()
        data = int(said.partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (data + options.limit, data + options.limit))
    prompts = np.random.default_rng(2).integers(0, VOCABULARY, (TEXTS, PROMPT)).tolist()
    with Engine(config, options.folder, None, options.slots, VOCABULARY) as engine:
        times: list[float] = []
        requests = [Request(number, prompt, options.tokens, Sampling(), lambda token: times.append(time.perf_counter()))
                    for number, prompt in enumerate(prompts)]
        list(Writer(engine).run(requests))
        groups = -(-TEXTS // options.slots)                   # that one rank has one after the other
        counted = [times[i * len(times) // groups:(i + 1) * len(times) // groups] for i in range(groups)]
        first = TEXTS // groups                               # the first tokens of a group come with its prompts
        rate = sum(len(part) - first for part in counted) / sum(part[-1] - part[first - 1] for part in counted)
        grown = engine.session.control.gather_objects(held() - before)
    if comm.rank == 0:
        texts = hashlib.sha256(json.dumps([request.made for request in requests]).encode()).hexdigest()
        print(json.dumps({"rate": rate, "texts": texts, "grown": grown}), flush=True)
    return 0


def job(folder: Path, ranks: int, slots: int, tokens: int, limit: int = 0, stages: int = 0) -> dict[str, Any]:
    return launched(__file__, ranks, "inside", "--folder", str(folder), "--slots", str(slots), "--tokens", str(tokens),
                    "--limit", str(limit), "--stages", str(stages or ranks))


def speed(folder: Path, options: argparse.Namespace) -> int:
    found: dict[str, list[dict[str, Any]]] = {"one": [], "stages": [], "batch": [], "copies": []}
    for _ in range(options.pairs):
        for name, ranks, stages, slots in (("one", 1, 1, TEXTS // 2), ("stages", 2, 2, TEXTS), ("batch", 1, 1, TEXTS),
                                           ("copies", 2, 1, TEXTS // 2)):
            found[name].append(job(folder, ranks, slots, options.tokens, stages=stages))
    assert len({record["texts"] for records in found.values() for record in records}) == 1, "other texts"
    rates = {name: statistics.median(record["rate"] for record in records) for name, records in found.items()}
    shares = [b["rate"] / a["rate"] / 2 for a, b in zip(found["one"], found["stages"])]
    copies = statistics.median(b["rate"] / a["rate"] for a, b in zip(found["one"], found["copies"]))
    beside = statistics.median(b["rate"] / a["rate"] for a, b in zip(found["batch"], found["stages"]))
    print(f"2 stages, {TEXTS} texts: {rates['stages']:.1f} tok/s; one rank, {TEXTS // 2} texts at a time: {rates['one']:.1f}: "
          f"{statistics.median(shares):.2f} of twice as much ({min(shares):.2f} to {max(shares):.2f}; bar {BAR}); one rank, "
          f"{TEXTS} at once: {rates['batch']:.1f}: {beside:.2f} times; the same texts. Two ranks that "
          f"share nothing but the memory have {copies:.2f} of one's speed each")
    return 0 if statistics.median(shares) >= BAR else 1


def memory(folder: Path, parameters: int, options: argparse.Namespace) -> int:
    whole = job(folder, 1, TEXTS, options.tokens)
    try:
        job(folder, 1, TEXTS, options.tokens, parameters // 2)
        print("ONE RANK DID NOT FAIL")
        return 1
    except subprocess.CalledProcessError as error:
        print(f"one rank, {parameters / 2**21:.0f} MiB more data allowed than before the model: exit {error.returncode}")
    stages = job(folder, 4, TEXTS, options.tokens, parameters // 2)
    assert stages["texts"] == whole["texts"], "other texts"
    print(f"4 stages, {parameters / 2**20:.0f} MiB of parameters, {parameters / 2**21:.0f} MiB more data allowed on each rank: "
          f"runs, at most {max(stages['grown']) / 2**20:.0f} MiB grown (one rank alone: {whole['grown'][0] / 2**20:.0f}), "
          f"{stages['rate']:.1f} tok/s; the same texts")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "memory", "inside"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=4)
    for name, kind in (("folder", Path), ("slots", int), ("limit", int), ("stages", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "inside":
        return inside(options)
    with tempfile.TemporaryDirectory(prefix="generate-") as name:
        parameters = prepare(Path(name) / "run", options.layers, options.width)
        found = speed if options.what == "speed" else lambda folder, options: memory(folder, parameters, options)
        return found(Path(name) / "run", options)


if __name__ == "__main__":
    assert pinned
    Process().run(main)
