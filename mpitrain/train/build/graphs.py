"""Whether the micro-batches of a run can be captured as graphs of the device, and if so, how."""

from __future__ import annotations

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, Device
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.nn import SyncBatchNorm, mixtures
from mpitrain.parallel.pipeline.graphs import Graphs
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.policy import Policy


def capture(pipeline: Pipeline, config: Config, device: Device, policy: Policy) -> None:
    """Gives the pipeline its graphs. Where there can be none it runs as ever, or, where train.graph is "on": ConfigError."""
    why_not = obstacle(pipeline, config, policy)
    if not why_not:
        def forward(x: Array, y: Array) -> Tensor:
            return pipeline.loss_of(pipeline.stage.chunks[0](pipeline.feed.here(x)), pipeline.feed.targets_here(y))
        pipeline.graphs = Graphs(device, pipeline.feed, policy.reducer, forward, wanted=config.train.graph == "on",
                                 seed=pipeline.seed)
        pipeline.graphs.scale = pipeline.scale
    elif config.train.graph == "on":
        raise ConfigError(f'train.graph = "on", but {why_not}; set train.graph = "off"')


def obstacle(pipeline: Pipeline, config: Config, policy: Policy) -> str:
    """Why micro-batches cannot be captured; "" where they can, as far as can be said before one runs."""
    stage = pipeline.stage
    if stage.n_virtual > 1:
        return f"the model is cut into {stage.n_virtual} stages, whose messages go through the host"
    if shared := next((axis for axis in ("tp", "cp") if policy.mesh.size(axis) > 1), ""):
        return f"{policy.mesh.size(shared)} ranks along {shared} send each other activations through the host"
    if policy.cuts_parameters:
        return "the ranks put parameters together while blocks compute"
    if policy.cuts_gradients:
        return "the memory of a bucket of gradients is another one's in each backward"
    if pipeline.channel.size > 1 and any(isinstance(module, SyncBatchNorm) for _, module in stage.model.named_modules()):
        return "the ranks send each other the statistics of synchronised batch norm through the host"
    if stage.whole.elastic is not None:
        return "the model is a supernet, each step of which takes another path"
    if mixtures(stage.model):
        return "the model has mixtures of experts, whose rows are counted on the host"
    if isinstance(config.data.x, dict):
        return "the model has several inputs by name"
    if config.distil.teaches:
        return "a teacher's outputs come from the host"
    if policy.goes_on:
        return f'train.on_nan = "{config.train.on_nan}" looks at each loss before backward'
    if policy.statistics.layers and policy.statistics.there is None:
        return "running statistics of its layers are kept on the host"
    if config.train.recompute:
        return "blocks are computed again, with what the host remembers of them"
    return ""
