"""What all candidates of one configuration on one machine have in common, looked at once: the cuts of the model, what its blocks
send, the passes that tell memory, and the refusals of `train`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from mpitrain.config import Config, rules
from mpitrain.data import Sampler
from mpitrain.data.transforms import FIT_ROWS
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.machines.machine import MachineFile
from mpitrain.machines.measured import at_ranks
from mpitrain.nn import FlatLayout, Sequential
from mpitrain.parallel.policies.choose import find_policy
from mpitrain.placement.bytes import Forecast
from mpitrain.placement.place import Placement, place
from mpitrain.placement.shard_cuts import probe
from mpitrain.placement.stages import cut
from mpitrain.plan.activations import Course, Passes, counts, run_passes
from mpitrain.plan.memory import forecast_of
from mpitrain.plan.planner.candidates import Candidate, Cuts
from mpitrain.plan.planner.compute import BlockCosts, Blocks
from mpitrain.plan.planner.traffic import BlockTraffic, traffic
from mpitrain.plan.prepare import open_data, prepare, try_by_itself
from mpitrain.schedules.grid import Grid
from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.train.build.from_config import describe
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.sizes import with_sizes
from mpitrain.train.build.validate import facts_of, is_on_gpu, refuse_cuts, refuse_parts

SPLIT = {"zb_h1"}             # schedules with weight gradients as actions of their own


@dataclass(frozen=True)
class Cut:
    """The model cut for the ranks of a mesh with one data-parallel place: a placement and a layout for each stage."""

    stages: list[Placement]
    layouts: list[FlatLayout]

    @property
    def bounds(self) -> list[int]:
        """Virtual stage v is blocks bounds[v]:bounds[v + 1]."""
        return self.stages[0].stage.bounds


class Problem:
    """A configuration on a machine, for any number of ranks; a run has `inputs` already, whose transforms have been fitted.
    ConfigError for runs that no plan is made of."""

    def __init__(self, config: Config, machine: MachineFile, inputs: Inputs | None = None):
        refuse_unplanned(config)
        self.machine, self.inputs, self.written = machine, inputs or open_data(config), config
        self.config = config = with_sizes(config, self.inputs)
        if inputs is None:
            self.inputs.transforms.fit(self.inputs.training, self.inputs.train_rows[:FIT_ROWS])
        made = describe(config, self.inputs.tokens, self.inputs)
        self.loss, self.sequential = made.loss, isinstance(made.model, Sequential)
        self.n_blocks = len(made.model) if isinstance(made.model, Sequential) else 1
        self.optimizer = made.optimizer(probe())
        self.facts = facts_of(made.model, self.optimizer)
        self.on_gpu = is_on_gpu(config)
        self.rules = find_policy(config).rules
        sampler = Sampler(self.inputs.train_rows, config.train.batch_size, seed=config.run.seed, drop_last=config.data.drop_last)
        self.facts = self.facts._replace(fewest=sampler.size(sampler.steps_per_epoch - 1))
        self.refused: Counter[str] = Counter()
        self._known: dict[Any, Any] = {}
        if inputs is None:
            self._try(Cuts(1, 1, 1, 1))      # what is wrong on one rank is wrong on all, and is said at once
        self.costs = BlockCosts(config, self.inputs, machine)

    @cached_property
    def sample(self) -> tuple[Any, Any]:
        return self.inputs.sample()

    def parameters(self, cuts: Cuts) -> list[int]:
        """The bytes of each block's parameters, on ranks that share layers as `cuts` say."""
        return self._by_block(cuts, "parameters", lambda s, item: (s.stop - s.start) * item)

    def states(self, cuts: Cuts) -> list[int]:
        """The numbers of optimizer state that each block's parameters have."""
        return self._by_block(cuts, "states", lambda s, item: self.optimizer.state_size(s.parameter))

    def sizes(self, cuts: Cuts) -> list[list[int]]:
        """The sizes of each block's parameters, in order."""
        def count() -> list[list[int]]:
            placed = self.shared(cuts)
            assert placed is not None, "it has been found to be there"
            found: list[list[int]] = [[] for _ in range(self.n_blocks)]
            places = placed.stage.places
            for s in placed.layout().segments:
                found[places.get(s.name, 0)].append(s.stop - s.start)
            return found
        counted: list[list[int]] = self.once(("sizes", cuts._replace(pp=1)), count)
        return counted

    def _by_block(self, cuts: Cuts, what: str, size: Callable[[Any, int], int]) -> list[int]:
        def count() -> list[int]:
            placed = self.shared(cuts)
            assert placed is not None, "it has been found to be there"
            found, places, layout = [0] * self.n_blocks, placed.stage.places, placed.layout()
            for s in layout.segments:
                found[places.get(s.name, 0)] += size(s, layout.dtype.itemsize)
            return found
        counted: list[int] = self.once((what, cuts._replace(pp=1)), count)
        return counted

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made at the first call for this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def rows(self, c: Candidate) -> int:
        """Rows of its largest micro-batch."""
        return -(-self.config.train.batch_size // (c.micro_batches * c.places))

    def blocks(self, c: Candidate) -> Blocks:
        """The seconds of the model's blocks for one micro-batch."""
        rows, n_ranks = self.rows(c), prod(c.mesh.values())
        found: Blocks = self.once(("blocks", rows, c.cuts[1:], c.micro_batches, n_ranks),
                                  lambda: self.costs.of(rows, c.mesh, c.micro_batches))
        return found

    def by_messages(self, c: Candidate) -> bool:
        """Whether ranks of a node send each other messages, instead of sharing memory."""
        comm = self.config.comm
        return comm.algorithm != "auto" or (c.sharding in ("gradients", "parameters") and not comm.node_shared)

    def machine_of(self, c: Candidate) -> MachineFile:
        """The machine as so many ranks find it, which share memory on a node unless the run sends messages there."""
        by_messages, ranks = self.by_messages(c), prod(c.mesh.values())
        found: MachineFile = self.once(("machine", ranks, by_messages),
                                       lambda: at_ranks(self.machine, ranks, by_messages=by_messages))
        return found

    def alone(self, c: Candidate) -> float:
        """Seconds of a step of one rank with the whole model, and micro-batches of as many rows."""
        rows, batch = self.rows(c), self.config.train.batch_size
        n = -(-batch // rows)
        blocks: Blocks = self.once(("alone", rows), lambda: self.costs.of(rows, {"dp": 1}, n))
        return n * (sum(blocks.forward) + sum(blocks.backward)) + sum(blocks.update) + blocks.step

    def shared(self, cuts: Cuts) -> Placement | None:
        """The whole model on the first of ranks that share its layers; None where they cannot."""
        key = cuts._replace(pp=1)
        alone = [Cuts(1, *(n if place == axis else 1 for place, n in enumerate(key[1:]))) for axis in range(len(key) - 1)]
        if sum(n > 1 for n in key) > 1 and any(self.shared(one) is None for one in alone):
            return None                      # an axis that cannot share layers by itself
        found: Placement | None = self.once(("shared", key), lambda: self._unless_refused(partial(self._share, key)))
        return found

    def _share(self, cuts: Cuts) -> Placement:
        config = self._plain(cuts, 1, self.config.train.recompute)
        made = describe(config, self.inputs.tokens, self.inputs)
        placed = place(made.model, Grid(cuts._asdict()), config.mesh, config.train, config.comm)
        refuse_parts(self.optimizer.title if self.optimizer.whole_parameters else "", placed)
        refuse_cuts(config, placed)
        placed.refuse_samples(*self.sample)
        return placed

    def _plain(self, cuts: Cuts, chunks: int, recompute: Any) -> Config:
        """The configuration with these cuts, and what does not change them as it may be."""
        config = Candidate(cuts, 1, "1f1b" if chunks == 1 else "interleaved", chunks, 1, "none", recompute).applied(self.config)
        return config if cuts.pp > 1 else replace(config, mesh=replace(config.mesh, stages="blocks"))

    def traffic(self, cuts: Cuts) -> list[BlockTraffic] | None:
        """What the model's blocks send, on ranks that share them; None where their loss, say, cannot be shared so."""
        def listen() -> list[BlockTraffic]:
            return traffic(self._share(key), self.inputs, self.loss)         # of a placement that nothing else connects
        key = cuts._replace(pp=1)
        found: list[BlockTraffic] | None = self.once(("traffic", key), lambda: self._unless_refused(listen))
        return found

    def cut(self, c: Candidate) -> Cut | None:
        """The model in the parts of its ranks; None where it cannot be cut so."""
        key = c.cuts, c.chunks, c.recompute
        found: Cut | None = self.once(("cut", *key), lambda: self._unless_refused(partial(self._cut, *key)))
        return found

    def _cut(self, cuts: Cuts, chunks: int, recompute: Any) -> Cut:
        config = self._plain(cuts, chunks, recompute)

        def whole() -> Placement:
            made = describe(config, self.inputs.tokens, self.inputs)
            return place(made.model, Grid(cuts._asdict()), config.mesh, config.train, config.comm)
        # Stages of any number and size are slices of one model, whose layers are shared alike, and tied parameters apart.
        known: Placement = self.once(("whole", cuts[1:], cuts.pp > 1, recompute), whole)
        counts = config.mesh.stages
        placed = replace(known, grid=Grid(cuts._asdict()), mesh=config.mesh, stage=cut(
            known.stage.whole, 0, cuts.pp, chunks, counts=() if isinstance(counts, str) else counts))
        refuse_cuts(config, placed)
        stages = [placed, *(placed.at_stage(index) for index in range(1, cuts.pp))]
        return Cut(stages, [stage.layout() for stage in stages])

    def require(self, c: Candidate) -> None:
        """The error of what refuses to cut the model so."""
        self._share(c.cuts._replace(pp=1))
        self._cut(c.cuts, c.chunks, c.recompute)

    def stages(self, c: Candidate, config: Config | None = None) -> list[Placement]:
        """The placements of the first rank of each stage."""
        cut, config = self.cut(c), config or c.applied(self.config)
        assert cut is not None, "it has been found to be there"
        return [replace(stage, grid=Grid(c.mesh, {"pp": index}), mesh=config.mesh, train=config.train, comm=config.comm)
                for index, stage in enumerate(cut.stages)]

    def forecast(self, c: Candidate) -> Forecast:
        """The memory of its ranks, as `inspect` forecasts it."""
        config = c.applied(self.config)
        return forecast_of(config, self.stages(c, config)[0], self.inputs, tracing=partial(self._courses, c))

    def _courses(self, c: Candidate, chunks: Any, loss: Any, x: Any, y: Any, rows: int, *, split: bool,
                 **further: Any) -> list[Course]:
        numbers = counts(rows, further["device"])
        passes: Passes = self.once(("passes", c.cuts, c.chunks, c.recompute, split, numbers),
                                   lambda: run_passes(chunks, loss, x, y, rows, split=split, **further))
        return passes.courses(rows)

    def allows(self, c: Candidate) -> bool:
        """Whether keys, mesh, model and data go together."""
        return self._unless_refused(partial(self._check, c)) is not None

    def _check(self, c: Candidate) -> bool:
        config, grid = c.applied(self.config), c.grid
        rules.check(config, grid, on_gpu=self.on_gpu, more=self.rules)
        facts = self.facts._replace(n_micro=c.micro_batches * c.places, splits_backward=c.schedule in SPLIT)
        rules.check_model(config, grid, facts)
        return True

    def accepts(self, c: Candidate) -> bool:
        """Whether `train` would accept it: all that `inspect` asks; a sample runs through each way to share layers once."""
        def ask() -> bool:
            run = prepare(c.applied(self.config), c.grid, self.inputs)
            placed = run.placed()
            self._try(c.cuts)
            run.refuse_rest(placed)
            return True
        return self._unless_refused(ask) is not None

    def _try(self, cuts: Cuts) -> None:
        """Runs a sample through the first rank's part of each layer, once for each way to share layers."""
        def run() -> bool:
            config = self._plain(key, 1, self.config.train.recompute)
            made = describe(config, self.inputs.tokens, self.inputs)
            placed = place(made.model, Grid(key._asdict()), config.mesh, config.train, config.comm)
            try_by_itself(config, placed, made, self.inputs)
            return True
        key = cuts._replace(pp=1)
        self.once(("tried", key), run)

    def _unless_refused(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except MpitrainError as error:
            self.refused[error.message] += 1
            return None


def refuse_unplanned(config: Config) -> None:
    """ConfigError for what a step of the model does not have in it."""
    wrong = None
    if config.mesh.site > 1 or config.sync.levels:
        wrong = "mesh.site or [[sync]]", "sites meet seldom; plan the ranks of one site, without them"
    elif config.workers.count:
        wrong = "[workers]", "a federation's rounds are no steps"
    elif config.privacy.unit != "none":
        wrong = "[privacy]", "gradients of single rows take another time"
    elif config.comm.compress or config.comm.compress_parameters:
        wrong = "comm.compress", "its coding is not in the model of a step; plan without it"
    elif ":" in config.comm.sharding:
        wrong = f'comm.sharding = "{config.comm.sharding}"', "a policy of your own says itself what it sends"
    elif not isinstance(config.mesh.schedule, str) or config.mesh.schedule not in SCHEDULES:
        wrong = "a schedule of your own", "a plan chooses among the built-in ones"
    if wrong:
        raise ConfigError(f"plan does not know runs with {wrong[0]}: {wrong[1]}")
