"""A trained supernet in use on the ranks of a session: what each of its paths is worth, and a path by itself."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.autograd import no_grad
from mpitrain.comm.job import guard
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config, changed
from mpitrain.errors import UsageError
from mpitrain.nn.choices import Elastic, Path
from mpitrain.nn.elastic import in_use
from mpitrain.parallel.gradients.timeline import SpanMaker
from mpitrain.plan.flops import count
from mpitrain.run.evaluating import InUse
from mpitrain.run.session import Session
from mpitrain.train.build.evaluation import make_evaluator
from mpitrain.train.build.from_config import make_loss, make_metrics
from mpitrain.train.build.model import make_model
from mpitrain.train.build.supernet import calibration_of
from mpitrain.train.build.trial import try_samples

TIMED_ROWS, TIMES = 64, 7        # rows of a forward pass that is timed, and how often it runs: the median counts


class Paths:
    """The paths of a saved supernet on all ranks of a session, which call alike; it communicates."""

    def __init__(self, config: Config, session: Session, used: InUse, span: SpanMaker):
        self.config, self.session, self.used, self.span = config, session, used, span
        self.model = used.context.stage.whole
        with guard.symmetric():
            refuse_plain(self.model, config)
        self.elastic: Elastic = self.model.elastic
        self.step = used.found.step
        self.calibration = calibration_of(self.model, used.inference, session.inputs, session.mesh)

    @cached_property
    def _evaluator(self) -> Any:
        used, inputs = self.used, self.session.inputs
        with guard.symmetric():
            loss = used.context.loss(make_loss(self.config, inputs.tokens, inputs))
            tried = try_samples(used.inference, loss, inputs, used.placement, used.context.output_shape)
            metrics, dtype = make_metrics(self.config), used.policy.layout.dtype
            evaluator = make_evaluator(used.inference, loss, inputs, used.context, metrics, tried,
                                       cuts_parameters=used.policy.cuts_parameters, dtype=dtype, span=self.span)
            if evaluator is None:
                raise UsageError("this run has no validation rows; give some: data.validation=PATH")
        return evaluator

    def measure(self) -> None:
        """The statistics of batch norm become those of the path that is in use."""
        if self.calibration is not None:
            self.calibration.run()

    def evaluate(self, path: Path) -> dict[str, float]:
        """The validation metrics of a path, equal on any ranks."""
        evaluator = self._evaluator
        with self.elastic.taken(path):
            self.measure()
            found: dict[str, float] = evaluator.run()
        return found

    def alone(self, path: Path) -> nn.Module:
        """The model of a path by itself, which has no memory yet."""
        return make_model(self.config_of(path))

    def config_of(self, path: Path) -> Config:
        """The configuration of a path: that of the run, with a model that has nothing else."""
        text = self.elastic.write(path)
        return changed(self.config, model={"arguments": {**self.config.model.arguments, "path": text}})

    def cost(self, path: Path) -> dict[str, float]:
        """Parameters, and multiply-adds of a sample ("flops"), of a path by itself."""
        model = self.alone(path)
        return {"parameters": model.count_parameters(), "flops": count(model, np.asarray(self._read(1))).forward}

    def _read(self, rows: int) -> Any:
        """The first training rows as the model takes them."""
        inputs = self.session.inputs
        return inputs.reader(inputs.transforms).read(np.asarray(inputs.train_rows[:rows], np.int64))[0]

    def seconds(self, path: Path) -> float:
        """Of a forward pass of a path by itself for a sample, on rank 0 alone, the median of a few of some rows."""
        def timed() -> float:
            model = self.alone(path)
            model.initialize(0, self.config.train.precision)
            model.eval()
            rows, found = self._read(TIMED_ROWS), []
            given = self.used.inference.feed.tensors(rows)
            with no_grad():
                for _ in range(TIMES):
                    began = time.perf_counter()
                    model(given)
                    found.append(time.perf_counter() - began)
            return sorted(found)[TIMES // 2] / len(rows)
        return float(on_first(self.session.control, timed))

    def cut(self, path: Path) -> nn.Module:
        """A path by itself, with its parameters and its measured statistics: it gives the same outputs, to the bit. Each rank
        must have the whole model."""
        with self.elastic.taken(path):
            self.measure()
            smaller = self.alone(path)
            smaller.initialize(self.config.run.seed, self.config.train.precision)
            used, whole = in_use(self.model), self.model.state_dict()
        smaller.load_state_dict({name: part_of(whole[name], used[name]) for name in smaller.state_dict()})
        return smaller.eval().requires_grad_(False)


def part_of(array: Any, index: Any) -> Any:
    """The places of an array that are used."""
    return array if index is None else array[np.ix_(*index)]


def refuse_plain(model: nn.Module, config: Config) -> None:
    """UsageError for a model that has one path."""
    if model.elastic is None:
        cut = f', which is the path "{config.model.arguments["path"]}" alone' if config.model.arguments.get("path") else ""
        raise UsageError(f'the run\'s model, "{config.model.name}"{cut}, has no paths; a supernet has: elastic_mlp, '
                         "elastic_resnet or elastic_gpt (docs/supernet.md)")
