"""A checkpoint of a run in use on the ranks of a session: its model, without an optimizer or gradients, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain import nn
from mpitrain.backend import select_device
from mpitrain.checkpoint import choosing, store
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.state import State
from mpitrain.comm.job import guard
from mpitrain.config import Config
from mpitrain.errors import UsageError
from mpitrain.parallel.connect import ParallelContext, connect
from mpitrain.parallel.gradients.timeline import SpanMaker
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.parallel.policies.choose import choose_to_evaluate
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.placement.place import Placement, place
from mpitrain.placement.stages import with_norms
from mpitrain.run import resuming
from mpitrain.run.session import Session, n_virtual
from mpitrain.train.build import measured_cut
from mpitrain.train.build.assembly import local_rank
from mpitrain.train.build.evaluation import make_evaluator
from mpitrain.train.build.from_config import make_loss, make_metrics
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.model import leaves_out_zeros, make_model
from mpitrain.train.build.saved import USE
from mpitrain.train.build.trial import try_samples
from mpitrain.train.evaluate import named_tables

__all__ = ["USE", "InUse", "evaluate", "use"]


@dataclass(frozen=True)
class InUse:
    """This rank's part of a saved model, ready to compute outputs; `inference.run` gives them, on the last stage."""

    found: Checkpoint
    inference: Inference
    placement: Placement
    context: ParallelContext
    policy: Policy
    state: State
    _inputs: Inputs | None

    @property
    def inputs(self) -> Inputs:
        """The rows it is used on. A model that is used without data has none."""
        assert self._inputs is not None
        return self._inputs


def use(config: Config, session: Session, source: Path, step: int | str | None = None, model: nn.Module | None = None, *,
        purpose: store.Purpose = USE, data: bool = True) -> InUse:
    """The model of a checkpoint of the run in the folder `source` on the session's mesh, whatever mesh it was trained on.

    `step` is that of a checkpoint, "best", or None, the newest; `model` (default: what `config` says) has no memory yet. Without
    `data` the session has no inputs, and the model takes tokens. It communicates, and raises alike on all ranks.
    """
    found = choosing.chosen(source / "checkpoints", step, session.control, purpose)
    with guard.symmetric():
        return _put_to_use(config, session, found, model, data)


def _put_to_use(config: Config, session: Session, found: Checkpoint, model: nn.Module | None, data: bool) -> InUse:
    device = select_device(config.train.device, local_rank(session.control))
    model = make_model(config) if model is None else model
    stages = measured_cut.kept(config.mesh.stages, n_virtual(config), found.meta.get("choices"))
    counts = stages if isinstance(stages, (list, tuple)) else ()                 # else as "time" has not found any: alike
    placement = place(model, session.mesh, config.mesh, config.train, config.comm,
                      stages=partial(with_norms, counts, config.mesh.pp, config.mesh.chunks))
    context = connect(placement, session.mesh, session.control, shared=device.name == "cpu")
    policy = choose_to_evaluate(Setup(config, context, device))
    policy.initialise()
    state = State(context.stage.model, None, session.inputs.transforms if data else None, whole=model, mesh=session.mesh,
                  control=session.control, policy=policy)
    state.restore(found)
    if leaves_out_zeros(config) and device.name == "cpu" and not policy.cuts_parameters:
        from mpitrain.shrink.sparse import sparsify  # most runs are not pruned
        for chunk in context.stage.chunks:
            sparsify(chunk)
    feed = context.feed(policy.layout, tokens=not data or session.inputs.tokens)
    return InUse(found, Inference(context.stage, feed, context.neighbours), placement, context, policy, state,
                 session.inputs if data else None)


def evaluate(config: Config, session: Session, source: Path, span: SpanMaker,
             step: int | str | None = None) -> tuple[int, dict[str, float], dict[str, Any]]:
    """The step of a checkpoint in the run folder `source` (the newest, that of a step, or the "best"), its metrics, and those of
    them that are tables. It communicates."""
    used = use(config, session, source, step, purpose=store.EVALUATE)
    resuming.tell_other_rows(config, session, RunFolder(source), used.found)
    with guard.symmetric():
        loss = used.context.loss(make_loss(config, session.inputs.tokens, session.inputs))
        tried = try_samples(used.inference, loss, session.inputs, used.placement, used.context.output_shape)
        metrics = make_metrics(config)
        if session.inputs.validation is None:
            raise UsageError("this run has no validation data; give some: data.validation=PATH")
    evaluator = make_evaluator(used.inference, loss, session.inputs, used.context, metrics, tried,
                               cuts_parameters=used.policy.cuts_parameters, dtype=used.policy.layout.dtype, span=span)
    if evaluator is None:
        with guard.symmetric():
            raise UsageError("this run has no validation rows; give some: data.validation=PATH")
    found = evaluator.run()
    return used.found.step, found, named_tables(evaluator.tables, session.inputs)
