"""`mpitrain quantize`: a run whose layers are kept in few bits, made from a trained one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "make a run whose weights are kept in few bits from a trained one; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--format", required=True, help='"int8", "int4", or your own, "file.py:name"')
    parser.add_argument("--out", type=Path, required=True, metavar="RUN2", help="the folder of the new run")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN",
                        help="layers that stay in floats, names with * (may be given again)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in RUN2")
    verbs.add_step(parser)


def run(options: Namespace, process: Process) -> int:
    from mpitrain.plan.low_bits import table_lines
    from mpitrain.shrink.quantize import choose, quantize
    from mpitrain.train.build.saved import load, save
    saved = load(options.path, options.step)
    folder = saved.config.folder
    chosen = choose(saved.model, options.format, options.skip, folder)
    rows = quantize(saved.model, chosen.formats, folder)
    formats = {**saved.config.model.formats, **chosen.formats}
    made = {"by": "quantize", "of": str(options.path), "step": saved.step, "format": options.format,
            "layers": [row._asdict() for row in rows], "left": dict(chosen.left)}
    out = save(options.out, saved.made_into(saved.model, model={"formats": formats}), made=made, overwrite=options.overwrite)
    for line in table_lines(made):
        print(line)
    print(f"{out}: {len(rows)} layers in {options.format}, {len(chosen.left)} in floats; mpitrain evaluate {out} says how well "
          "it does")
    return 0
