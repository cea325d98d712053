"""Compatibility rules of a run: keys against the mesh, the model and the data.

A rule yields the refusals it finds; the first one of the first rule is raised. No rule needs MPI, so `inspect` refuses what
`train` refuses, with the same line. `check` looks at keys and the mesh, `check_model` at the facts found about the model
and its data (`Facts`); values by themselves are refused before (`config.values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpitrain.config.sections import Config
from mpitrain.config.values import LAYOUT
from mpitrain.errors import ConfigError, MeshError
from mpitrain.schedules.grid import REPLICAS, Grid

Rule: TypeAlias = Callable[[Config, Grid, bool], Iterator[Exception]]

WHY_NOT = {
    "tp": "ranks that share a layer add up parts of its products, which one rank adds in another order",
    "cp": "ranks that share samples add up parts of the gradients and of attention, which one rank adds in another order",
    "ep": "a gradient of an expert adds up rows of several ranks' micro-batches, which one rank adds one micro-batch after the "
          "other"}


def check(config: Config, grid: Grid, *, on_gpu: bool, more: Sequence[Rule] = ()) -> None:
    """Raises ConfigError for keys that do not go together on this mesh; `on_gpu` says where arrays will be, and `more` are the
    rules that the run's own policy brings."""
    for error in (error for rule in (*RULES, *more) for error in rule(config, grid, on_gpu)):
        raise error


def one_copy(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    """Parameters are updated inside the sum of their gradients: a probe of the exchange would train, and a thread of its own
    would write parameters while the program reads them."""
    c = config.comm
    for wrong, found, instead in ((c.progress != "poll", f'comm.progress = "{c.progress}"', 'comm.progress = "poll"'),
                                  (c.bucket_mb == "auto", 'comm.bucket_mb = "auto"', "a number for comm.bucket_mb")):
        if c.node_shared and wrong:
            yield ConfigError(f"comm.node_shared = true updates parameters while gradients are summed, found {found}; set "
                              f"{instead}, or comm.node_shared = false")


def tuned_buckets(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    if config.comm.bucket_mb == "auto" and grid.size("pp") > 1:
        yield ConfigError('comm.bucket_mb = "auto" finds one list of buckets for all ranks, and stages have parameters of their '
                          f"own, found the mesh {grid}; set comm.bucket_mb to a number, or mesh.pp = 1")


def experts(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    n, c = grid.size("ep"), config.comm
    if n > 1 and c.cuts != "none":
        yield ConfigError(f'comm.sharding = "{c.sharding}" cuts states over all data-parallel ranks, and mesh.ep = {n} gives '
                          'them different experts; set comm.sharding = "none", or mesh.ep = 1')
    if n > 1 and c.bucket_mb == "auto":
        yield ConfigError('comm.bucket_mb = "auto" cuts all gradients anew, and those of experts are apart from the rest, found '
                          f"mesh.ep = {n}; set comm.bucket_mb to a number, or mesh.ep = 1")
    if n > 1 and c.node_shared:
        yield ConfigError(f"comm.node_shared = true sums all gradients over the same ranks, and with mesh.ep = {n} those of "
                          "experts go over others; set comm.node_shared = false, or mesh.ep = 1")


def same_bits(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    """The arithmetic must not follow the number of ranks, or the time at which something happens: its unit is the micro-batch,
    and sums over micro-batches are made in one tree (`schedules.microtree`)."""
    t, c = config.train, config.comm
    if t.reproducible != "layout":
        return
    if not t.micro_batches:
        yield ConfigError(f"{LAYOUT} needs train.micro_batches: each micro-batch is computed by itself, so their number must not "
                          "follow the number of ranks; set it to the most ranks you will use, a power of two where you can")
    if c.algorithm != "auto":
        yield ConfigError(f'{LAYOUT} adds gradients in an order of its own, found comm.algorithm = "{name_of(c.algorithm)}"; '
                          'leave comm.algorithm = "auto"')
    if c.wire_dtype != "float32":
        yield ConfigError(f"{LAYOUT} rounds nothing on its way between ranks, found comm.wire_dtype = "
                          f'"{c.wire_dtype}"; leave it "float32"')
    for axis, reason in WHY_NOT.items():
        if grid.size(axis) > 1:
            yield ConfigError(f"{LAYOUT} cannot have mesh.{axis} = {grid.size(axis)}: {reason}; set mesh.{axis} = 1 and use "
                              "mesh.pp or mesh.dp")


def devices(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    way = config.optimizer.offload
    if config.train.precision in ("float16", "tf32") and not on_gpu:
        yield ConfigError(f'train.precision = "{config.train.precision}" is for train.device = "gpu", found "cpu"; set '
                          'train.precision = "float32"')
    if config.train.graph == "on" and not on_gpu:
        yield ConfigError('train.graph = "on" captures graphs of train.device = "gpu", found "cpu"; set train.graph = "off"')
    if config.comm.device_buffers != "off":
        buffers = f'comm.device_buffers = "{config.comm.device_buffers}"'
        if not on_gpu:
            yield ConfigError(f'{buffers} hands MPI memory of train.device = "gpu", found "cpu"; set comm.device_buffers = "off"')
        if config.comm.library != "mpi" or config.comm.algorithm == "mpi":
            other = 'algorithm = "mpi"' if config.comm.library == "mpi" else f'library = "{config.comm.library}"'
            yield ConfigError(f"{buffers} is for messages of our own algorithms, found comm.{other}; "
                              'set comm.device_buffers = "off"')
    if config.comm.library != "mpi":
        library = f'comm.library = "{config.comm.library}"'
        if not on_gpu:
            yield ConfigError(f'{library} adds up gradients of train.device = "gpu", found "cpu"; set comm.library = "mpi"')
        if config.comm.cuts != "none" or config.comm.node_shared:
            yield ConfigError(f"{library} adds up whole gradients, found comm.sharding or comm.node_shared; leave them out, or "
                              'set comm.library = "mpi"')
        if config.comm.wire_dtype != "float32":
            yield ConfigError(f'{library} adds up gradients as they are, found comm.wire_dtype = "{config.comm.wire_dtype}"; '
                              'leave it "float32", or set comm.library = "mpi"')
    if way == "host" and not on_gpu:
        yield ConfigError('optimizer.offload = "host" keeps optimizer state in host memory, where it is already with '
                          'train.device = "cpu"; set optimizer.offload = "file" to keep it in a file, or "none"')
    if way != "none" and config.comm.node_shared:
        yield ConfigError(f'optimizer.offload = "{way}" gives each rank memory of its own for optimizer state, and '
                          "comm.node_shared = true has one copy that the ranks of a node share; set comm.node_shared = false, or "
                          'optimizer.offload = "none"')
    if config.train.reproducible == "layout" and on_gpu:
        yield ConfigError(f'{LAYOUT} is for train.device = "cpu", found "gpu": there the order in which a '
                          "product is added up depends on how many rows a rank has")


def cuts(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    chunks = config.mesh.chunks
    if chunks > 1 and grid.size("pp") == 1:
        yield ConfigError(f"mesh.chunks = {chunks} cuts the model for the stages of a pipeline, and mesh.pp is 1; set "
                          "mesh.chunks = 1, or mesh.pp to 2 or more")
    if config.mesh.sequence and grid.size("tp") == 1:
        yield ConfigError("mesh.sequence = true cuts activations over the ranks that share layers, and mesh.tp is 1; set "
                          "mesh.sequence = false, or mesh.tp to 2 or more")


def sharding(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    kind, c = config.comm.cuts, config.comm
    what = f'comm.sharding = "{c.sharding}"'
    if kind != "none" and c.bucket_mb == "auto":
        yield ConfigError(f'{what} cuts states where buckets are cut, found comm.bucket_mb = "auto", which cuts them anew; set '
                          "comm.bucket_mb to a number")
    if kind in ("gradients", "parameters") and c.progress != "poll":
        yield ConfigError(f'{what} starts a message for each bucket of each micro-batch from backward itself, found '
                          f'comm.progress = "{c.progress}"; set comm.progress = "poll"')
    if kind in ("gradients", "parameters") and config.train.reproducible == "layout":
        yield ConfigError(f"{what} keeps no sums of single micro-batches, and {LAYOUT} adds those of all ranks in one tree; "
                          'set comm.sharding = "optimizer", or train.reproducible = "run"')


def shared_gradients(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    algorithm = config.comm.algorithm
    if config.comm.node_shared and grid.count(REPLICAS) > 1 and (algorithm != "auto" or on_gpu):
        found, instead = (f'comm.algorithm = "{name_of(algorithm)}"', 'comm.algorithm = "auto"') if algorithm != "auto" else \
            ("gradients on a GPU", 'train.device = "cpu"')
        yield ConfigError(f"comm.node_shared = true needs gradients in memory that ranks share, found {found}; set {instead}"
                          ", or comm.node_shared = false")


def left_out(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    t, kind = config.train, config.comm.sharding
    if t.on_nan != "stop" and ":" in kind:
        yield ConfigError(f'train.on_nan = "{t.on_nan}" leaves a step out where the summed gradient is not finite, and '
                          f'comm.sharding = "{kind}" may give each rank a gradient of its own; set train.on_nan = "stop"')


def progress(config: Config, grid: Grid, on_gpu: bool) -> Iterator[ConfigError]:
    if config.comm.progress == "thread" and on_gpu:
        yield ConfigError('comm.progress = "thread" is for train.device = "cpu": a GPU computes while the program polls; set '
                          'comm.progress = "poll"')


RULES = (one_copy, tuned_buckets, experts, same_bits, devices, cuts, sharding, shared_gradients,
         left_out, progress)


class Facts(NamedTuple):
    """The facts that rules use about a model and its data; names are of layers, "" if there is none."""

    n_micro: int                             # micro-batches of a global batch
    fewest: int                              # rows of the smallest global batch
    mixture: str = ""                        # the first mixture of experts
    synchronised: str = ""                   # the first layer with statistics over all ranks' rows
    closure: str = ""                        # the optimizer, if it computes the loss of a step several times
    running: str = ""                        # the first layer with running statistics, looked for with a closure alone
    scaled: str = ""                         # the first embedding whose rows are scaled to a largest norm
    splits_backward: bool = False            # whether the schedule has weight gradients as actions of their own


def check_model(config: Config, grid: Grid, facts: Facts) -> None:
    """Raises ConfigError or MeshError for a model or data that do not allow this mesh."""
    for error in (error for rule in MODEL_RULES for error in rule(config, grid, facts)):
        raise error


def even_experts(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    """Ranks that share experts run them equally often."""
    if grid.size("ep") == 1:
        return
    what = f"mesh.ep = {grid.size('ep')} sends rows to the experts of other ranks in each micro-batch"
    if facts.n_micro % grid.n_places:
        yield MeshError(f"{what}, so all ranks need as many: {_uneven(grid, facts)}")
    if facts.fewest < facts.n_micro:
        yield ConfigError(f"{what}, so each needs a row, and {_few_rows(facts)}")


def layers(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    if facts.synchronised and config.train.reproducible == "layout":
        yield ConfigError(f'{LAYOUT} cannot have the layer "{facts.synchronised}" (SyncBatchNorm): its statistics are of the '
                          'micro-batches that ranks run at the same time; use batch norm (norm = "batch")')
    if config.mesh.sequence and facts.mixture:
        yield ConfigError(f'mesh.sequence = true cuts what "{facts.mixture}" gets along the sequence, and experts choose '
                          "among whole samples; set mesh.sequence = false")


def even_slices(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    """Ranks that cut gradients or parameters among them run the model's blocks equally often, and backwards whole."""
    kind, uneven, what = config.comm.cuts, facts.n_micro % grid.n_places, f'comm.sharding = "{config.comm.sharding}"'
    if grid.count(REPLICAS) == 1 or kind not in ("gradients", "parameters"):
        return
    does = "sums gradients of each micro-batch" if config.mesh.chunks > 1 else "puts parameters together for each micro-batch"
    if uneven and (config.mesh.chunks > 1 or kind == "parameters"):
        yield MeshError(f"{what} {does} on all ranks, so each needs as many: {_uneven(grid, facts)}")
    if kind == "gradients":
        return
    if facts.fewest < facts.n_micro:
        yield ConfigError(f"{what} needs a row for each micro-batch on all ranks, and {_few_rows(facts)}")
    if grid.size("pp") > 1 and facts.splits_backward:
        yield ConfigError(f"{what} lets parameters go after a block's backward, and this schedule runs "
                          'backward in two halves; set mesh.schedule = "1f1b", or comm.sharding = "gradients"')


def even_statistics(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    if facts.synchronised and facts.n_micro % grid.n_places:
        yield ConfigError(f"synchronised batch norm needs as many micro-batches on each rank: {facts.n_micro} do not divide by "
                          f"{grid.n_places}; change train.micro_batches")
    if facts.synchronised and not config.data.drop_last:
        yield ConfigError("synchronised batch norm needs as many micro-batches on each rank, which a short last batch may not "
                          "have; set data.drop_last = true")


def closures(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    """An optimizer with a closure multiplies whole vectors, and asks for the loss where it has moved the parameters to."""
    if not facts.closure:
        return
    c, what = config.comm, f"{facts.closure} adds up products over all parameters and computes the loss several times in a step"
    for axis in ("pp", "tp", "ep", "cp"):
        if grid.size(axis) > 1:
            yield ConfigError(f"{what}, and mesh.{axis} = {grid.size(axis)} gives ranks parts of the model; set mesh.{axis} = 1")
    for wrong, found, instead in (
            (c.sharding != "none", f'comm.sharding = "{c.sharding}"', '"none"'),
            (c.node_shared, "comm.node_shared = true", "false"),
            (c.bucket_mb == "auto", 'comm.bucket_mb = "auto"', "a number"),
            (bool(config.optimizer.clip_norm), f"optimizer.clip_norm = {config.optimizer.clip_norm}", "0"),
            (config.optimizer.offload != "none", f'optimizer.offload = "{config.optimizer.offload}"', '"none"'),
            (bool(config.shrink.prune), f'shrink.prune = "{config.shrink.prune}"', '""'),
            (config.train.on_nan != "stop", f'train.on_nan = "{config.train.on_nan}"', '"stop"'),
            (config.train.precision == "float16", 'train.precision = "float16", whose steps may be left out', '"float32"')):
        if wrong:
            yield ConfigError(f"{what}, found {found}; set it to {instead}, or another optimizer.name")
    if facts.running:
        yield ConfigError(f'{what}, and the running statistics of "{facts.running}" would count each of them; use layer norm or '
                          "group norm, or another optimizer.name")


def scaled_rows(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    c = config.comm
    for wrong, found, instead in (
            (c.cuts != "none" and grid.count(REPLICAS) > 1, f'comm.sharding = "{c.sharding}"', 'comm.sharding = "none"'),
            (c.node_shared and grid.count(REPLICAS) > 1, "comm.node_shared = true", "comm.node_shared = false"),
            (facts.closure, facts.closure, "another optimizer.name")):
        if facts.scaled and wrong:
            yield ConfigError(f'max_norm of the embedding "{facts.scaled}" changes rows on all ranks before the update, which '
                              f"needs whole parameters and one update a step, found {found}; set {instead}, or leave max_norm "
                              "out")


def rows_of_sites(config: Config, grid: Grid, facts: Facts) -> Iterator[ConfigError]:
    if grid.n_sites > 1 and facts.fewest < facts.n_micro:
        yield ConfigError(f"mesh.site = {grid.n_sites} has sites that train apart, so each needs rows in each step, and "
                          f"{_few_rows(facts)}")


MODEL_RULES = (rows_of_sites, closures, even_experts, layers, even_slices, even_statistics, scaled_rows)


def _uneven(grid: Grid, facts: Facts) -> str:
    n, n_micro = grid.n_places, facts.n_micro
    fits = max(n, n_micro - n_micro % n)
    return (f"found {n_micro} micro-batches for {n} data-parallel ranks; set train.micro_batches to {fits} or "
            f"{n_micro + -n_micro % n}")


def _few_rows(facts: Facts) -> str:
    return (f"an epoch ends with a batch of {facts.fewest} rows for {facts.n_micro} micro-batches; set data.drop_last = true, or "
            "fewer train.micro_batches")


def name_of(given: Any) -> str:
    """The name of an all-reduce or a schedule in messages, or that of a user's own function."""
    return str(getattr(given, "__name__", given))
