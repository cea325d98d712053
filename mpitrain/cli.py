"""The command line: one parser for the files of `verbs`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain import verbs
from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

EPILOG = """examples:
  mpirun -n 2 python -m mpitrain train                          the built-in digits run
  mpirun -n 8 python -m mpitrain train gpt.toml optimizer.lr=3e-4
  mpirun -n 8 python -m mpitrain train gpt.toml --resume auto
  python -m mpitrain supervise --restarts 3 -- mpirun -n 8 python -m mpitrain train gpt.toml
  mpirun -n 4 python -m mpitrain evaluate runs/gpt
  mpirun -n 4 python -m mpitrain predict runs/own field.h5 --x fields/temperature --out predictions.h5
  python -m mpitrain generate runs/gpt --prompt "ROMEO:" --tokens 200 --temperature 0.8
  python -m mpitrain serve runs/gpt --port 8000
  mpirun -n 2 python -m mpitrain replay runs/gpt --step 1200
  python -m mpitrain inspect runs/gpt
  python -m mpitrain checkpoint verify runs/gpt
  python -m mpitrain cut runs/resnet --work 0.5 --out runs/resnet-half
  python -m mpitrain quantize runs/gpt --format int8 --out runs/gpt-int8
  python -m mpitrain export runs/gpt model.safetensors --names gpt2
  python -m mpitrain export runs/gpt-int8 model.onnx --cache
  python -m mpitrain import model.safetensors --names gpt2 --out runs/gpt2 model.heads=12
  python -m mpitrain factor runs/gpt --layers "block*.wide" --energy 0.95 --out runs/gpt-factored
  python -m mpitrain adapter runs/gpt-lora --out gpt-adapter
  python -m mpitrain merge runs/gpt-lora --out runs/gpt-merged
  python -m mpitrain average runs/gpt --out runs/gpt-average
  mpirun -n 2 python -m mpitrain folds run.toml --k 5
  mpirun -n 8 python -m mpitrain search study.toml --resume
  python -m mpitrain data import text corpus.txt --out corpus
  mpirun -n 2 python -m mpitrain bench allreduce --sizes 64K,1M,16M
  python -m mpitrain bench train --models mlp,gpt-nano
  python -m mpitrain bench published
"""


def found_verbs(first: str = "") -> dict[str, Any]:
    """The verbs' modules by name, one for each file of the folder; if `first` is one of them, that alone."""
    names = sorted(path.stem for path in Path(verbs.__path__[0]).glob("[a-z]*.py"))
    return {name: importlib.import_module(f"{verbs.__name__}.{name}") for name in ([first] if first in names else names)}


def parser(found: dict[str, Any]) -> argparse.ArgumentParser:
    top = verbs.Parser(prog="mpitrain", description="Train neural networks over MPI.", epilog=EPILOG,
                       formatter_class=argparse.RawDescriptionHelpFormatter)
    of_verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in found.items():
        verb.add_arguments(of_verbs.add_parser(name, help=verb.HELP))
    return top


def main(arguments: Sequence[str] | None = None, process: Process | None = None) -> int:
    """Runs one command; errors are raised, and `process` turns them into a line and an exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    found = found_verbs(*arguments[:1])
    with guard.symmetric():
        options, rest = parser(found).parse_known_args(arguments)
        unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "arguments")]
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]} (try: mpitrain {options.verb} --help)")
        if rest:                                  # overrides that stand after a flag
            options.arguments = [*options.arguments, *rest]
    status: int = found[options.verb].run(options, process or Process())
    return status
