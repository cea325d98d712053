"""`mpitrain quantize`: a run whose layers are kept in few bits, made from a trained one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from mpitrain import verbs
from mpitrain.comm.job.guard import Process
from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.shrink.quantize import Chosen
    from mpitrain.train.build.saved import SavedModel

HELP = "make a run whose weights are kept in few bits from a trained one; needs no MPI"
ROWS = 512


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser)
    parser.add_argument("--format", required=True,
                        help='"int8", "int4", "int8-dynamic", "int4-dynamic", "int8-static", or your own, "file.py:name"')
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN",
                        help="layers that stay in floats, names with * (may be given again)")
    parser.add_argument("--least", type=int, metavar="N",
                        help="layers with fewer weights stay in floats (default: 65,536, from where few bits are faster)")
    parser.add_argument("--calibrate", type=int, default=ROWS, metavar="ROWS",
                        help=f"training rows that show the range of inputs, for int8-static (default: {ROWS})")


def run(options: Namespace, process: Process) -> int:
    from mpitrain.config.sections import changed
    from mpitrain.shrink.quantize import LEAST, choose, find
    from mpitrain.train.build.saved import load
    if options.calibrate < 1:
        raise UsageError(f"--calibrate must be at least 1 row, found {options.calibrate}")
    saved = load(options.folder, options.step, options.arguments)
    folder = saved.config.folder
    chosen = choose(saved.model, options.format, options.skip, folder, LEAST if options.least is None else options.least)
    scales, first = {}, True
    if find(options.format, folder).calibrated:
        from mpitrain.run import Run
        alone = changed(saved.config, mesh={"pp": 1, "dp": 0, "ep": 1, "cp": 1, "tp": 1})
        with Run.of_job(alone, process) as started:
            scales, first = started.calibrate(saved.model, list(chosen.formats), options.calibrate), started.comm.rank == 0
    if first:
        write(options, saved, chosen, scales)
    return 0


def write(options: Namespace, saved: SavedModel, chosen: Chosen, scales: dict[str, float]) -> None:
    """The run in few bits, and what was done to each layer."""
    from mpitrain.config.sections import ShrinkConfig
    from mpitrain.plan.low_bits import table_lines
    from mpitrain.shrink.quantize import quantize
    from mpitrain.train.build.saved import save
    rows = quantize(saved.model, chosen.formats, saved.config.folder, scales)
    formats = {**saved.config.model.formats, **chosen.formats}
    made = {"by": "quantize", "of": str(options.folder), "step": saved.step, "format": options.format,
            "layers": [row._asdict() for row in rows], "left": dict(chosen.left)}
    quantized = saved.made_into(saved.model, model={"formats": formats}, shrink=vars(ShrinkConfig()))
    out = save(options.out, quantized, made=made, overwrite=options.overwrite)
    for line in table_lines(made):
        print(line)
    print(f"{out}: {len(rows)} layers in {options.format}, {len(chosen.left)} in floats; mpitrain evaluate {out} says how well "
          "it does")
