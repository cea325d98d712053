"""PyTorch's own samples through our operations: values, dtypes and gradients of every entry of op_db that a map names.

A map is a dict {name in op_db: our function}, `MAP` of a file map_<area>.py beside this one. The function is called as PyTorch's
is, f(input, *args, **kwargs), with our tensors in place of torch's, and NumPy dtypes in place of torch's. It may raise `Absent`
for an argument that we do not have. What comes of one sample is one of

    equal     the same values, dtypes, shapes and first derivatives (also on strided copies)
    refused   one of our own errors, by design or as PyTorch refuses it
    absent    an argument that our function does not have
    wrong     another value, shape, dtype or derivative
    raw       an exception that is none of ours

float64 has to agree to 1e-10 and float32 to 1e-5 of the largest number of that very result (or of 1e-3 where all are smaller),
or be no further than 4 times PyTorch's own float32 from its float64.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.autograd import Backward, Tensor
from mpitrain.errors import MpitrainError

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
SAMPLES = 60                                      # of an entry and dtype; pools have 1,400


class Absent(Exception):
    """Our function has no such argument."""


@dataclass
class Result:
    """What came of the samples of one entry: how many of each outcome, and the first few that were no success."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def add(self, outcome: str, detail: str = "") -> None:
        self.counts[outcome] += 1
        if detail and sum(line.startswith(outcome) for line in self.details) < 3:
            self.details.append(f"{outcome}: {detail}")

    @property
    def equal(self) -> bool:
        return self.counts["equal"] > 0 and not self.counts["wrong"] and not self.counts["raw"]


def databases() -> Any:
    """torch, with its module of databases loaded, which takes seconds: never at import."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in: Any = types.ModuleType("expecttest")    # PyTorch's test classes inherit from it; the databases do not use it
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    import torch
    import torch.testing._internal.common_methods_invocations  # noqa: F401
    # The databases seed for each sample. Without a GPU PyTorch's own function formats the stack for three kinds of device that
    # may come later: half of the seconds of all samples under a profiler, a quarter without.
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    return torch


def op_db() -> dict[str, Any]:
    """The entries by name: "add", or "div.floor_rounding" where an entry is a variant."""
    databases()
    entries = sys.modules["torch.testing._internal.common_methods_invocations"].op_db
    return {f"{e.name}.{e.variant_test_name}" if e.variant_test_name else e.name: e for e in entries}


def maps(files: str = "map_*.py") -> dict[str, Callable[..., Any]]:
    """All maps of these files in one; a name that two of them have is a mistake."""
    found: dict[str, Callable[..., Any]] = {}
    for path in sorted(Path(__file__).parent.glob(files)):
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        mine = importlib.import_module(path.stem).MAP
        if twice := found.keys() & mine.keys():
            raise ValueError(f"{path.name}: {sorted(twice)} are in another map already")
        found.update(mine)
    return found


def run(names: Iterable[str] | None = None, samples: int = SAMPLES) -> list[Result]:
    """The results of these entries of the maps (default: all)."""
    torch, entries, ours = databases(), op_db(), maps()
    if unknown := ours.keys() - entries.keys():
        raise ValueError(f"no entries of op_db: {sorted(unknown)}")
    torch.set_num_threads(1)
    return [run_entry(torch, entries[name], name, ours[name], samples) for name in (ours if names is None else names)]


def run_entry(torch: Any, entry: Any, name: str, ours: Callable[..., Any], samples: int) -> Result:
    result = Result(name)
    for dtype in ("float64", "float32") if torch.float64 in entry.dtypes else ("int64",):
        kind = getattr(torch, dtype)
        torch.manual_seed(0)
        gradients = entry.supports_autograd and kind.is_floating_point and kind in entry.backward_dtypes
        for number, sample in enumerate(islice(entry.sample_inputs("cpu", kind, requires_grad=gradients), samples)):
            variants = [("", sample)]
            if dtype == "float64":
                variants.append((", strided", sample.noncontiguous()))
            for label, variant in variants:
                outcome, detail = run_sample(torch, entry, ours, variant, dtype)
                result.add(outcome, f"{dtype} sample {number}{label} {described(variant)}: {detail}" if detail else "")
    return result


def run_sample(torch: Any, entry: Any, ours: Callable[..., Any], sample: Any, dtype: str) -> tuple[str, str]:
    given = [sample.input, *sample.args], dict(sample.kwargs)
    try:
        theirs = reference(torch, entry, given)
    except Exception as error:
        theirs = error
    pairs: list[tuple[Any, Tensor]] = []
    try:
        args, kwargs = translated(torch, given, pairs)
        found = flat(ours(*args, **kwargs))
    except Absent as error:
        return "absent", str(error)
    except MpitrainError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except TypeError as error:
        if "unexpected keyword argument" in str(error) or "positional argument" in str(error):
            return "absent", str(error)
        return "raw", repr(error)
    except Exception as error:
        return "raw", repr(error)
    if isinstance(theirs, Exception):
        return "wrong", f"torch refuses ({str(theirs)[:80]}), ours answers"
    return compared(torch, entry, given, theirs, found, pairs, dtype)


def reference(torch: Any, entry: Any, given: tuple[list[Any], dict[str, Any]]) -> list[Any]:
    """The results of PyTorch, flat."""
    return flat(entry.op(*given[0], **given[1]))


def compared(torch: Any, entry: Any, given: Any, theirs: list[Any], found: list[Any], pairs: list[tuple[Any, Tensor]],
             dtype: str) -> tuple[str, str]:
    """Values first, then the gradients by one random cotangent."""
    if len(theirs) != len(found):
        return "wrong", f"{len(found)} results instead of {len(theirs)}"
    wide = None
    if dtype == "float32":
        wide = widened(torch, entry, given)
    for i, (a, b) in enumerate(zip(found, theirs)):
        truth = wide[0][i] if wide is not None else None
        if difference := unlike(plain(a), plain(b), None if truth is None else plain(truth), dtype):
            return "wrong", f"result {i}: {difference}"
    moving = [i for i, b in enumerate(theirs) if isinstance(b, torch.Tensor) and b.requires_grad and b.dtype.is_floating_point]
    leaves = [(t, x) for t, x in pairs if t.requires_grad]
    if not moving or not leaves:
        return "equal", ""
    rng = np.random.default_rng(1)
    cotangents = {i: rng.standard_normal(tuple(theirs[i].shape)).astype(plain(theirs[i]).dtype) for i in moving}
    try:
        expected = gradients(torch, [theirs[i] for i in moving], [t for t, _ in leaves], list(cotangents.values()))
    except RuntimeError:
        return "equal", ""                        # PyTorch has no derivative there either
    truths: list[Any] = [None] * len(leaves)
    if wide is not None:
        truths = gradients(torch, [wide[0][i] for i in moving], [wide[1][id(t)] for t, _ in leaves],
                           [c.astype(np.float64) for c in cotangents.values()])
    try:
        Backward(None, False).run([(found[i], cotangents[i]) for i in moving if found[i].requires_grad])
    except MpitrainError as error:
        return "refused", f"backward: {error}"
    except Exception as error:
        return "raw", f"backward: {error!r}"
    for number, ((_, x), b, truth) in enumerate(zip(leaves, expected, truths)):
        mine = np.zeros_like(b) if x.grad is None else x.grad
        if difference := unlike(mine, b, truth, dtype):
            return "wrong", f"gradient {number}: {difference}"
    return "equal", ""


def gradients(torch: Any, results: list[Any], leaves: list[Any], cotangents: list[Any]) -> list[Any]:
    found = torch.autograd.grad(results, leaves, [torch.tensor(c) for c in cotangents], allow_unused=True,
                                materialize_grads=True)
    return [g.numpy() for g in found]


def widened(torch: Any, entry: Any, given: Any) -> tuple[list[Any], dict[int, Any]] | None:
    """PyTorch's results in float64 on the float32 inputs, and the leaf of each input by its id; None where that cannot be."""
    leaves: dict[int, Any] = {}

    def wider(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.dtype == torch.float32:
                leaves[id(x)] = x.detach().double().requires_grad_(x.requires_grad)
                return leaves[id(x)]
            return x
        if x is torch.float32:
            return torch.float64
        if isinstance(x, list | tuple) and not isinstance(x, torch.Size):
            return type(x)(map(wider, x))
        return x
    args, kwargs = [wider(x) for x in given[0]], {k: wider(x) for k, x in given[1].items()}
    results = reference(torch, entry, (args, kwargs))
    return (results, leaves)


def unlike(mine: Any, theirs: Any, truth: Any, dtype: str) -> str:
    """What differs, "" where nothing does. `truth` is PyTorch's float64 on float32 inputs."""
    if mine.shape != theirs.shape:
        return f"shape {mine.shape} instead of {theirs.shape}"
    if mine.dtype != theirs.dtype:
        return f"{mine.dtype} instead of {theirs.dtype}"
    if mine.dtype.kind not in "fc":
        return "" if np.array_equal(mine, theirs) else f"{mine.ravel()[:5]} instead of {theirs.ravel()[:5]}"
    tolerance = TOLERANCE["float64" if mine.dtype in (np.float64, np.complex128) and truth is None else "float32"]
    first = error_of(mine, theirs)
    if first <= tolerance or truth is None:
        return "" if first <= tolerance else f"off by {first:.1e}: {worst(mine, theirs)}"
    own, ours = error_of(theirs, truth), error_of(mine, truth)
    return "" if ours <= max(tolerance, 4 * own) else f"off by {ours:.1e}, torch by {own:.1e}: {worst(mine, truth)}"


def error_of(mine: Any, reference: Any) -> float:
    """The largest difference over the largest finite number of the reference; inf where NaN or inf are elsewhere."""
    if mine.size == 0:
        return 0.0
    finite = np.isfinite(reference)
    if not np.array_equal(np.isfinite(mine), finite) or not np.array_equal(mine[~finite], reference[~finite], equal_nan=True):
        return np.inf
    if not finite.any():
        return 0.0
    b = reference[finite]
    return float(np.abs(mine[finite] - b).max() / max(float(np.abs(b).max()), 1e-3))


def worst(mine: Any, reference: Any) -> str:
    with np.errstate(all="ignore"):
        gap = np.abs(mine - reference)
    gap = np.where(mine == reference, 0, np.where(np.isnan(mine) & np.isnan(reference), 0, np.where(np.isnan(gap), np.inf, gap)))
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    return f"{mine[at]!r} instead of {reference[at]!r} at {tuple(map(int, at))} of {mine.shape}"


def translated(torch: Any, given: tuple[list[Any], dict[str, Any]], pairs: list[tuple[Any, Tensor]]) -> tuple[list[Any], Any]:
    """The arguments as ours; `pairs` gets each tensor with ours."""
    def ours(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.dtype in (torch.bfloat16, torch.float16) or x.layout is not torch.strided:
                raise Absent(str(x.dtype))
            tensor = Tensor(x.detach().resolve_conj().resolve_neg().numpy(), requires_grad=x.requires_grad)
            pairs.append((x, tensor))
            return tensor
        if isinstance(x, torch.dtype):
            if not hasattr(np, str(x).removeprefix("torch.")):
                raise Absent(str(x))
            return np.dtype(str(x).removeprefix("torch."))
        if isinstance(x, torch.Size):
            return tuple(x)
        return type(x)(map(ours, x)) if isinstance(x, list | tuple) else x
    return [ours(x) for x in given[0]], {k: ours(x) for k, x in given[1].items()}


def flat(results: Any) -> list[Any]:
    return list(iterated(results)) if isinstance(results, list | tuple) else [results]


def iterated(results: Iterable[Any]) -> Iterator[Any]:
    for x in results:
        if isinstance(x, list | tuple):
            yield from iterated(x)
        else:
            yield x


def plain(x: Any) -> Any:
    """The array of a tensor of either kind, or a number as one."""
    if isinstance(x, Tensor):
        return x.array
    return x.detach().resolve_conj().resolve_neg().numpy() if hasattr(x, "detach") else np.asarray(x)


def described(sample: Any) -> str:
    """Shapes and arguments of a sample, short."""
    def short(x: Any) -> str:
        if hasattr(x, "shape"):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        return f"[{', '.join(map(short, x))}]" if isinstance(x, list | tuple) else str(x)
    text = ", ".join([short(sample.input), *map(short, sample.args), *(f"{k}={short(v)}" for k, v in sample.kwargs.items())])
    return f"({text[:160]})"


def table(results: list[Result]) -> str:
    """The counts: of entries, and of samples."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.counts)
    lines = [f"{len(results)} entries mapped, {sum(r.equal for r in results)} of them equal with nothing wrong or raw",
             "samples: " + ", ".join(f"{total[kind]} {kind}" for kind in ("equal", "refused", "absent", "wrong", "raw"))]
    return "\n".join(lines)


def takes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without the arguments that say where and how PyTorch stores a result."""
    def call(*args: Any, device: Any = None, layout: Any = None, pin_memory: Any = None, requires_grad: Any = None,
             memory_format: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)
    call.__doc__ = inspect.getdoc(function)
    return call
