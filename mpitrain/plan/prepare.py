"""A configuration on a grid of ranks, as `train` would have it, without MPI: what it describes, whether that is valid, and the
part of each rank. `inspect` and `plan` both begin here, so that neither accepts what `train` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain import nn
from mpitrain.backend import CPU, float_dtype
from mpitrain.checkpoint import store
from mpitrain.checkpoint.state import State
from mpitrain.config import Config
from mpitrain.parallel.layers.join import alone
from mpitrain.parallel.layers.tensor_loss import cut_loss
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.placement.place import Placement, place
from mpitrain.placement.stages import whole
from mpitrain.plan.lent import lent_memory
from mpitrain.schedules.grid import Grid, fit
from mpitrain.train.build.evaluation import refuse_evaluations
from mpitrain.train.build.extension import Extension
from mpitrain.train.build.extensions import extensions_of
from mpitrain.train.build.from_config import Described, checkpoint_folder, describe, machine_of, observers_of
from mpitrain.train.build.inputs import Inputs, describe_files, inputs_of
from mpitrain.train.build.offload import files_folder, new_file
from mpitrain.train.build.trial import try_samples
from mpitrain.train.build.validate import Validated, refuse_cuts, refuse_parts, validate


@dataclass(frozen=True)
class Prepared:
    """A run found valid on `grid`; its model has no memory, and is whole until `placed`. `config` is what `parts` make of the one
    that has the sizes that data say."""

    config: Config
    grid: Grid
    inputs: Inputs
    made: Described
    parts: Sequence[Extension]
    valid: Validated

    @property
    def model(self) -> nn.Module:
        return self.made.model

    def placed(self) -> Placement:
        """The first rank's part of the model, which is cut by this, once. MeshError and ConfigError where it cannot be."""
        config = self.config
        found = place(self.model, self.grid, config.mesh, config.train, config.comm)
        refuse_parts(self.valid.whole_parameters, found)
        refuse_cuts(config, found)
        return found

    def refuse_rest(self, placed: Placement) -> None:
        """What a run refuses after its samples have been tried."""
        observers_of(self.config)
        machine_of(self.config, self.grid.count(self.grid.axes))
        if self.config.comm.compress or self.config.comm.compress_parameters:
            from mpitrain.plan.compression import prove  # few runs compress
            prove(self.config, [placed.at_stage(index) for index in range(self.grid.size("pp"))])


def open_data(config: Config) -> Inputs:
    """The data of a configuration."""
    d = config.data
    return inputs_of(config, describe_files(d.path, d.validation, config.folder, d.x, d.y,
                                            predictions=config.distil.predictions, series=d.length > 0))


def grid_of(config: Config, ranks: int) -> Grid:
    """The first of so many ranks; MeshError where they do not fit the mesh."""
    m = config.mesh
    return Grid(fit(ranks, site=m.site, pp=m.pp, dp=m.dp, ep=m.ep, cp=m.cp, tp=m.tp))


def prepare(config: Config, grid: Grid, inputs: Inputs) -> Prepared:
    """The run on the grid of ranks; `config` has the sizes that its data say. It refuses as `train` does, with the same error."""
    made = describe(config, inputs.tokens, inputs)
    parts = extensions_of(config, grid, inputs, made.model, made.loss, made.optimizer)
    rows = inputs.train_rows
    for part in parts:
        config, rows = part.configured(config), part.drawn(rows)
    valid = validate(config, grid, made.model, made.optimizer, made.rate, rows)
    return Prepared(config, grid, inputs, made, parts, valid)


def try_by_itself(config: Config, p: Placement, made: Described, inputs: Inputs) -> None:
    """One sample runs through the first rank's part of each layer, of all stages, and files that a run reads or makes at its
    start are looked at: refused as `train` refuses it."""
    group, model = alone(p), p.stage.whole
    with lent_memory([model], p.train.precision):
        feed = Feed(CPU, float_dtype(p.train.precision), tokens=inputs.tokens, part=p.part)
        tried = try_samples(Inference(whole(model), feed), cut_loss(made.loss, p.head, group), inputs, p, p.output_shape,
                            store.ALONE)
        refuse_evaluations(config, made.metrics, made.loss, tried, inputs, store.ALONE)
        if config.distil.teaches:
            from mpitrain.train.build.teacher import find  # few runs have one
            find(config, inputs, p, feed, tried.n_classes)
        if config.optimizer.offload == "file":
            new_file(files_folder(config)).close()
        if config.model.init_from:
            source = checkpoint_folder(config.folder / config.model.init_from)
            from mpitrain.train.build.adapters import is_new  # few runs start so
            state, found = State(model), store.latest(source, purpose=store.START)
            state.refuse_other(found, state.to_start_from(found, is_new(config) if config.lora.rank else None))
