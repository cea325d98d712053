"""Reading ONNX: the initialisers of a graph, by name. What the graph computes is not read: the model is one of ours.

The package onnx parses the protobuf; bytes of tensors, external ones too, are looked at here. PyTorch's exporter keeps the names
of a state_dict, but for weights that it has transposed: of `onnx::MatMul_57` the node that uses it, and the bias added to its
product, tell the name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpitrain.errors import DataError, UsageError
from mpitrain.interchange.exporting import DATA
from mpitrain.interchange.tensors import BFLOAT16, MOST_DIMS, Array, Stored, TensorFile, fits, mapped, shown
from mpitrain.shrink.formats import pack

LARGEST = 1 << 31                                 # bytes of a graph; protobuf has no larger ones
DTYPES = {1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
          11: "float64", 12: "uint32", 13: "uint64", 16: BFLOAT16}
"""TensorProto.DataType by number."""
FIELDS = {"float32": "float_data", "float64": "double_data", "int64": "int64_data", "uint32": "uint64_data",
          "uint64": "uint64_data"}
"""Where numbers lie that are not in raw_data; those of other dtypes are in int32_data, of half precision their bits."""
CONSTANT = re.compile(r"(onnx::|_?val_\d+$|.*/)")            # names of a graph's own numbers; a layer's name has no "/"
NIBBLES = ".nbits"                                # after the name of an int4 weight in the order of MatMulNBits


def package() -> Any:
    """The package onnx. UsageError where it is missing."""
    try:
        import onnx
    except ImportError:
        raise UsageError('.onnx needs the package onnx: pip install "mpitrain[onnx]"') from None
    return onnx


def read(path: Path) -> TensorFile:
    """The initialisers of an ONNX graph that have names of parameters; those of the graph's own numbers are left out.

    UsageError without the package onnx; DataError where the file is damaged, has sizes that do not fit, names external files
    outside of its folder, or has weights that its exporter has merged with others.
    """
    model, data = package().ModelProto(), mapped(path)
    if len(data) >= LARGEST:
        _refuse(path, f"it has {len(data)} bytes, and a graph has less than {LARGEST}")
    from google.protobuf.message import DecodeError  # a part of the package onnx
    try:
        model.ParseFromString(data.tobytes())
        tensors: dict[str, Stored] = {}
        for name, tensor, transposed in _named(path, model.graph):
            if name in tensors:
                _refuse(path, f"the name {shown(name)} is in it twice")
            stored = _stored(path, name, tensor)
            tensors[name] = Stored(stored.bits.T, stored.dtype) if transposed else stored
        about = {_word(prop.key): _word(prop.value) for prop in model.metadata_props}
    except (DecodeError, ValueError) as error:
        _refuse(path, f"it is damaged, or no ONNX graph: {shown(str(error))}")
    if not tensors:
        _refuse(path, "no initialiser of its graph has a name of a parameter; export the model with its weights inside "
                      "(export_params=True)")
    return TensorFile(path, {**_in_own_order(path, tensors), **_learned(path, about)}, about)


def _learned(path: Path, about: Mapping[str, str]) -> dict[str, Stored]:
    """What transforms have learned, which our graphs have as JSON: onnxruntime drops tensors that no node reads."""
    found = {}
    for name in about:
        if name.startswith(DATA):
            try:
                found[name] = Stored(np.array(json.loads(about[name]), np.float64), "float64")
            except (ValueError, TypeError, RecursionError) as error:
                _refuse(path, f"{shown(name)} is not what export writes: {shown(str(error))}; export it again")
    return found


def _named(path: Path, graph: Any) -> Iterator[tuple[str, Any, bool]]:
    """(name, tensor, whether it is transposed) of the parameters among a graph's initialisers."""
    if graph.sparse_initializer:
        _refuse(path, "it has sparse initialisers, which are not read; export dense ones")
    given = {_word(tensor.name): tensor for tensor in graph.initializer}
    if len(given) < len(graph.initializer):
        _refuse(path, "two of its initialisers have one name")
    names = _names_of_products(graph, given)
    for name, tensor in given.items():
        if name.startswith("onnx::Conv_"):
            _refuse(path, f"the exporter has folded norms into convolutions, {shown(name)} for one, so the model's weights are "
                          "not in it; export with training=torch.onnx.TrainingMode.PRESERVE and do_constant_folding=False, or "
                          "take the state_dict")
        if name in names:
            yield names[name], tensor, True
        elif not CONSTANT.match(name):
            yield name, tensor, False


def _names_of_products(graph: Any, given: Mapping[str, Any]) -> dict[str, str]:
    """Names of the weights that PyTorch's exporter has transposed: by the bias that is added, or the path in the node's name."""
    biases: dict[str, str] = {}
    stems: dict[str, str] = {}                    # the path of a node -> the name of its module, where a parameter tells it
    nodes = [(_word(node.op_type), _path(_word(node.name)), [*map(_word, node.input)], [*map(_word, node.output)])
             for node in graph.node]
    for kind, path, inputs, _ in nodes:
        for name in inputs:
            if name not in given or CONSTANT.match(name):
                continue
            if name.endswith((".weight", ".bias")) and (stem := name.rpartition(".")[0]).endswith(path):
                stems[path.partition(".")[0]] = stem.removesuffix(path)
            if kind == "Add" and name.endswith(".bias"):
                biases.update((other, name) for other in inputs)
    found = {}
    for kind, path, inputs, outputs in nodes:
        if kind == "MatMul" and len(inputs) == 2 and outputs and inputs[1].startswith("onnx::MatMul_"):
            stem = biases.get(outputs[0], "").removesuffix(".bias") or stems.get(path.partition(".")[0], "") + path
            if stem:
                found[inputs[1]] = f"{stem}.weight"
    return found


def _path(node: str) -> str:
    """The module that a node of PyTorch's exporter is of: "/h.0/mlp/MatMul" is of "h.0.mlp"."""
    return ".".join(node.split("/")[1:-1])


def _word(value: Any) -> str:
    """A word of the file; protobuf gives bytes where it is no UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"it has a word that is no UTF-8, {value[:40]!r}")
    return value


def _stored(path: Path, name: str, tensor: Any) -> Stored:
    dtype, shape = DTYPES.get(tensor.data_type), tuple(tensor.dims)
    if dtype is None:
        _refuse(path, f"{shown(name)} has the data type {tensor.data_type}, which is not read")
    kind = np.dtype("u2" if dtype == BFLOAT16 else dtype).newbyteorder("<")
    if len(shape) > MOST_DIMS or any(n < 0 for n in shape):
        _refuse(path, f"{shown(name)} has the shape {shown(shape)}")
    needed = math.prod(shape) * kind.itemsize
    data = _external(path, name, tensor, needed) if tensor.data_location == 1 else _inside(path, name, tensor, dtype, kind)
    if len(data) != needed:
        size = str(needed) if needed < 1 << 63 else "more than 2^63"
        _refuse(path, f"{shown(name)} of shape {shown(shape)} and {dtype} takes {size} bytes, and has {len(data)}")
    if not fits(shape, kind.itemsize):
        _refuse(path, f"{shown(name)} has the shape {shown(shape)}, which no array has")
    return Stored(np.frombuffer(data, kind).reshape(shape), dtype)


def _inside(path: Path, name: str, tensor: Any, dtype: str, kind: Any) -> Any:
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    numbers = np.array(getattr(tensor, FIELDS.get(dtype, "int32_data")))
    if not numbers.size:
        return b""
    bits = np.dtype("u2") if kind.kind == "f" and kind.itemsize == 2 else kind
    if bits.kind in "iub":
        least, most = (0, 1) if bits.kind == "b" else (np.iinfo(bits).min, np.iinfo(bits).max)
        if numbers.min() < least or numbers.max() > most:
            _refuse(path, f"{shown(name)} has numbers that {dtype} has not")
    return numbers.astype(bits).tobytes()


def _external(path: Path, name: str, tensor: Any, needed: int) -> Array:
    """The bytes of a tensor in a file beside the graph, mapped; nothing outside of the graph's folder is opened."""
    said = {_word(entry.key): _word(entry.value) for entry in tensor.external_data}
    location, first, length = said.get("location", ""), said.get("offset", "0"), said.get("length", str(needed))
    folder = os.path.realpath(path.parent)
    inside = location.isprintable() and location and not os.path.isabs(location)
    real = os.path.realpath(os.path.join(folder, location)) if inside else ""
    if os.path.dirname(real) != folder and not real.startswith(os.path.join(folder, "")):
        _refuse(path, f"{shown(name)} lies in {shown(location)}, which is not in the file's folder, and is not read")
    if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in (first, length)):
        _refuse(path, f"{shown(name)} lies at offset {shown(first)}, length {shown(length)}; expected whole numbers")
    if int(length) != needed:
        _refuse(path, f"{shown(name)} takes {needed} bytes, and has {length}")
    data = mapped(Path(real)) if needed else np.zeros(0, np.uint8)
    if needed and int(first) + needed > len(data):
        _refuse(path, f"{shown(name)} ends at byte {int(first) + needed} of {shown(location)}, which has {len(data)}: it is "
                      "cut off")
    return data[int(first):int(first) + needed] if needed else data


def _in_own_order(path: Path, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Weights of int4 in the order of nibbles of ours, under their own names."""
    found = {}
    for name, stored in tensors.items():
        if name.endswith(NIBBLES):
            if stored.dtype != "uint8" or len(stored.shape) != 3 or stored.shape[2] != 16:
                _refuse(path, f"{shown(name)} is {stored.dtype} of shape {shown(stored.shape)}, expected uint8 "
                              "(outputs, groups, 16)")
            whole = np.stack([stored.bits & 15, stored.bits >> 4], axis=-1).reshape(*stored.shape[:2], 32)
            found[name.removesuffix(NIBBLES)] = Stored(pack(whole.astype(np.int8) - 8), "uint8")
        else:
            found[name] = stored
    return found


def _refuse(path: Path, message: str) -> NoReturn:
    raise DataError(f"ONNX: {message}", file=path)
