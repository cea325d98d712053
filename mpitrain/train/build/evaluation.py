"""What a run makes of its validation rows: metrics, the best checkpoint, an early end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.comm.face import Objects
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.optim.schedule import Adaptive
from mpitrain.parallel.connect import ParallelContext
from mpitrain.parallel.gradients.timeline import SpanMaker
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.trial import Trial
from mpitrain.train.evaluate import Evaluator
from mpitrain.train.patience import Patience

if TYPE_CHECKING:
    from mpitrain.metrics import Metric


def make_evaluator(inference: Inference, loss: Any, inputs: Inputs, context: ParallelContext, metrics: Sequence[Metric],
                   tried: Trial, *, cuts_parameters: bool, dtype: Any, span: SpanMaker,
                   rows: Inputs | None = None) -> Evaluator | None:
    """What evaluates a model on the validation rows of `inputs`, read by `rows` where they are given; None where there are none.
    It communicates, and raises ConfigError for a metric that is not defined for them."""
    read, n_chunks = (rows or inputs).chunks(tried.n_classes, tried.ignore, dtype)
    measure = None
    if metrics and n_chunks:
        from mpitrain.train.measure import Measure, refuse_unfit
        refuse_unfit(metrics, loss, tried, inputs, context.control, cp=context.mesh.size("cp"))
        measure = Measure(metrics, loss, inputs.transforms, context, n_chunks)
    return Evaluator(inference, loss, read, n_chunks, context, cuts_parameters=cuts_parameters, span=span,
                     measure=measure) if n_chunks else None


def refuse_evaluations(config: Config, metrics: Sequence[Metric], loss: Any, tried: Trial, inputs: Inputs,
                       control: Objects) -> None:
    """ConfigError where a run would refuse its evaluations. It communicates."""
    if metrics and len(inputs.validation_rows):
        from mpitrain.train.measure import refuse_unfit
        refuse_unfit(metrics, loss, tried, inputs, control, cp=config.mesh.cp)
    if inputs.validation is None or not len(inputs.validation_rows):
        refuse_without_evaluations(config, None)
    judges(config, metrics, loss.kind)


def refuse_without_evaluations(config: Config, rate: Any) -> None:
    """ConfigError for what follows the evaluations of a run that has none."""
    wanted = {f'optimizer.schedule = "{config.optimizer.schedule}"': isinstance(rate, Adaptive),
              f"stop.patience = {config.stop.patience}": bool(config.stop.patience),
              "train.metrics": bool(config.train.metrics)}
    for what, follows in wanted.items():
        if follows:
            raise ConfigError(f"{what} follows evaluations; set data.validation")


def judges(config: Config, metrics: Sequence[Metric], kind: str) -> tuple[tuple[str, bool], Patience | None]:
    """The metric of the best checkpoint, and whether more of it is better; what ends the run early, if something does."""
    asked, stop = config.checkpoint.best_metric, config.stop
    if asked == "loss" and not stop.patience:
        return (asked, False), None
    from mpitrain.metrics import judged
    best = judged("checkpoint.best_metric", asked, metrics, kind)
    return best, Patience(*judged("stop.metric", stop.metric, metrics, kind, mode=stop.mode), stop.patience,
                          stop.min_delta) if stop.patience else None
