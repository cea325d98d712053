"""A saved model as ONNX: the graph of its operations, with its weights under their own names.

The batch is symbolic, and of tokens the length. Weights beyond 1 GiB lie in a file beside the graph, FILE.data, as ONNX's
external data: a graph of protobuf has 2 GB at most.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mpitrain.autograd.mode import no_grad
from mpitrain.errors import GraphError, ShapeError, UsageError
from mpitrain.interchange import onnx_rules  # noqa: F401  (fills RULES)
from mpitrain.interchange.exporting import ABOUT, DATA, Tell, Wanted, describe, say_transforms
from mpitrain.interchange.onnx_file import package
from mpitrain.interchange.onnx_graph import BATCH, INPUT, LENGTH, OPSET, Array, Graph, NeedsWhole, traced
from mpitrain.interchange.onnx_lowbit import MICROSOFT
from mpitrain.interchange.tensors import publish, refuse_existing
from mpitrain.nn import Embedding, Module
from mpitrain.nn.basic import Check, Flatten
from mpitrain.nn.lowbit import LowBitEmbedding
from mpitrain.train.build.saved import SavedModel

EXTERNAL = 1 << 30                                # bytes of weights from which on they lie in a file of their own
IR_VERSION = 8                                    # of opset 17; later ones are refused by older runtimes
TABLES = (Embedding, LowBitEmbedding)             # a model that begins with one takes tokens
BATCHES, LENGTHS = (2, 3), (5, 7)                 # of the two recordings; no two of them, nor products, are equal


def export_onnx(saved: SavedModel, wanted: Wanted, tell: Tell) -> None:
    """Writes FILE.onnx, checked by onnx.checker. UsageError where the package onnx is missing, or an operation has no rule."""
    onnx = package()
    if wanted.names:
        raise UsageError("--names is for files of tensors; weights in a graph have the names of checkpoints")
    if isinstance(saved.config.data.x, dict):
        raise UsageError(f"a graph is written for one input, and the model takes {', '.join(saved.config.data.x)}; write a "
                         ".safetensors file")
    refuse_existing(wanted.path, overwrite=wanted.overwrite)
    model = saved.model
    samples, sizes = _samples(model, wanted)
    if wanted.cache and LENGTH not in sizes:
        raise UsageError(f'--cache is for models of tokens with attention, and "{saved.config.model.name}" is none; leave it out')
    if saved.config.train.precision == "bfloat16":
        tell("products are of float32 numbers in the graph; the run rounds what it multiplies to bfloat16")
    try:
        graph, output, dims = traced(model, samples, onnx.helper, sizes, wanted.cache, whole=False)
    except NeedsWhole:
        samples, sizes = _samples(model, wanted, whole=True)
        graph, output, dims = traced(model, samples, onnx.helper, sizes, wanted.cache, whole=True)
    if wanted.cache and not graph.extra_inputs:
        raise UsageError(f'--cache: "{saved.config.model.name}" has no attention with keys and values to keep; leave it out')
    made, data = _proto(onnx, graph, output, dims, samples[0], sizes, saved, wanted)
    if data:
        publish(wanted.path.with_name(f"{wanted.path.name}.data"), data, overwrite=wanted.overwrite)
    else:
        onnx.checker.check_model(made, full_check=True)
    publish(wanted.path, [made.SerializeToString()], overwrite=wanted.overwrite)
    say_transforms(saved, tell)
    tell(f"{wanted.path}: {len(graph.nodes)} nodes, opset {OPSET}, input {_shape(samples[0], sizes)}, "
         f"{sum(array.nbytes for array in graph.weights.values()):,} bytes of weights{' in a file beside it' if data else ''}")


def _samples(model: Module, wanted: Wanted, whole: bool = False) -> tuple[list[Array], dict[str, tuple[int, int]]]:
    """Two inputs that differ in all symbolic dims, and those dims; `whole`: the second has the longest sequence of all."""
    modules = [module for _, module in model.named_modules()]
    if isinstance(first := next((m for m in modules if isinstance(m, (*TABLES, Check, Flatten))), None), TABLES):
        return _tokens(model, modules, wanted, whole)
    shape = wanted.shape
    if not shape and isinstance(first, Flatten) and first.inputs is not None:
        shape = (first.inputs,)
    if not shape and isinstance(first, Check) and None not in first.shape[1:]:
        shape = tuple(n for n in first.shape[1:] if n is not None)
    if not shape:
        raise UsageError("the model takes inputs of several shapes, and a graph is for one: give it, for instance "
                         "--input 3x224x224")
    samples = [np.zeros((b, *shape), _floats(model)) for b in BATCHES]
    with no_grad():
        model(samples[0])                         # a wrong shape is the model's to refuse
    return samples, {BATCH: BATCHES}


def _tokens(model: Module, modules: list[Module], wanted: Wanted, whole: bool
            ) -> tuple[list[Array], dict[str, tuple[int, int]]]:
    """The same for a model that takes numbers of tokens: of all lengths, unless one is asked for."""
    if wanted.shape:
        return [np.zeros((b, *wanted.shape), np.int64) for b in BATCHES], {BATCH: BATCHES}
    blocks = (getattr(module, "block", None) for module in modules)
    block = next((found for found in blocks if isinstance(found, int)), 0)
    if whole and not block:
        raise GraphError("ONNX: the model has a table of positions, and does not say how many there are; give the length "
                         "that the graph is for, --input LENGTH")
    block = block or LENGTHS[1]
    lengths = (min(LENGTHS[0], max(block - 1, 1)), block if whole else min(LENGTHS[1], block))
    if lengths[0] in BATCHES:
        lengths = (min(4, block), lengths[1])
    samples = [np.zeros((b, n), np.int64) for b, n in zip(BATCHES, lengths)]
    try:
        with no_grad():
            model(samples[0])
    except ShapeError as error:
        raise UsageError(f"the model does not take sequences of {lengths[0]} tokens ({error}); give the one length that the "
                         "graph is for, --input LENGTH") from None
    return samples, {BATCH: BATCHES, **({LENGTH: lengths} if lengths[0] != lengths[1] else {})}


def _floats(model: Module) -> Any:
    return model.storage.dtype if model.storage is not None else np.dtype("float32")


def _shape(sample: Array, sizes: dict[str, tuple[int, int]]) -> str:
    return f"{sample.dtype} ({', '.join(map(str, _dims(sample, sizes)))})"


def _dims(sample: Array, sizes: dict[str, tuple[int, int]]) -> list[Any]:
    return [*sizes, *sample.shape[len(sizes):]]


def _proto(onnx: Any, graph: Graph, output: str, dims: list[int | str], sample: Array, sizes: dict[str, tuple[int, int]],
           saved: SavedModel, wanted: Wanted) -> tuple[Any, list[Any]]:
    """The model as protobuf, and the chunks of the file of its weights, if they are many."""
    def info(name: str, dtype: Any, shape: list[Any]) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    outside = sum(array.nbytes for array in graph.weights.values()) > EXTERNAL
    initialisers, chunks, end = [], [], 0
    for name, array in graph.weights.items():
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if not outside or array.nbytes < 1024:
            initialisers.append(onnx.numpy_helper.from_array(array, name))
            continue
        tensor = onnx.TensorProto(name=name, dims=array.shape, data_location=onnx.TensorProto.EXTERNAL,
                                  data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
        for key, value in (("location", f"{wanted.path.name}.data"), ("offset", end), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        initialisers.append(tensor)
        chunks.append(array.reshape(-1).view(np.uint8).data)
        end += array.nbytes
    graph.nodes.append(onnx.helper.make_node("Identity", [output], ["output"], name="output"))
    made = onnx.helper.make_graph(
        graph.nodes, saved.config.model.name.rpartition(":")[2],
        [info(INPUT, sample.dtype, _dims(sample, sizes)), *(info(*one) for one in graph.extra_inputs)],
        [info("output", _floats(saved.model), dims), *(info(*one) for one in graph.extra_outputs)], initialisers)
    domains = {"": OPSET, **({MICROSOFT: 1} if any(node.domain == MICROSOFT for node in graph.nodes) else {})}
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid(*one) for one in domains.items()],
                                   producer_name="mpitrain", ir_version=IR_VERSION)
    learned = {DATA + name: json.dumps(np.asarray(value, np.float64).tolist())
               for name, value in saved.transforms.state_dict().items()}
    onnx.helper.set_model_props(model, {ABOUT: json.dumps({**describe(saved, "own"), **saved.hashes()}), **learned})
    return model, chunks


