"""Greedy decoding with a cache, token by token, one thread: ours against PyTorch eager and ONNX Runtime, in turns.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python benchmarks/decode.py --model gpt-384 [--peers torch,ort,batch]

Models: gpt-384 (6 layers, width 384, vocabulary 65) and gpt2 (12, 768, 50,257). Pairs ours, theirs, ours, theirs; medians of
tokens a second and of the pairs' ratios; the peers have our weights, and tokens are compared. `batch` is ours: 8 texts together
against one after another, whose tokens must be equal. The read bandwidth is that of a dot product of as much memory, in
the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402

from mpitrain.autograd import Tensor, no_grad, row_by_row  # noqa: E402
from mpitrain.backend import keep_freed_memory  # noqa: E402
from mpitrain.infer.blocks import joined  # noqa: E402
from mpitrain.infer.cache import Cache  # noqa: E402
from mpitrain.models import MODELS  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "gpt-384": {"layers": 6, "heads": 6, "width": 384, "block": 256, "vocabulary": 65},
    "gpt2": {"layers": 12, "heads": 12, "width": 768, "block": 1024, "vocabulary": 50257, "bias": True}}
PROMPT = 32


class Ours:
    def __init__(self, model: Any, slots: int, capacity: int):
        self.model = model
        self.cache = Cache(model, slots, capacity, np.float32)
        self.steps = joined(list(model.blocks.items()))

    def logits(self, tokens: Any, slots: list[int], starts: list[int]) -> Any:
        self.cache.use(slots, starts)
        with no_grad(), row_by_row():
            x, passed = Tensor(np.asarray(tokens, np.int64)), 0
            few = x.shape[1] == 1 and len(x) <= 8
            for name, block, together, count in self.steps:
                if passed:
                    passed -= 1
                    continue
                if name == "norm" and x.shape[1] > 1:
                    x = x[:, -1:]
                x, passed = (together(x), count - 1) if few and together is not None else (block(x), 0)
        return x.array[:, -1]

    def greedy(self, prompts: Any, count: int) -> tuple[list[list[int]], float]:
        """Tokens of each prompt, read together, and seconds a step."""
        slots = list(range(len(prompts)))
        rows = self.logits(prompts, slots, [0] * len(prompts))
        made, times = [[int(row.argmax())] for row in rows], []
        for place in range(count - 1):
            begin = time.perf_counter()
            rows = self.logits([tokens[-1:] for tokens in made], slots, [len(prompts[0]) + place] * len(prompts))
            for tokens, row in zip(made, rows):
                tokens.append(int(row.argmax()))
            times.append(time.perf_counter() - begin)
        return made, statistics.median(times)


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

    def __init__(self, size: dict[str, Any], state: dict[str, Any], folder: str):
        import onnxruntime
        path = os.path.join(folder, "step.onnx")
        write_onnx(size, state, path)
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


def write_onnx(size: dict[str, Any], state: dict[str, Any], path: str) -> None:
    """One step, B = 1, written operator by operator."""
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

    def linear(x: str, name: str) -> str:
        y = op("MatMul", [x, const(f"{name}.weight", state[f"{name}.weight"].T)])
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
    op("MatMul", [norm(x, "norm"), const("head", state["embed.token.weight"].T)], "logits")
    outputs = [h.make_tensor_value_info("logits", P.FLOAT, [1, 1, size["vocabulary"]]),
               *(h.make_tensor_value_info(name, P.FLOAT, [1, heads, "m", d // heads]) for name in kept)]
    graph = h.make_graph(nodes, "step", inputs, outputs, [*held.values()])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=9), path)


def read_gbytes(nbytes: int) -> float:
    """GB/s of BLAS's dot product of as much memory with itself, which reads each number once; the best of some."""
    x = np.ones(nbytes // 4, np.float32)
    best = min(_seconds(lambda: np.dot(x, x)) for _ in range(7))
    return nbytes / best / 1e9


def _seconds(action: Any) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="gpt-384")
    parser.add_argument("--peers", default="torch,ort,batch")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()                               # as `generate` does
    size, peers = SIZES[options.model], options.peers.split(",")
    model = MODELS["gpt"](**size)
    model.initialize(1)
    model.eval()
    for parameter in model.parameters():              # so that the largest logit depends on the text
        parameter.array[...] *= 3 if parameter.array.ndim > 1 else 1
    state = model.state_dict()
    prompts = np.random.default_rng(2).integers(0, size["vocabulary"], (8, PROMPT)).tolist()
    ours, nbytes = Ours(model, 8, PROMPT + options.tokens), 4 * model.count_parameters() - 4 * size["block"] * size["width"]
    print(f"{options.model}: {nbytes / 1e6:.1f} MB of weights a token")
    for peer in peers:
        compare(peer, ours, size, state, prompts, options, nbytes)


def compare(peer: str, ours: Ours, size: dict[str, Any], state: dict[str, Any], prompts: Any, options: Any, nbytes: int) -> None:
    import tempfile
    if peer == "batch":
        apart, together = [], []
        for _ in range(options.pairs):
            alone = [ours.greedy([prompt], options.tokens) for prompt in prompts]
            batch = ours.greedy(prompts, options.tokens)
            assert [tokens for found, _ in alone for tokens in found] == batch[0], "a text differs in a batch"
            apart.append(1 / statistics.mean(seconds for _, seconds in alone))
            together.append(8 / batch[1])
        print(f"  batch: 8 together {statistics.median(together):.0f} tok/s, one after another {statistics.median(apart):.0f}: "
              f"{statistics.median(b / a for a, b in zip(apart, together)):.2f} times, the same tokens")
        return
    with tempfile.TemporaryDirectory() as folder:
        other = Torch(size, state) if peer == "torch" else Ort(size, state, folder)
        pairs, gbytes = [], []
        for _ in range(options.pairs):
            (mine, a), (theirs, b) = ours.greedy(prompts[:1], options.tokens), other.greedy(prompts[:1], options.tokens)
            pairs.append((1 / a, 1 / b))
            gbytes.append(read_gbytes(nbytes))
        same = sum(x == y for x, y in zip(mine[0], theirs[0]))
        share = statistics.median(a * nbytes / 1e9 / g for (a, _), g in zip(pairs, gbytes))
        mean = [statistics.median(side) for side in zip(*pairs)]
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"  {peer}: ours {mean[0]:.1f} tok/s, theirs {mean[1]:.1f}: {ratio:.2f} times; "
              f"{same} of {len(mine[0])} tokens equal; {share:.2f} of the read bandwidth ({statistics.median(gbytes):.1f} GB/s)")


if __name__ == "__main__":
    main()
