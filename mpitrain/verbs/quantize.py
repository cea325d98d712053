"""`mpitrain quantize`: a run whose layers are kept in few bits, made from a trained one."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

if TYPE_CHECKING:
    from mpitrain.shrink.quantize import Chosen
    from mpitrain.train.build.saved import SavedModel

HELP = "make a run whose weights are kept in few bits from a trained one; needs no MPI"
SOME, TOKENS = 32, 512            # training rows that errors of outputs are found on, and tokens of them


def add_arguments(parser: ArgumentParser) -> None:
    verbs.add_made(parser)
    parser.add_argument("--format", required=True,
                        help='"int8" or "int4", either with "-dynamic" or "-static" (inputs are int8 too), or "file.py:name"')
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN",
                        help="layers that stay in floats, names with * (may be given again)")
    parser.add_argument("--least", type=_least, metavar="N",
                        help="layers with fewer weights stay in floats (default: 65,536, or 131,072 where inputs are int8 too)")
    parser.add_argument("--measure", type=verbs.rows, metavar="ROWS",
                        help="time each layer on so many rows at a time, and leave those in floats that few bits make slower "
                             "here (1: text that is generated; 64: batches)")
    verbs.add_calibrate(parser, "that show the range of inputs, for static formats")


def _least(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"must be 0 or more weights, found {text}")
    return int(text)


def run(options: Namespace, process: Process) -> int:
    from mpitrain.shrink.quantize import choose, find
    from mpitrain.train.build.adapted import refuse_adapters
    from mpitrain.train.build.saved import load
    saved = load(options.folder, options.step, options.arguments)
    verbs.refuse_supernet(saved, "quantized")
    refuse_adapters(saved)
    folder = saved.config.folder
    chosen = choose(saved.model, options.format, options.skip, folder, options.least)
    scales, first = {}, verbs.is_first()
    calibrated = find(options.format, folder).calibrated
    count = verbs.calibrate_rows(options, calibrated, f"--format {options.format}")
    if calibrated:
        from mpitrain.run.saved_run import SavedRun, with_whole_models
        with SavedRun.of_job(with_whole_models(saved.config), process) as started:
            scales, first = started.calibrate(saved, list(chosen.formats), count), started.comm.rank == 0
    if first:
        write(options, saved, chosen, scales)
    return 0


def write(options: Namespace, saved: SavedModel, chosen: Chosen, scales: dict[str, float]) -> None:
    """The run in few bits, and what was done to each layer."""
    from mpitrain.config.shrink_sections import ShrinkConfig
    from mpitrain.errors import MpitrainError
    from mpitrain.plan.low_bits import table_lines
    from mpitrain.shrink.measure import effects, inputs_of
    from mpitrain.shrink.quantize import gaining, quantize
    from mpitrain.train.build.saved import save
    folder, note = saved.config.folder, ""
    try:
        inputs = inputs_of(saved.model, list(chosen.formats), verbs.first_rows(saved, SOME, tokens=TOKENS))
    except MpitrainError as error:                # a run may have come without its data
        if options.measure:
            raise
        inputs, note = {}, f"no errors of outputs: {error}"
    found = effects(saved.model, chosen.formats, inputs, folder, scales, options.measure or 0)
    if options.measure:
        chosen = gaining(chosen, {path: effect.gain for path, effect in found.items()}, options.measure)
    rows = [row._replace(output_error=found[row.path].error, gain=found[row.path].gain)
            for row in quantize(saved.model, chosen.formats, folder, scales)]
    formats = {**saved.config.model.formats, **chosen.formats}
    made = {"by": "quantize", "of": str(options.folder), "step": saved.step, "format": options.format,
            "measured_rows": options.measure, "layers": [row._asdict() for row in rows], "left": dict(chosen.left)}
    quantized = saved.made_into(saved.model, model={"formats": formats}, shrink=vars(ShrinkConfig()))
    out = save(options.out, quantized, made=made, overwrite=options.overwrite)
    for line in (*table_lines(made), *([note] if note else [])):
        print(line)
    before = len(saved.config.model.formats)
    print(f"{out}: {len(rows)} layers in {options.format}, {len(chosen.left) - before} in floats"
          f"{f', {before} in few bits as before' if before else ''}; mpitrain evaluate {out} says how well "
          "it does")
