"""What does not go with compressed gradients: refused before the first message, by `inspect` as by `train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.comm.messages.algorithms import LIBRARY, is_own
from mpitrain.config import Config
from mpitrain.config.rules import name_of
from mpitrain.config.values import LAYOUT
from mpitrain.errors import ConfigError
from mpitrain.kernels.optimizer import NORM_BLOCK
from mpitrain.parallel.compress.compressor import Make, make_compressor
from mpitrain.schedules.collectives import ALL_GATHER
from mpitrain.schedules.grid import Grid

PACKED = ("a packed message is rounded where it is sent, and this algorithm would round sums again at every hop: its error would "
          'grow with the ranks, where "direct" rounds twice at any number of them')


def refuse_compression(config: Config, grid: Grid, *, on_gpu: bool, steps: int, closure: str = "") -> Make:
    """The compressor of comm.compress of a run of so many steps. ConfigError, on all ranks alike, where it does not go with
    another key; `closure` is the optimizer, if that computes the loss of a step several times."""
    make = make_compressor(config.comm.compress, config.folder)
    if config.comm.compress_after >= steps:
        raise ConfigError(f"comm.compress_after = {config.comm.compress_after} is beyond the run, which has {steps} steps: no "
                          'gradient would be compressed; set it to less, or comm.compress = ""')
    for error in (*_warmup(config, make, steps), *_state(config, grid, closure), *_slices(config, make),
                  *_numbers(config, on_gpu), *_ways(config, make)):
        raise error
    return make


def _warmup(config: Config, make: Make, steps: int) -> Iterator[ConfigError]:
    c = config.comm
    if c.compress_warmup and make.wider(2) is None:
        yield ConfigError(f'comm.compress_warmup = {c.compress_warmup} sends a larger share at first, and comm.compress = '
                          f'"{make.text}" has no share that can change; set it to 0, or comm.compress to "topk:0.01"')
    if c.compress_warmup and c.compress_after + c.compress_warmup >= steps:
        yield ConfigError(f"comm.compress_warmup = {c.compress_warmup} after {c.compress_after} dense steps is beyond the run, "
                          f"which has {steps} steps: {make.text} would never be reached; set it to less")


def _state(config: Config, grid: Grid, closure: str) -> Iterator[ConfigError]:
    c, t = config.comm, config.train
    what = f'comm.compress = "{c.compress}"'
    if t.reproducible == "layout":
        yield ConfigError(f"{what} gives each rank, or node, a residual of its own, and {LAYOUT} promises bits that do not "
                          'depend on the ranks; set comm.compress = "", or train.reproducible = "run"')
    if c.node_shared:
        yield ConfigError(f"{what} rounds whole buckets, and comm.node_shared = true updates each rank's slice as it is summed; "
                          "set comm.node_shared = false")
    if grid.size("ep") > 1:
        yield ConfigError(f"{what} compresses gradients that all data-parallel ranks add up, and mesh.ep = {grid.size('ep')} "
                          "adds up those of experts over others; set mesh.ep = 1")
    if c.bucket_mb == "auto":
        yield ConfigError(f'{what}, and comm.bucket_mb = "auto" measures the exchange of dense buckets to cut them anew; set '
                          "comm.bucket_mb to a number")
    if closure:
        yield ConfigError(f"{what} sends something else than the gradient, and {closure} compares gradients of one step; set "
                          "another optimizer.name")
    if t.on_nan == "skip":
        yield ConfigError(f'{what}: what the messages of a step left out is in the residuals already when train.on_nan = "skip" '
                          'leaves that step out; set train.on_nan = "stop" or "rewind"')
    if t.on_lost == "go_on" and c.compress_feedback:
        yield ConfigError(f'{what} keeps residuals that only their own rank has, and train.on_lost = "go_on" goes on without it; '
                          'set train.on_lost = "stop", or comm.compress_feedback = false')


def _slices(config: Config, make: Make) -> Iterator[ConfigError]:
    """Of a sum of which ranks keep slices: what is added up comes in blocks, and does not live by what a message has left out."""
    c, what = config.comm, f'comm.compress = "{make.text}"'
    found = f'found comm.sharding = "{c.sharding}"; set comm.sharding = "none"'
    if ":" in c.sharding:
        yield ConfigError(f"{what} adds up gradients in its own way, and a policy of your own in another, {found}")
    if c.cuts != "none" and not in_slices(make):
        yield ConfigError(f"{what} adds up whole gradients on every rank, and not slices of them, {found}, or comm.compress = "
                          '"int8"')
    if c.cuts in ("gradients", "parameters") and is_one_bit(make):
        yield ConfigError(f"{what} lives by its residuals, which are as long as the parameters, and ranks keep slices, {found} "
                          'or "optimizer", or comm.compress = "int8"')


def in_slices(make: Make) -> bool:
    """Whether slices of a bucket are made of whole blocks."""
    return make.kind == "packed" and make.block is not None and NORM_BLOCK % make.block == 0


def is_one_bit(make: Make) -> bool:
    return getattr(make.cls, "bits", 8) == 1


def refuse_packed_parameters(config: Config, *, on_gpu: bool) -> None:
    """ConfigError, on all ranks alike, where comm.compress_parameters does not go with another key."""
    c, t = config.comm, config.train
    what = f'comm.compress_parameters = "{c.compress_parameters}"'
    try:
        make = make_compressor(c.compress_parameters, config.folder)
    except ConfigError as error:
        raise ConfigError(error.message.replace("comm.compress =", "comm.compress_parameters =")) from None
    by_chance = not make.own and ":" in make.text             # A gather of one step gives all the same, whenever it is.
    if not in_slices(make) or is_one_bit(make) or by_chance:
        raise ConfigError(f'{what} must send every parameter, in blocks of a few bits each and rounded to the nearest; set it to '
                          '"int8" or "int4"')
    for wrong, why in (
            (c.cuts == "none", f'is for ranks that give each other slices, found comm.sharding = "{c.sharding}"; set '
             'comm.sharding = "optimizer", "gradients" or "parameters"'),
            (t.reproducible == "layout", f"rounds what travels, and {LAYOUT} promises the bits of one rank; set "
             'train.reproducible = "run"'),
            (on_gpu, 'is for train.device = "cpu", found "gpu"'),
            (t.precision != "float32", f'rounds float32, found train.precision = "{t.precision}"; set it to "float32"')):
        if wrong:
            raise ConfigError(f"{what} {why}, or leave it empty")


def _numbers(config: Config, on_gpu: bool) -> Iterator[ConfigError]:
    c, what = config.comm, f'comm.compress = "{config.comm.compress}"'
    if on_gpu:
        yield ConfigError(f'{what} is for train.device = "cpu", found "gpu": kernels that encode are the host\'s; set '
                          'comm.compress = "", or comm.wire_dtype = "bfloat16"')
    if config.train.precision != "float32":
        yield ConfigError(f'{what} packs gradients of float32, found train.precision = "{config.train.precision}"; set it to '
                          '"float32"')
    if c.wire_dtype != "float32":
        yield ConfigError(f'{what} says what travels, found comm.wire_dtype = "{c.wire_dtype}" as well; leave it "float32"')
    if c.library != "mpi":
        yield ConfigError(f'{what} sends messages of its own, found comm.library = "{c.library}"; set comm.library = "mpi"')


def _ways(config: Config, make: Make) -> Iterator[ConfigError]:
    algorithm: Any = config.comm.algorithm
    what, found = f'comm.compress = "{make.text}"', f'comm.algorithm = "{name_of(algorithm)}"'
    if algorithm == "auto":
        return
    if algorithm == LIBRARY:
        yield ConfigError(f'{what}: {found} knows numbers, not what is in a message; leave comm.algorithm = "auto"')
    elif make.kind == "packed" and algorithm != "direct":
        yield ConfigError(f"{what} with {found}: {PACKED}; set comm.algorithm = \"direct\", or leave it \"auto\"")
    elif make.kind == "gathered" and (is_own(algorithm) or algorithm not in ALL_GATHER):
        yield ConfigError(f"{what} gathers messages, and {found} has no all-gather; set comm.algorithm = \"direct\", or leave it "
                          '"auto"')
