"""The peers of benchmarks/decode.py: the same GPT with a cache in PyTorch, and in ONNX Runtime, in floats or few bits."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np

from mpitrain.kernels.lowbit import GROUP, unpacked
from mpitrain.shrink.formats import FORMATS


def torch_model(size: dict[str, Any], state: dict[str, Any]) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d, bias = size["width"], size.get("bias", False)
            self.norm1, self.norm2 = nn.LayerNorm(d, bias=bias), nn.LayerNorm(d, bias=bias)
            self.qkv, self.out = nn.Linear(d, 3 * d, bias=bias), nn.Linear(d, d, bias=bias)
            self.wide, self.narrow = nn.Linear(d, 4 * d, bias=bias), nn.Linear(4 * d, d, bias=bias)

        def forward(self, x: Any, past: Any) -> Any:
            b, n, d = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, size["heads"], -1).permute(2, 0, 3, 1, 4)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
            x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
            return x + self.narrow(F.gelu(self.wide(self.norm2(x)))), (k, v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(size["vocabulary"], size["width"])
            self.position = nn.Embedding(size["block"], size["width"])
            self.blocks = nn.ModuleList(Block() for _ in range(size["layers"]))
            self.norm = nn.LayerNorm(size["width"], bias=size.get("bias", False))

        def forward(self, tokens: Any, past: Any) -> Any:
            first = 0 if past[0] is None else past[0][0].shape[2]
            x = self.token(tokens) + self.position(torch.arange(first, first + tokens.shape[1]))
            kept = []
            for block, before in zip(self.blocks, past):
                x, now = block(x, before)
                kept.append(now)
            return F.linear(self.norm(x[:, -1:]), self.token.weight)[:, -1], kept

    model = Model().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours = name.replace("blocks.", "block").replace("qkv", "attention.qkv").replace("out", "attention.out")
            ours = ours.replace("token", "embed.token").replace("position", "embed.position")
            parameter.copy_(torch.from_numpy(np.array(state[ours])))
    return model


class Torch:
    def __init__(self, size: dict[str, Any], state: dict[str, Any]):
        import torch
        torch.set_num_threads(1)
        self.model = torch_model(size, state)

    def greedy(self, prompts: Any, count: int) -> tuple[list[list[int]], float]:
        import torch
        made: list[list[int]] = [[] for _ in prompts]
        times = []
        with torch.inference_mode():
            logits, past = self.model(torch.tensor(prompts), [None] * len(self.model.blocks))
            for place in range(count):
                begin = time.perf_counter()
                tokens = logits.argmax(1)
                for row, token in zip(made, tokens.tolist()):
                    row.append(token)
                if place < count - 1:
                    logits, past = self.model(tokens[:, None], past)
                    times.append(time.perf_counter() - begin)
        return made, statistics.median(times)


class Ort:
    """The same model as a graph of ONNX Runtime, exported from PyTorch: past keys and values are inputs, all of them outputs."""

    def __init__(self, size: dict[str, Any], state: dict[str, Any], folder: str, format: str = ""):
        import onnxruntime
        path = os.path.join(folder, "step.onnx")
        write_onnx(size, state, path, four_bits="4" in format)
        if "8" in format:
            from onnxruntime.quantization import QuantType, quantize_dynamic
            plain, path = path, os.path.join(folder, "int8.onnx")
            quantize_dynamic(plain, path, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.size, self.first = size, Torch(size, state)

    def greedy(self, prompts: Any, count: int) -> tuple[list[list[int]], float]:
        import torch
        with torch.inference_mode():
            logits, past = self.first.model(torch.tensor(prompts), [None] * self.size["layers"])
        flat = [np.ascontiguousarray(x.numpy()) for pair in past for x in pair]
        names = [f"past{i}" for i in range(2 * self.size["layers"])]
        token, made, times = int(logits.argmax()), [], []
        for place in range(count):
            made.append(token)
            if place < count - 1:
                begin = time.perf_counter()
                found = self.session.run(None, {"token": np.array([[token]]), "place": np.array([len(prompts[0]) + place]),
                                                **dict(zip(names, flat))})
                token, flat = int(found[0].argmax()), found[1:]
                times.append(time.perf_counter() - begin)
        return [made], statistics.median(times)


def write_onnx(size: dict[str, Any], state: dict[str, Any], path: str, *, four_bits: bool = False) -> None:
    """One step, B = 1, written operator by operator; with `four_bits`, products are MatMulNBits of the weights as our int4 has
    them, and rows may become int8 (accuracy_level 4, the fastest). Long, since a graph is a list: a line for each operator."""
    import onnx
    from onnx import TensorProto as P
    from onnx import helper as h
    from onnx import numpy_helper
    nodes: list[Any] = []
    held: dict[str, Any] = {}
    d, heads = size["width"], size["heads"]

    def const(name: str, value: Any) -> str:
        held.setdefault(name, numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def op(kind: str, inputs: list[str], out: str = "", **keys: Any) -> str:
        out = out or f"v{len(nodes)}"
        nodes.append(h.make_node(kind, inputs, [out], **keys))
        return out

    def product(x: str, name: str) -> str:
        if not four_bits:
            return op("MatMul", [x, const(f"{name} turned", state[name].T)])
        made = FORMATS["int4"]().quantize(state[name])
        n, k = state[name].shape
        nibbles = (unpacked(made["weight"]) + 8).astype(np.uint8)               # of each byte the low half is the first there
        pairs = const(f"{name} nibbles", nibbles[..., ::2] | nibbles[..., 1::2] << 4)
        return op("MatMulNBits", [x, pairs, const(f"{name} scales", made["scale"].astype(np.float32).reshape(-1))],
                  domain="com.microsoft", K=k, N=n, bits=4, block_size=GROUP, accuracy_level=4)

    def linear(x: str, name: str) -> str:
        y = product(x, f"{name}.weight")
        return op("Add", [y, const(f"{name}.bias", state[f"{name}.bias"])]) if f"{name}.bias" in state else y

    def norm(x: str, name: str) -> str:
        more = [const(f"{name}.bias", state[f"{name}.bias"])] if f"{name}.bias" in state else []
        return op("LayerNormalization", [x, const(f"{name}.weight", state[f"{name}.weight"]), *more], axis=-1, epsilon=1e-5)

    x = op("Add", [op("Gather", [const("embed", state["embed.token.weight"]), "token"]),
                   op("Gather", [const("places", state["embed.position.weight"]), "place"])])
    kept, inputs = [], [h.make_tensor_value_info("token", P.INT64, [1, 1]), h.make_tensor_value_info("place", P.INT64, [1])]
    shape = const("split", np.array([1, 1, 3, heads, d // heads]))
    for i in range(size["layers"]):
        name = f"block{i}"
        parts = op("Transpose", [op("Reshape", [linear(norm(x, f"{name}.norm1"), f"{name}.attention.qkv"), shape])],
                   perm=[2, 0, 3, 1, 4])
        q, k, v = (op("Gather", [parts, const(f"at{p}", np.array(p))], axis=0) for p in range(3))
        now = [op("Concat", [f"past{2 * i + p}", new], f"now{2 * i + p}", axis=2) for p, new in enumerate((k, v))]
        kept += now
        inputs += [h.make_tensor_value_info(f"past{2 * i + p}", P.FLOAT, [1, heads, "n", d // heads]) for p in range(2)]
        scores = op("MatMul", [op("Mul", [q, const("scale", np.float32((d // heads) ** -0.5))]),
                               op("Transpose", [now[0]], perm=[0, 1, 3, 2])])
        mixed = op("Transpose", [op("MatMul", [op("Softmax", [scores], axis=-1), now[1]])], perm=[0, 2, 1, 3])
        x = op("Add", [x, linear(op("Reshape", [mixed, const("flat", np.array([1, 1, d]))]), f"{name}.attention.out")])
        wide = linear(norm(x, f"{name}.norm2"), f"{name}.wide")
        x = op("Add", [x, linear(op("Gelu", [wide]), f"{name}.narrow")])
    op("Identity", [product(norm(x, "norm"), "embed.token.weight")], "logits")
    outputs = [h.make_tensor_value_info("logits", P.FLOAT, [1, 1, size["vocabulary"]]),
               *(h.make_tensor_value_info(name, P.FLOAT, [1, heads, "m", d // heads]) for name in kept)]
    graph = h.make_graph(nodes, "step", inputs, outputs, [*held.values()])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 20), h.make_opsetid("com.microsoft", 1)], ir_version=9), path)
