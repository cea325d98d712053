"""`mpitrain import`: a file of another program's tensors as a run folder."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from mpitrain import verbs
from mpitrain.comm.job.guard import Process

HELP = "a run folder of the tensors of a safetensors, PyTorch or ONNX file; needs no MPI"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a .safetensors or .onnx file, or a .pt file of a state_dict")
    parser.add_argument("arguments", nargs="*", metavar="section.key=value",
                        help="keys of [model] that the file does not say, and any others")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run folder to make")
    parser.add_argument("--names", default="", help="own, pytorch, gpt2, nanogpt, torchvision, akamaster, bert, llama, t5, or "
                        "file.py:name (default: what a file of ours says)")
    parser.add_argument("--overwrite", action="store_true", help="delete a run that is in the folder")
    parser.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def run(options: Namespace, process: Process) -> int:
    if not verbs.is_first():
        return 0
    from mpitrain.interchange.importing import bring_in
    bring_in(options.file, options.out, names=options.names, overrides=options.arguments, overwrite=options.overwrite)
    return 0
