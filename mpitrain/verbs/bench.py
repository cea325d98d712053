"""`mpitrain bench`: measurements of this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from mpitrain.comm.job import signals
from mpitrain.comm.job.guard import Process
from mpitrain.verbs import is_first

HELP = "measure this machine: training steps, the exchange between ranks"


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="bench_verb", required=True, metavar="VERB")
    allreduce = verbs.add_parser("allreduce", help="our all-reduce algorithms beside MPI_Allreduce")
    allreduce.add_argument("--sizes", default="8,4K,64K,1M,16M", help="bytes, with commas (default: %(default)s)")
    allreduce.add_argument("--algorithms", help="names with commas, or your own package.module:name (default: all there are)")
    allreduce.add_argument("--dtypes", default="float32", help="float32, float64 (default: %(default)s)")
    allreduce.add_argument("--wire", metavar="TYPE",
                           help="bfloat16 or float16: messages of such numbers, beside the same algorithm with float32")
    fit = verbs.add_parser("fit", help="alpha, beta and gamma of this machine, and predicted beside measured times")
    fit.add_argument("--sizes", help="bytes, with commas (default: 1 KiB to 8 MiB, doubling)")
    fit.add_argument("--out", type=Path, metavar="FILE.toml", help="measure this machine for plans, and write it there")
    fit.add_argument("--name", help="what the machine is called in that file (default: the file's name)")
    exchange = verbs.add_parser("exchange", help="gradient sum, AdamW, parameters visible to all; beside MPI_Allreduce + AdamW")
    exchange.add_argument("--parameters", type=int, default=10_000_000, help="how many (default: %(default)s)")
    exchange.add_argument("--bucket-bytes", default="4M", help="how much travels together (default: %(default)s)")
    for verb in (allreduce, fit, exchange):
        verb.add_argument("--pairs", type=int, default=25, help="how often each is timed, in turns (default: %(default)s)")
    train = verbs.add_parser("train", help="steps of well-known models, made-up data: seconds, share of the core's peak, memory")
    train.add_argument("--models", help="names with commas (default: all: mlp, lenet, resnet20, gpt-nano, gpt-baby, gpt2)")
    train.add_argument("--precision", default="float32", help="as train.precision; several with commas (default: %(default)s)")
    train.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="as train.device (default: %(default)s)")
    train.add_argument("--steps", type=int, default=20, help="how many are timed (default: %(default)s)")
    memory = verbs.add_parser("memory", help="memory of a rank, predicted and measured, for well-known models")
    memory.add_argument("--models", default="mlp,lenet,resnet20,gpt-nano", help="with commas (default: %(default)s)")
    models = verbs.add_parser("models", help="size, work, time and energy of the models that are built in")
    models.add_argument("--models", default="lenet,resnet20,squeezenet,resnet18",
                        help='names with commas, or "all" (default: %(default)s)')
    models.add_argument("--batch", type=int, default=8, help="samples (default: %(default)s)")
    models.add_argument("--size", type=int, help="height and width of images (default: those that a model is for, mostly 224)")
    models.add_argument("--steps", type=int, default=5, help="how many are timed (default: %(default)s)")
    models.add_argument("--precision", default="float32", help="float32 or float64 (default: %(default)s)")
    pipeline = verbs.add_parser("pipeline", help="idle time of a pipeline's stages, one a rank: measured, simulated, by formula")
    pipeline.add_argument("--schedules", default="gpipe,1f1b,interleaved,zb_h1", help="with commas (default: %(default)s)")
    for flag, number, words in (("--micro-batches", 4, "of a step"), ("--chunks", 2, "of a stage, where interleaved"),
                                ("--blocks", 8, "of the model, all equal"), ("--width", 256, "of a block; 4 times that inside"),
                                ("--rows", 256, "of a micro-batch"), ("--steps", 20, "how many are timed, in turns")):
        pipeline.add_argument(flag, type=int, default=number, help=f"{words} (default: %(default)s)")
    compress = verbs.add_parser("compress", help="what compressed gradients take: seconds and bytes for each byte, on one core")
    compress.add_argument("--compressors", default="int8,int4,levels:11,onebit,topk:0.01,randomk:0.1,powersgd:4",
                          help="as comm.compress, with commas (default: %(default)s)")
    compress.add_argument("--elements", type=int, default=1 << 22, help="float32 numbers (default: %(default)s)")
    compress.add_argument("--repeats", type=int, default=25, help="how often each is timed (default: %(default)s)")
    for verb in (allreduce, fit, exchange, train, memory, models, pipeline, compress, *_around_runs(verbs)):
        verb.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line, too")
        verb.add_argument("--traceback", action="store_true", help="print Python tracebacks too")


def _around_runs(verbs: Any) -> tuple[ArgumentParser, ArgumentParser]:
    """Those of joules, and of runs that others have published."""
    energy = verbs.add_parser("energy", help="watts of this host idle and at work, joules of products, memory and messages")
    energy.add_argument("--seconds", type=float, default=5.0, help="of a window, 0.1 to 60 (default: %(default)s)")
    energy.add_argument("--repeats", type=int, default=5, help="windows of each kind (default: %(default)s)")
    energy.add_argument("--root", type=Path, default=Path("/sys/class/powercap"), metavar="FOLDER", help="as energy.root")
    energy.add_argument("--out", type=Path, metavar="FILE", help="write the watts into this machine file (of bench fit --out)")
    published = verbs.add_parser("published", help="published scaling curves beside what the step model predicts; needs no MPI")
    published.add_argument("--sets", metavar="NAMES", help="horovod, ec2, dgx1, megatron, with commas (default: all)")
    return energy, published


def run(options: Namespace, process: Process) -> int:
    if options.bench_verb == "published":
        from mpitrain.bench.published import command as published
        return published.run(options.sets, options.json) if is_first() else 0
    signals.ignore()                              # slow imports follow
    from mpitrain.bench import command
    flags = {name: value for name, value in vars(options).items() if name not in ("verb", "bench_verb", "traceback")}
    return command.run(options.bench_verb, **flags)
