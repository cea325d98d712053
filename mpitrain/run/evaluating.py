"""Evaluating the newest checkpoint of a run on its validation data."""

from __future__ import annotations

from pathlib import Path

from mpitrain.backend import select_device
from mpitrain.checkpoint import store
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.state import State
from mpitrain.comm.job import guard
from mpitrain.config import Config
from mpitrain.errors import UsageError
from mpitrain.parallel.connect import connect
from mpitrain.parallel.gradients.timeline import SpanMaker
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.parallel.policies.choose import choose_to_evaluate
from mpitrain.parallel.policies.policy import Setup
from mpitrain.placement.place import place
from mpitrain.run import resuming
from mpitrain.run.session import Session, n_virtual
from mpitrain.train.build import measured_cut
from mpitrain.train.build.assembly import local_rank
from mpitrain.train.build.from_config import make_loss, make_model
from mpitrain.train.build.trial import try_samples
from mpitrain.train.evaluate import Evaluator


def evaluate(config: Config, session: Session, source: Path, span: SpanMaker) -> tuple[int, dict[str, float]]:
    """The step of the newest checkpoint in the run folder `source`, and its metrics. It communicates."""
    found = store.latest(source / "checkpoints", session.control, store.EVALUATE)
    resuming.tell_other_rows(config, session, RunFolder(source), found)
    number = local_rank(session.control)
    with guard.symmetric():
        device = select_device(config.train.device, number)
        model = make_model(config)
        stages = measured_cut.kept(config.mesh.stages, n_virtual(config), found.meta.get("choices"))
        placement = place(model, session.mesh, config.mesh, config.train, config.comm, stages=stages)
        context = connect(placement, session.mesh, session.control, shared=device.name == "cpu")
        loss = context.loss(make_loss(config, session.inputs.tokens))
        policy = choose_to_evaluate(Setup(config, context, device))
        policy.initialise()
        State(context.stage.model, None, session.inputs.transforms, whole=model, mesh=session.mesh,
              control=session.control, policy=policy).restore(found)
        feed = context.feed(device, policy.layout.dtype, tokens=session.inputs.tokens)
        inference = Inference(context.stage, feed, context.neighbours)
        n_classes, ignore, _ = try_samples(inference, loss, session.inputs, placement, context.output_shape)
        read, n_chunks = session.inputs.chunks(n_classes, ignore, policy.layout.dtype)
        if not n_chunks:
            raise UsageError("this run has no validation data; give some: data.validation=PATH")
    metrics = Evaluator(inference, loss, read, n_chunks, context, cuts_parameters=policy.cuts_parameters,
                        span=span).run()
    return found.step, metrics
