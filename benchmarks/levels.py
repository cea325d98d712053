"""What sites that meet every H steps lose and save: a character model on tiny Shakespeare, 4 workers of batch 8.

    python benchmarks/levels.py TEXT                      # validation loss and bytes of the rows of GAP: some minutes
    python benchmarks/levels.py TEXT --rows "alone;every;nesterov 11 int4" --seed 1
    python benchmarks/two_hosts.py --rate 100mbit --ranks 2 --timeout 1500 benchmarks/levels.py streaming TEXT

The control is a worker alone, on its batch of 8. `share` is how much of the gap between it and an exchange of gradients in every
step is closed: (alone - row) / (alone - every). Bytes are those that a rank posts, counted where they are, over all steps; they
are compared with what a ring sends for dense gradients, the least that a sum of 4 ranks can.
`streaming` runs on the ranks that have started it: fragments that take effect later, beside plain DiLoCo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, BATCH, EVERY, PARAMETERS = 400, 8, 50, 64_080
RING = 2 * 3 / 4 * 4 * PARAMETERS        # bytes that each of 4 ranks sends in the sum that sends least

BASE = """
[run]
seed = {seed}
[model]
name = "gpt"
layers = 2
heads = 4
width = 48
block = 48
vocabulary = 65
tied = false
[data]
path = "{data}"
validation = "tail:0.1"
[optimizer]
name = "adamw"
lr = 2e-3
schedule = "cosine"
clip_norm = 1.0
[train]
steps = {steps}
batch_size = {batch}
eval_every = {steps}
stall_s = 0
[log]
every = {log}
[checkpoint]
best = false
"""
OUTER = 'outer = "nesterov"\nlr = 0.7\nmomentum = 0.6'
FASTER = OUTER.replace("0.6", "0.75")            # of 0.6, 0.75 and 0.85 the best with seeds 3 and 4
GAP: dict[str, tuple[int, int, str]] = {                             # ranks, sites, [[sync]]
    "alone": (1, 1, ""), "every": (4, 1, ""),
    "average 10": (4, 4, "every = 10"), "nesterov 10": (4, 4, f"every = 10\n{OUTER}"),
    "nesterov 10 int4": (4, 4, f'every = 10\n{OUTER}\ncompress = "int4"'),
    "nesterov 11 int4": (4, 4, f'every = 11\n{OUTER}\ncompress = "int4"'),
    "nesterov 0.75, 11 int4": (4, 4, f'every = 11\n{FASTER}\ncompress = "int4"'),
    "nesterov 0.75, 10 levels:11": (4, 4, f'every = 10\n{FASTER}\ncompress = "levels:11"'),
    "nesterov 50": (4, 4, f"every = 50\n{OUTER}"), "stale 2": (4, 4, 'what = "gradients"\ndelay = 2'),
}
STREAMING = {
    "DiLoCo": f"every = {EVERY}\n{OUTER}",
    "4 fragments, delay 5": f"every = {EVERY}\n{OUTER}\nfragments = 4\ndelay = 5",
    "4 fragments, delay 5, alpha 0.5": f"every = {EVERY}\n{OUTER}\nfragments = 4\ndelay = 5\nalpha = 0.5",
}


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "streaming"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", default=";".join(GAP))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", default="/var/tmp", help="for data and runs; all hosts must see it")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if "streaming" in sys.argv:
            return streaming(arguments, Path(folder))
        return gap(arguments, Path(folder))


def gap(arguments: argparse.Namespace, folder: Path) -> int:
    data = imported(arguments.text, folder)
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.rows.split(";"):
        ranks, sites, level = GAP[name]
        path = folder / "run.toml"
        path.write_text(config(data, arguments.seed, arguments.steps, ranks * BATCH, sites, level, arguments.steps))
        command = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), sys.executable, "-m", "mpitrain", "train",
                   str(path), f"run.out={folder / name.replace(' ', '-')}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        found[name] = outcome(folder / name.replace(" ", "-"))
    print("| exchange | validation loss | share of the gap | bytes a step and rank | of every step's |\n|---|---|---|---|---|")
    alone, every = (found[name]["loss"] if name in found else None for name in ("alone", "every"))
    for name, row in found.items():
        share = f"{(alone - row['loss']) / (alone - every):.2f}" if alone is not None and every is not None else "-"
        sent = row.get("bytes")
        part = f"{sent:,.0f} | 1/{RING / sent:.1f}" if sent else "- | -"
        print(f"| {name} | {row['loss']:.4f} | {share} | {part} |", flush=True)
    return 0


def outcome(run: Path) -> dict[str, Any]:
    """The validation loss at the end of a run, and the bytes of its levels a step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [line["loss"] for line in lines if line.get("split") == "validation"][-1]
    return {"loss": loss, "bytes": json.loads((run / "run.json").read_text()).get("sites", {}).get("wire_bytes"),
            "rounds": [line for line in lines if "round" in line]}


def streaming(arguments: argparse.Namespace, folder: Path) -> int:
    """Runs on all ranks of the job, a site each; rank 0 prints."""
    from mpitrain import Process, Run, load_config, start
    process = Process()

    def rows() -> int:
        comm = start().comm
        data = Path(comm.bcast(str(imported(arguments.text, folder)) if comm.rank == 0 else None))
        if comm.rank == 0:
            print("| exchange | validation loss | largest exchange | exposed a round, ms | a step, ms |\n|---|---|---|---|---|")
        whole = 0.0
        for number, (name, level) in enumerate(STREAMING.items()):
            path, out = data.parent / f"run{number}-{comm.rank}.toml", data.parent / f"out{number}"
            path.write_text(config(data, arguments.seed, arguments.steps, comm.size * BATCH, comm.size, level, EVERY))
            with Run(load_config(path, [f"run.out={out}", "run.name=streaming"]), comm, process=process, quiet=True) as run:
                run.train()
            if comm.rank == 0:
                found = outcome(out)
                exposed = [line["sync_exposed_s"] * 1e3 for line in found["rounds"]]
                largest = max(line["wire_largest_bytes"] for line in found["rounds"][:-1])
                whole = whole or largest
                print(f"| {name} | {found['loss']:.4f} | {largest / whole:.2f} of the model | {statistics.mean(exposed):.2f} | "
                      f"{statistics.median(line['step_s'] for line in found['rounds']) * 1e3:.1f} |", flush=True)
        return 0
    process.run(rows)
    return 0


def imported(text: Path, folder: Path) -> Path:
    """The text as shards of tokens."""
    data = folder / "text"
    subprocess.run([sys.executable, "-m", "mpitrain", "data", "import", "text", str(text), "--out", str(data)], check=True,
                   capture_output=True, cwd=ROOT)
    return data


def config(data: Path, seed: int, steps: int, batch: int, sites: int, level: str, log: int) -> str:
    text = BASE.format(seed=seed, data=data, steps=steps, batch=batch, log=log)
    return text + (f"[mesh]\nsite = {sites}\n[[sync]]\n{level}\n" if level else "")


if __name__ == "__main__":
    sys.exit(main())
