"""`mpitrain.load(run).predict(rows)` beside ONNX Runtime's fp32 on the same weights, one thread each.

    python benchmarks/predict_vs_ort.py [--models mlp,lenet,resnet20] [--batches 1,64] [--pairs 21] [--json FILE]

Random weights and running statistics. Some calls of one side follow some of the other, in turn; a ratio is the median over pairs
of ONNX Runtime's time over ours. Outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from mpitrain.autograd import Tensor, Value, no_grad, record
from mpitrain.backend import keep_freed_memory
from mpitrain.bench.pairs import alternate, timed
from mpitrain.bench.report import cpu_name
from mpitrain.comm.job.guard import Process
from mpitrain.config import load_config
from mpitrain.data import Transforms
from mpitrain.errors import NumericsError
from mpitrain.infer.model import TrainedModel
from mpitrain.train.build.model import make_model

TOLERANCE = 1e-5                                  # of the largest output
AT_ONCE = 0.03                                    # seconds of a turn
MODELS = {"mlp": (["model.inputs=784", "model.hidden=[512,512]", "model.outputs=10"], (784,)),
          "lenet": (["model.name=lenet"], (1, 28, 28)), "resnet20": (["model.name=resnet20"], (3, 32, 32))}


def made(name: str) -> TrainedModel:
    """The model with random values in all that a norm divides by, as a run would leave them."""
    config = load_config(None, [f"model.name={name}", "data.transform=[]", *MODELS[name][0]])
    if name != "mlp":                             # the built-in run's keys are the mlp's
        config.model.arguments.clear()
    model = make_model(config)
    model.initialize(0)
    rng = np.random.default_rng(0)
    for key, leaf in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in key:
            near_0 = key.endswith(("bias", "mean"))
            leaf.array[...] = rng.normal(0, 0.1, leaf.shape) if near_0 else rng.uniform(0.5, 1.5, leaf.shape)
    return TrainedModel(model.eval().requires_grad_(False), config, 0, Transforms(), {})


class Graph:
    """The ONNX model of what a model's operations are for images and rows of any number."""

    def __init__(self, model: Any, shape: tuple[int, ...]):
        with no_grad(), record() as operations:
            model(Tensor(np.zeros((2, *shape), np.float32)))
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        first = operations[0].inputs[0].number
        for one in operations:
            getattr(self, one.name.lower())(one, [self._name(x, first) for x in one.inputs], f"v{one.outputs[0].number}")
        result = operations[-1].outputs[0]
        given = helper.make_tensor_value_info(f"v{first}", TensorProto.FLOAT, ["n", *shape])
        found = helper.make_tensor_value_info(f"v{result.number}", TensorProto.FLOAT, ["n", *result.shape[1:]])
        self.model = helper.make_model(helper.make_graph(self.nodes, "model", [given], [found], self.constants),
                                       opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(self.model)

    def _name(self, x: Any, first: int) -> str:
        if isinstance(x, Value) and x.array is not None and x.number != first:
            return self.constant(x.array, f"v{x.number}")
        return f"v{x.number}" if isinstance(x, Value) else ""

    def constant(self, array: Any, name: str = "") -> str:
        name = name or f"k{len(self.constants)}"
        if name not in [known.name for known in self.constants]:
            self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))

    def reshape(self, one: Any, inputs: list[str], output: str) -> None:
        self.node("Flatten", inputs[:1], output, axis=1)

    def linear(self, one: Any, inputs: list[str], output: str) -> None:
        relu = one.attributes["activation"] == "relu"
        self.node("Gemm", inputs, output + "_" * relu, transB=1)
        if relu:
            self.node("Relu", [output + "_"], output)

    def conv2d(self, one: Any, inputs: list[str], output: str) -> None:
        window = one.attributes["window"]
        self.node("Conv", inputs, output, kernel_shape=window.kernel, strides=window.stride, pads=window.padding * 2)

    def fixednorm(self, one: Any, inputs: list[str], output: str) -> None:
        self.node("BatchNormalization", inputs, output, epsilon=one.attributes["eps"])

    def maxpool(self, one: Any, inputs: list[str], output: str) -> None:
        self.node("MaxPool", inputs[:1], output + "_", kernel_shape=[2, 2], strides=[2, 2])
        self.node("Relu", [output + "_"], output)

    def add(self, one: Any, inputs: list[str], output: str) -> None:
        self.node("Add", inputs, output)

    def relu(self, one: Any, inputs: list[str], output: str) -> None:
        self.node("Relu", inputs[:1], output)

    def subsample(self, one: Any, inputs: list[str], output: str) -> None:
        ends = self.constant(np.array([1 << 30, 1 << 30]))
        steps = self.constant(np.array([one.attributes["stride"]] * 2))
        starts, axes = self.constant(np.array([0, 0])), self.constant(np.array([2, 3]))
        self.node("Slice", [inputs[0], starts, ends, axes, steps], output + "_")
        pads = [0, one.attributes["before"], 0, 0, 0, one.attributes["after"], 0, 0]
        self.node("Pad", [output + "_", self.constant(np.array(pads))], output)

    def meanpool(self, one: Any, inputs: list[str], output: str) -> None:
        self.node("GlobalAveragePool", inputs[:1], output)


def session(graph: Graph) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(name: str, model: TrainedModel, peer: Any, batch: int, pairs: int) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(size=(batch, *MODELS[name][1])).astype(np.float32)
    ours, theirs = partial(model.predict, x), partial(peer.run, None, {peer.get_inputs()[0].name: x})
    wanted = theirs()[0]
    error = float(np.abs(ours() - wanted).max() / np.abs(wanted).max())
    if not error <= TOLERANCE:
        raise NumericsError(f"{name}: outputs differ by {error:.2g} of the largest")
    calls = max(1, round(AT_ONCE / timed(ours, 3)(0)))
    found = alternate(timed(ours, calls), timed(theirs, calls), pairs).summary("ort")
    ours_s, theirs_s = (batch / found[key] for key in ("seconds", "ort_seconds"))
    print(f"{name:9} B = {batch:3}: ours {ours_s:8,.0f} rows/s, ONNX Runtime {theirs_s:8,.0f}, ratio {found['ratio']:.2f} "
          f"({found['ratio_low']:.2f} to {found['ratio_high']:.2f}), outputs differ by {error:.0e}", flush=True)
    return {"model": name, "batch": batch, "error": error, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    for name in options.models.split(","):
        model = made(name)
        peer = session(Graph(model.model, MODELS[name][1]))
        rows += [measure(name, model, peer, int(batch), options.pairs) for batch in options.batches.split(",")]
    if options.json:
        options.json.write_text(json.dumps({"cpu": cpu_name(), "rows": rows}))
    return 0


if __name__ == "__main__":
    Process().run(main)
