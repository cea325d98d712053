"""Greedy decoding with a cache, token by token, one thread: ours against PyTorch eager and ONNX Runtime, in turns.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python benchmarks/decode.py --model gpt-384 [--peers torch,ort,batch]
    ... --model gpt2 --format int8 [--peers float32,ort,batch]

Models: gpt-384 (6 layers, width 384, vocabulary 65) and gpt2 (12, 768, 50,257). Pairs ours, theirs, ours, theirs; medians of
tokens a second and of the pairs' ratios; the peers have our weights, and tokens are compared. `batch` is ours: 8 texts together
against one after another, whose tokens must be equal. The read bandwidth is that of a dot product of as much memory, in
the same run.

With --format, ours is the model in few bits by `quantize`'s default rule, `float32` our own in floats, and `ort` ONNX Runtime's
dynamic int8, or MatMulNBits of int4's weights. Our logits must have the bits of the ops one by one, without compiled blocks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402
from decode_peers import Ort, Torch  # noqa: E402

from mpitrain.autograd import Tensor, no_grad, row_by_row  # noqa: E402
from mpitrain.backend import keep_freed_memory  # noqa: E402
from mpitrain.infer.blocks import joined  # noqa: E402
from mpitrain.infer.cache import Cache  # noqa: E402
from mpitrain.models import MODELS  # noqa: E402
from mpitrain.shrink.formats import FORMATS  # noqa: E402
from mpitrain.shrink.quantize import choose, quantize  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "gpt-384": {"layers": 6, "heads": 6, "width": 384, "block": 256, "vocabulary": 65},
    "gpt2": {"layers": 12, "heads": 12, "width": 768, "block": 1024, "vocabulary": 50257, "bias": True}}
PROMPT = 32


class Ours:
    def __init__(self, model: Any, slots: int, capacity: int):
        self.model = model
        self.cache = Cache(model, slots, capacity, np.float32)
        self.steps = joined(list(model.blocks.items()), pack=True)

    def logits(self, tokens: Any, slots: list[int], starts: list[int], *, by_ops: bool = False) -> Any:
        self.cache.use(slots, starts)
        with no_grad(), row_by_row():
            x, passed = Tensor(np.asarray(tokens, np.int64)), 0
            few = x.shape[1] == 1 and len(x) <= 8 and not by_ops
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
    parser.add_argument("--format", choices=[*FORMATS], default="")
    parser.add_argument("--peers")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()                               # as `generate` does
    size = SIZES[options.model]
    model = MODELS["gpt"](**size)
    model.initialize(1)
    model.eval()
    for parameter in model.parameters():              # so that the largest logit depends on the text
        parameter.array[...] *= 3 if parameter.array.ndim > 1 else 1
    state = model.state_dict()
    prompts = np.random.default_rng(2).integers(0, size["vocabulary"], (8, PROMPT)).tolist()
    nbytes, capacity = 4 * model.count_parameters() - 4 * size["block"] * size["width"], PROMPT + options.tokens
    ours = floats = Ours(model, 8, capacity)
    if options.format:
        small = MODELS["gpt"](**size)
        small.initialize(1)
        small.eval()
        small.load_state_dict(state)
        chosen = choose(small, options.format)
        quantize(small, chosen.formats)
        ours = Ours(small, 8, capacity)
        print("  in floats: " + "; ".join(f"{path}: {why}" for path, why in chosen.left))
        check(ours, prompts)
    print(f"{options.model} {options.format or 'float32'}: {nbytes / 1e6:.1f} MB of float32 weights a token")
    for peer in (options.peers or ("float32,ort,batch" if options.format else "torch,ort,batch")).split(","):
        if peer == "batch":
            batch(ours, prompts, options)
            continue
        with tempfile.TemporaryDirectory() as folder:
            compare(peer, ours, floats if peer == "float32" else Torch(size, state) if peer == "torch" else
                    Ort(size, state, folder, options.format), prompts, options, 0 if options.format else nbytes)


def check(ours: Ours, prompts: Any) -> None:
    """That compiled blocks have the bits of the ops."""
    ours.logits(prompts[:3], [0, 1, 2], [0, 0, 0])
    for rows in (1, 2, 3):
        by_ops, compiled = (ours.logits([[7]] * rows, [0, 1, 2][:rows], [PROMPT] * rows, by_ops=way) for way in (True, False))
        assert by_ops.tobytes() == compiled.tobytes(), "compiled blocks differ from the ops"


def batch(ours: Ours, prompts: Any, options: Any) -> None:
    apart, together = [], []
    for _ in range(options.pairs):
        alone = [ours.greedy([prompt], options.tokens) for prompt in prompts]
        all_at_once = ours.greedy(prompts, options.tokens)
        assert [tokens for found, _ in alone for tokens in found] == all_at_once[0], "a text differs in a batch"
        apart.append(1 / statistics.mean(seconds for _, seconds in alone))
        together.append(8 / all_at_once[1])
    print(f"  batch: 8 together {statistics.median(together):.0f} tok/s, one after another {statistics.median(apart):.0f}: "
          f"{between([b / a for a, b in zip(apart, together)])} times, the same tokens", flush=True)


def compare(peer: str, ours: Ours, other: Any, prompts: Any, options: Any, nbytes: int) -> None:
    """`nbytes`: of weights that a token reads; 0: no share of the bandwidth."""
    pairs, shares, gbytes = [], [], []
    for _ in range(options.pairs):
        (mine, a), (theirs, b) = ours.greedy(prompts[:1], options.tokens), other.greedy(prompts[:1], options.tokens)
        pairs.append((1 / a, 1 / b))
        if nbytes:
            gbytes.append(read_gbytes(nbytes))
            shares.append(nbytes / a / 1e9 / gbytes[-1])
    same = sum(x == y for x, y in zip(mine[0], theirs[0]))
    mean = [statistics.median(side) for side in zip(*pairs)]
    share = f"; {between(shares)} of the read bandwidth ({statistics.median(gbytes):.1f} GB/s)" if nbytes else ""
    print(f"  {peer}: ours {mean[0]:.1f} tok/s, theirs {mean[1]:.1f}: {between([a / b for a, b in pairs])} times; "
          f"{same} of {len(mine[0])} tokens equal{share}", flush=True)


def between(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    main()
