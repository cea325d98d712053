"""`mpitrain export`: a run's model as a file for other programs."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "a run's model as safetensors, a PyTorch state_dict or ONNX; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("file", type=Path, metavar="FILE", help="its ending says the format: .safetensors, .pt, .onnx")
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--names", default="", help="own, pytorch, gpt2, nanogpt, torchvision, akamaster, bert, llama, t5, or "
                        "file.py:name (default: own; of .pt: pytorch)")
    parser.add_argument("--cache", action="store_true", help="ONNX of a gpt: keys and values of earlier tokens go in and out")
    parser.add_argument("--input", type=_shape, default=(), metavar="CxHxW", help="ONNX: the shape of a sample, where the model "
                        "takes several")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="", help="of files of tensors: floats are rounded so")
    parser.add_argument("--dequantize", action="store_true", help="layers in few bits as the floats that they stand for")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    verbs.add_step(parser)
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    if not verbs.is_first():
        return 0
    from mpitrain.interchange.exporting import Wanted, export
    from mpitrain.train.build.saved import load
    saved = load(options.folder, options.step, options.arguments)
    export(saved, Wanted(options.file, options.names, options.overwrite, options.cache, options.input, options.dtype,
                         options.dequantize))
    return 0


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isascii() and size.isdigit() and 0 < int(size) < 1 << 31 for size in sizes):
        raise ArgumentTypeError(f"expected sizes such as 3x224x224, found {text!r}")
    return tuple(map(int, sizes))
