"""A fixed list of short runs and what each must end with, to the bit: the net under a change that should alter no result.

    python benchmarks/fixed_runs.py --out before.json                     # at the commit to compare with: some minutes
    python benchmarks/fixed_runs.py --compare before.json                 # after the change; --quick for under a minute
    python benchmarks/fixed_runs.py --keep half                           # before: run folders as if stopped halfway
    python benchmarks/fixed_runs.py --resume half                         # after: they go on to the same end

Each case is one `mpirun -n N python -m mpitrain train`. Kept are the hashes of parameters and buffers, the final metrics, how
gradients were summed, and every logged line less its times; of a run that is refused, the exit code and the message. A difference
is a line, and the exit status 1. Bits depend on the CPU and its BLAS, so the answers belong to one machine. Another checkout's
code runs with --checkout FOLDER, best by that checkout's Python, since mpirun is looked for beside the interpreter.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import layout_matrix
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("samples_per_s", "step_s", "comm_exposed_s", "comm_exposed_share", "seconds", "peak_rss_mb")
STEPS = 8
TIMEOUT = 180                            # seconds of one run; they take 1 to 8

MODELS = {
    "mlp": 'name = "mlp"\ninputs = 64\nhidden = [48, 32, 24, 16]\noutputs = 10',
    "lenet": 'name = "lenet"\nsize = 16',
    "resnet20": 'name = "resnet20"',
    "gpt": 'name = "gpt"\nlayers = 4\nheads = 4\nwidth = 32\nblock = 16\nvocabulary = 30\ndropout = 0.1',
    "moe": 'name = "gpt"\nlayers = 4\nheads = 4\nwidth = 32\nblock = 16\nvocabulary = 30\nexperts = 4',
    "rod": 'name = "mlp"\ninputs = 16\nhidden = [32, 32]\noutputs = 3\nactivation = "gelu"',
}
DATA = {
    "mlp": 'path = "digits"\ntransform = ["standardise"]', "lenet": 'path = "grey.h5"\ntransform = ["standardise"]',
    "resnet20": 'path = "colour.h5"\naugment = ["flip", "crop"]', "gpt": 'path = "text"\nvalidation = "tail:0.1"',
    "moe": 'path = "text"\nvalidation = "tail:0.1"', "rod": 'path = "rod.h5"\ntransform = ["standardise"]',
}
TRAIN = {                                # batches that micro-batches do not divide, dropout, batch norm, clipping
    "mlp": '[optimizer]\nname = "sgd"\nlr = 0.05\nnesterov = true\nweight_decay = 1e-4\n[train]\nbatch_size = 50',
    "lenet": '[optimizer]\nname = "lamb"\nlr = 0.01\nweight_decay = 0.01\n[train]\nbatch_size = 30',
    "resnet20": '[optimizer]\nname = "sgd"\nlr = 0.1\nweight_decay = 5e-4\n[train]\nbatch_size = 24',
    "gpt": '[optimizer]\nlr = 3e-3\nweight_decay = 0.1\nclip_norm = 0.5\n[train]\nbatch_size = 24',
    "moe": '[optimizer]\nlr = 3e-3\nclip_norm = 0.5\n[train]\nbatch_size = 24',
    "rod": '[optimizer]\nlr = 3e-3\nschedule = "cosine"\nwarmup_steps = 3\n[train]\nloss = "mse"\nbatch_size = 32',
}


QUICK = {"example-digits-2", "layout-mlp-3-65536-polled-node", "layout-gpt-2-4096-left-alone-rank", "mesh-gpt-pp2-dp2",
         "mesh-gpt-dp2-tp2", "mesh-gpt-cp2-dp2", "mesh-moe-ep2-dp2", "sharding-optimizer-mlp-2", "sharding-gradients-mlp-2",
         "sharding-parameters-mlp-2", "node-shared-gpt-2", "offload-file-lenet-2", "wire-bfloat16-2", "optimizer-adamw-2",
         "precision-float64-mlp-2", "recompute-all-2", "resnet20-1"}


@dataclass(frozen=True)
class Case:
    """One run: `config` is a TOML file of the working folder, `options` override its keys, separated by spaces."""

    name: str
    config: str
    ranks: int
    options: str = ""
    steps: int = STEPS


def cases(real: bool) -> list[Case]:
    found = [*examples(real), *layouts(), *meshes(), *kept_parameters(), *messages(), *updates(), *computing()]
    assert len({case.name for case in found}) == len(found) and {case.name for case in found} > QUICK
    return found


def examples(real: bool) -> list[Case]:
    names = ["digits", "simulation", *(("mnist", "shakespeare") if real else ())]
    return [Case(f"example-{name}-{n}", f"examples/{name}", n, steps=40) for name in names for n in (1, 2)]


def layouts() -> list[Case]:
    """The choice of `layout_matrix.py` in which each two settings meet, as runs of the command."""
    progress = {"polled": "poll", "left alone": "auto", "thread": "thread"}
    micro = {"mlp": 16, "lenet": 12, "resnet20": 8, "gpt": 12}
    found = []
    for one in layout_matrix.pairs():
        model, ranks, size, overlap, copies = (one[key] for key in ("model", "ranks", "bucket_bytes", "overlap", "copies"))
        how = "comm.node_shared=true" if copies == "node" else f"comm.progress={progress[overlap]}"
        found.append(Case(f"layout-{model}-{ranks}-{size}-{overlap.replace(' ', '-')}-{copies}", model, ranks,
                          f"train.reproducible=layout train.micro_batches={micro[model]} comm.bucket_mb={size / 2**20} {how}"))
    return found


def meshes() -> list[Case]:
    """Every way to place 4 ranks, and some of 2, 3 and 8; two that are refused."""
    chosen = {"gpt": ("pp=4", "pp=2 dp=2", "pp=2 tp=2", "tp=4", "dp=2 tp=2", "cp=4", "cp=2 dp=2", "cp=2 tp=2", "pp=2 cp=2",
                      "dp=4", "pp=2 schedule=gpipe", "pp=2 schedule=interleaved chunks=2", "pp=2 dp=2 schedule=zb_h1",
                      "pp=2 stages=[4,3]", "tp=2 sequence=true", "pp=2 tp=2 sequence=true", "pp=2 dp=2 tp=2", "pp=2 cp=2 dp=2"),
              "moe": ("ep=4", "ep=2 dp=2", "ep=2 tp=2", "pp=2 ep=2", "ep=2 cp=2", "ep=2", "dp=2"),
              "mlp": ("pp=4", "pp=2 dp=2 schedule=zb_h1", "dp=3", "dp=8", "tp=2 plan={linear0='column',linear1='row'}"),
              "resnet20": ("pp=2 dp=2", "dp=4"), "layout-gpt": ("pp=4", "pp=2 dp=2", "pp=2 tp=2")}
    found = []
    for model, places in chosen.items():
        for mesh in places:
            ranks = math.prod(int(n) for axis, n in re.findall(r"\b(pp|dp|ep|cp|tp)=(\d)", mesh))
            layout = "train.reproducible=layout train.micro_batches=12 " if model == "layout-gpt" else ""
            found.append(Case(f"mesh-{model}-{re.sub('[^a-z0-9_-]', '', mesh.replace(' ', '-'))}", model.removeprefix("layout-"),
                              ranks, layout + " ".join(f"mesh.{part}" for part in mesh.split())))
    return found


def kept_parameters() -> list[Case]:
    """What of parameters and state a rank keeps: shards, one copy per node, a file."""
    found = []
    for kind in ("optimizer", "gradients", "parameters"):
        for name, model, ranks, options in (
                ("mlp-2", "mlp", 2, ""), ("gpt-4", "gpt", 4, "comm.bucket_mb=0.05"), ("gpt-dp2-tp2", "gpt", 4, "mesh.tp=2"),
                ("gpt-dp2-pp2", "gpt", 4, "mesh.pp=2"),
                ("layout-3", "mlp", 3, "train.reproducible=layout train.micro_batches=12"),
                ("lenet-ring-bfloat16-3", "lenet", 3, "comm.algorithm=ring comm.wire_dtype=bfloat16")):
            found.append(Case(f"sharding-{kind}-{name}", model, ranks, f"comm.sharding={kind} {options}"))
    for name, model, ranks, options in (
            ("mlp-2", "mlp", 2, ""), ("mlp-4", "mlp", 4, "comm.bucket_mb=0.02"), ("lenet-3", "lenet", 3, "comm.bucket_mb=0.02"),
            ("gpt-2", "gpt", 2, "comm.bucket_mb=0.02"), ("resnet20-2", "resnet20", 2, ""), ("gpt-dp2-pp2", "gpt", 4, "mesh.pp=2"),
            ("mlp-adamw-clipped-3", "mlp", 3, "optimizer.name=adamw optimizer.clip_norm=0.1")):
        found.append(Case(f"node-shared-{name}", model, ranks, f"comm.node_shared=true {options}"))
    for name, model, ranks, options in (("gpt-1", "gpt", 1, ""), ("lenet-2", "lenet", 2, ""),
                                        ("sharding-2", "gpt", 2, "comm.sharding=parameters")):
        found.append(Case(f"offload-file-{name}", model, ranks, f"optimizer.offload=file {options}"))
    return found


def messages() -> list[Case]:
    algorithms = ("ring", "segmented_ring", "recursive_doubling", "halving_doubling", "direct", "tree", "hierarchical")
    found = [Case(f"algorithm-{name}-{n}", "mlp", n, f"comm.algorithm={name} comm.bucket_mb=0.01")
             for n in (3, 4) for name in algorithms]
    found += [Case(f"wire-{wire}-{n}", "lenet", n, f"comm.algorithm=ring comm.wire_dtype={wire}")
              for wire in ("bfloat16", "float16") for n in (2, 3)]
    return [*found, Case("progress-thread-2", "lenet", 2, "comm.progress=thread"),
            Case("algorithm-mpi-2", "mlp", 2, "comm.algorithm=mpi"),
            Case("buckets-auto-2", "lenet", 2, "comm.bucket_mb=auto comm.algorithm=ring", steps=20)]


def updates() -> list[Case]:
    common = "optimizer.nesterov=false optimizer.clip_norm=1.0 optimizer.lr=0.01 optimizer.decay=matrices"
    found = [Case(f"optimizer-{name}-2", "mlp", 2, f"optimizer.name={name} {common}")
             for name in ("sgd", "adam", "adamw", "rmsprop", "lars", "lamb")]
    found += [Case(f"schedule-{name}-1", "mlp", 1, f"optimizer.schedule={name} optimizer.warmup_steps=3 optimizer.min_lr=0.001")
              for name in ("constant", "step", "linear", "cosine", "one_cycle")]
    found += [Case(f"loss-{name}-2", "rod", 2, f"train.loss={name}") for name in ("mse", "l1", "huber")]
    return [*found, Case("loss-smoothed-2", "mlp", 2, "train.label_smoothing=0.1")]


def computing() -> list[Case]:
    return [*(Case(f"precision-float64-{model}-{n}", model, n, "train.precision=float64")
              for model, n in (("mlp", 1), ("mlp", 2), ("gpt", 2))),
            Case("precision-bfloat16-2", "mlp", 2, "train.precision=bfloat16 model.hidden=[512,512] train.batch_size=256"),
            Case("recompute-all-2", "gpt", 2, "train.recompute=true"),
            Case("recompute-two-pp2", "gpt", 2, "train.recompute=2 mesh.pp=2"),
            Case("recompute-named-1", "gpt", 1, 'train.recompute=["block*"] train.micro_batches=5'),
            Case("norm-sync-2", "resnet20", 2, "model.norm=sync"), Case("resnet20-1", "resnet20", 1),
            Case("last-batch-kept-3", "mlp", 3, "data.drop_last=false train.batch_size=400 train.micro_batches=7 data.workers=0"),
            Case("text-stride-2", "gpt", 2, "data.stride=3 run.seed=5", steps=30),
            Case("validation-share-2", "rod", 2, "data.validation=0.3 train.eval_every=3 checkpoint.best=false")]


class Runner:
    """Runs cases in a working folder with one checkout's code."""

    def __init__(self, work: Path, checkout: Path):
        self.work, self.checkout = work, checkout.resolve()
        scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "OPENBLAS_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])       # the mpirun beside this Python first
        self.environment = {**scrubbed, **layout_matrix.ROOT_MAY, "OMP_NUM_THREADS": "1", "PATH": path,
                            "PYTHONPATH": str(self.checkout)}
        self.command = [sys.executable, "-P", "-m", "mpitrain"]

    def prepare(self, real: Path | None) -> None:
        """Writes data and configurations; the examples are the checkout's own."""
        rng, work = np.random.default_rng(5), self.work
        work.mkdir(parents=True)
        for name, shape in (("grey", (1, 16, 16)), ("colour", (3, 8, 8))):
            with h5py.File(work / f"{name}.h5", "w") as file:
                file["x"] = rng.standard_normal((131, *shape), dtype=np.float32)
                file["y"] = rng.integers(0, 10, 131)
        with h5py.File(work / "rod.h5", "w") as file:
            file["x"] = x = rng.standard_normal((400, 16), dtype=np.float32)
            file["y"] = np.sin(x[:, :3]) + x[:, 3:6] ** 2
        (work / "text.txt").write_text("".join(random.Random(5).choices("abcdefghijklmnopqrstuvwxyz .,\n", k=3000)))
        for name, model in MODELS.items():
            text = f"[model]\n{model}\n[data]\n{DATA[name]}\n{TRAIN[name]}\neval_every = 5\n[log]\nevery = 1\n"
            (work / f"{name}.toml").write_text(text)
        shutil.copytree(self.checkout / "examples", work / "examples")
        imports = [["text", "text.txt", "--out", "text"]]
        if real:
            imports += [["idx", f"{real.resolve()}/t10k-images-idx3-ubyte.gz", "--out", "examples/mnist"],
                        ["text", f"{real.resolve()}/tinyshakespeare.txt", "--out", "examples/shakespeare"]]
        for command in ([sys.executable, "examples/simulation.py", "examples/simulation.h5"],
                        *([*self.command, "data", "import", *arguments] for arguments in imports)):
            subprocess.run(command, check=True, cwd=work, env=self.environment, stdout=subprocess.DEVNULL)

    def run(self, case: Case, *, keep: bool = False, resume: bool = False) -> dict[str, Any]:
        """What a case ends with. `keep` leaves its folder as if the run had stopped halfway; `resume` goes on from there."""
        out, half = self.work / "runs" / case.name, case.steps // 2
        options = [f"run.out=runs/{case.name}", f"train.steps={case.steps}", "log.every=1", *case.options.split()]
        if keep or resume:
            options += [f"checkpoint.every={half}", "checkpoint.keep=9"]
        command = ["mpirun", "-n", str(case.ranks), *self.command, "train", f"{case.config}.toml", *options]
        try:
            done = subprocess.run([*command, "--resume"] if resume else command, cwd=self.work, env=self.environment,
                                  timeout=TIMEOUT, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {TIMEOUT} s"}
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("mpitrain:")]
            return {"exit": done.returncode, "error": said[0].partition(": ")[2] if said else done.stderr[-800:]}
        if keep:
            for folder in (out / "checkpoints").iterdir():
                if int(folder.name.rpartition("-")[2]) > half:
                    shutil.rmtree(folder)
        record = json.loads((out / "run.json").read_text())
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return {**{key: record[key] for key in ("parameters_sha256", "buffers_sha256", "metrics")},
                "exchange": record["choices"].get("exchange"),
                "log": [{key: value for key, value in line.items() if key not in TIMES} for line in lines]}


def differences(name: str, before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """A line for each answer of a case that is another one; of the log, for the first line that is."""
    if before is None:
        return [f"{name}: there is no answer from before"]
    ends = [answer.get("error", "done") for answer in (before, now)]
    if "done" in ends and ends[0] != ends[1]:
        return [f"{name}: it was {ends[0]}, is {ends[1]}"]
    said = []
    for key in sorted(before.keys() | now.keys()):
        a, b = before.get(key), now.get(key)
        if key == "log" and a and b and a != b:
            a, b = next(((x, y) for x, y in zip(a, b) if x != y), (f"{len(a)} lines", f"{len(b)} lines"))
        if a != b:
            said.append(f"{name}: {key} was {a}, is {b}")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the answers here")
    parser.add_argument("--compare", type=Path, help="answers that these must equal")
    parser.add_argument("--keep", type=Path, help="a new folder: the runs' folders stay there, each as if stopped halfway")
    parser.add_argument("--resume", type=Path, help="a folder that --keep made: a copy of its runs goes on to the same end")
    parser.add_argument("--only", default="*", help="cases whose name matches: 'mesh-*'")
    parser.add_argument("--quick", action="store_true", help="a choice that takes less than a minute")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    parser.add_argument("--real", type=Path, help="a folder with t10k-*.gz and tinyshakespeare.txt: also the examples on them")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose mpitrain runs; default: this one")
    a = parser.parse_args()
    chosen = [case for case in cases(a.real is not None)
              if fnmatch.fnmatch(case.name, a.only) and (case.name in QUICK or not a.quick)]
    if a.list:
        print("\n".join(case.name for case in chosen))
        return 0
    earlier = a.resume / "answers.json" if a.resume else a.compare
    before = json.loads(earlier.read_text()) if earlier else None
    answers: dict[str, Any] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        runner = Runner(a.keep or Path(temporary) / "work", a.checkout)
        if a.resume:
            shutil.copytree(a.resume, runner.work, symlinks=True)
        else:
            runner.prepare(a.real)
        for case in chosen:
            began = time.perf_counter()
            found: dict[str, Any] = runner.run(case, keep=bool(a.keep), resume=bool(a.resume))
            answers[case.name] = found
            said = [] if before is None else differences(case.name, before.get(case.name), found)
            result = str(found.get("parameters_sha256", found.get("error")))[:60]
            print(f"{case.name:<50} {result:<60} {time.perf_counter() - began:5.1f} s", *said, sep="\n", flush=True)
            wrong += said
    for path in filter(None, (a.out, a.keep and a.keep / "answers.json")):
        path.write_text(json.dumps(answers, indent=1))
    print(f"{len(chosen)} runs" + (f", {len(wrong)} differences" if before is not None else ""), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
