"""PyTorch's own samples of modules through our layers: outputs, gradients of inputs and parameters, buffers; training and eval.

A map is a dict {name in module_db: make}, `MAP` of a file modules_<area>.py beside this one. `make` is called as PyTorch's
constructor is and returns our layer, or a `Fitted` where its parameters have other names or it is called in another way. The
layer gets the values of PyTorch's parameters and buffers. Outcomes and tolerances are those of `harness`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import Absent, Result, databases, flat, maps, unlike

from mpitrain import nn
from mpitrain.autograd import Backward, Tensor
from mpitrain.backend import random
from mpitrain.errors import MpitrainError


@dataclass
class Fitted:
    """A layer of ours in place of one of PyTorch's; `module` may be None for a function."""

    module: nn.Module | None
    call: Callable[..., Any] | None = None            # f(*args, **kwargs), as PyTorch's forward; default: the module
    rename: Callable[[str], str] = str                # PyTorch's name of a parameter or buffer -> ours


def module_db() -> dict[str, Any]:
    databases()
    import torch.testing._internal.common_modules as modules
    return {entry.name: entry for entry in modules.module_db}


def run(names: Any = None) -> list[Result]:
    torch, entries, ours = databases(), module_db(), maps("modules_*.py")
    if unknown := ours.keys() - entries.keys():
        raise ValueError(f"no entries of module_db: {sorted(unknown)}")
    torch.set_num_threads(1)
    return [run_entry(torch, entries[name], name, ours[name]) for name in (ours if names is None else names)]


def run_entry(torch: Any, entry: Any, name: str, make: Callable[..., Any]) -> Result:
    result = Result(name)
    for dtype in ("float64", "float32"):
        for training in (True, False):
            torch.manual_seed(0)
            samples = entry.module_inputs_func(entry, "cpu", getattr(torch, dtype), False, training)
            for number, sample in enumerate(samples):
                outcome, detail = run_sample(torch, entry.module_cls, make, sample, training, dtype)
                where = f"{dtype} {'train' if training else 'eval'} sample {number} {described(sample)}"
                result.add(outcome, f"{where}: {detail}" if detail else "")
    return result


def run_sample(torch: Any, kind: Any, make: Callable[..., Any], sample: Any, training: bool, dtype: str) -> tuple[str, str]:
    torch.manual_seed(1)
    given = sample.constructor_input
    theirs = kind(*given.args, **given.kwargs).to(getattr(torch, dtype)).train(training)
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.3 * torch.randn_like(p)            # norms start with weights of 1 and biases of 0, which would hide errors
    state = {name: value.numpy().copy() for name, value in theirs.state_dict().items()}
    try:
        expected = torchs(torch, theirs, sample, torch.float64)[:4] if dtype == "float32" else None
        wanted = torchs(torch, theirs, sample, getattr(torch, dtype))
    except Exception as error:
        return "refused", f"torch: {error}"
    try:
        return compared(ours(make, given, sample, training, dtype, state, wanted), wanted, expected, dtype)
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


def torchs(torch: Any, module: Any, sample: Any, kind: Any) -> tuple[Any, ...]:
    """(outputs, gradients of inputs, of parameters by name, buffers afterwards, cotangents) of a copy of PyTorch's module."""
    module = copy.deepcopy(module).to(kind)
    leaves: list[Any] = []

    def moved(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.is_floating_point():
                x = x.detach().to(kind).requires_grad_()
                leaves.append(x)
            return x
        return type(x)(map(moved, x)) if isinstance(x, list | tuple) else x
    torch.manual_seed(2)
    given = sample.forward_input
    outputs = [x for x in flat(module(*map(moved, given.args), **{k: moved(v) for k, v in given.kwargs.items()}))
               if x is not None]
    rng = np.random.default_rng(1)
    cotangents = [rng.standard_normal(tuple(y.shape)).astype("float32") if y.requires_grad else None for y in outputs]
    moving = [(y, torch.tensor(c, dtype=kind)) for y, c in zip(outputs, cotangents) if c is not None]
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    sources = [*leaves, *(dict(module.named_parameters())[name] for name in names)]
    grads = [np.zeros(0)] * len(sources)
    if moving and sources:
        grads = [g.numpy() for g in torch.autograd.grad([y for y, _ in moving], sources, [c for _, c in moving],
                                                        allow_unused=True, materialize_grads=True)]
    buffers = {name: value.numpy() for name, value in module.named_buffers()}
    return ([y.detach().numpy() for y in outputs], grads[:len(leaves)], dict(zip(names, grads[len(leaves):])), buffers,
            cotangents)


def ours(make: Callable[..., Any], given: Any, sample: Any, training: bool, dtype: str, state: dict[str, Any],
         wanted: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same of our layer; parameters and buffers under PyTorch's names."""
    made = make(*map(plain, given.args), **{k: plain(v) for k, v in given.kwargs.items()})
    fitted = made if isinstance(made, Fitted) else Fitted(made)
    module, leaves = fitted.module, []
    own: dict[str, Any] = {}
    if module is not None:
        module.initialize(dtype=dtype)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        known = {fitted.rename(name): value for name, value in state.items() if fitted.rename(name) in own}
        module.load_state_dict(known)
        module.train(training)

    def moved(x: Any) -> Any:
        if hasattr(x, "detach"):
            array = x.detach().numpy()
            if array.dtype.kind != "f":
                return array
            leaves.append(Tensor(array.astype(dtype), requires_grad=True))
            return leaves[-1]
        return type(x)(map(moved, x)) if isinstance(x, list | tuple) else x
    args, kwargs = [moved(x) for x in sample.forward_input.args], {k: moved(v) for k, v in sample.forward_input.kwargs.items()}
    if "input" in kwargs:
        args.insert(0, kwargs.pop("input"))
    call: Any = fitted.call or module
    with random.use(random.Scope(seed=2)):
        outputs = [y for y in flat(call(*args, **kwargs)) if y is not None]
    roots = [(y, c.astype(dtype)) for y, c in zip(outputs, wanted[4]) if c is not None and y.requires_grad]
    if roots:
        Backward(None, False).run(roots)
    zeros = {name: np.zeros_like(p.array) if p.grad is None else p.grad for name, p in own.items() if isinstance(p, nn.Parameter)}
    return ([y.array if isinstance(y, Tensor) else np.asarray(y) for y in outputs],
            [np.zeros_like(x.array) if x.grad is None else x.grad for x in leaves],
            {name: zeros[fitted.rename(name)] for name in wanted[2]},
            {name: own[fitted.rename(name)].array for name in wanted[3] if fitted.rename(name) in own})


def compared(found: tuple[Any, ...], wanted: tuple[Any, ...], truth: tuple[Any, ...] | None, dtype: str) -> tuple[str, str]:
    for part, what in enumerate(("output", "gradient of input", "gradient of", "buffer")):
        mine, theirs = found[part], wanted[part]
        exact = truth[part] if truth is not None else None
        if len(mine) != len(theirs) and what != "buffer":
            return "wrong", f"{len(mine)} of {what} instead of {len(theirs)}"
        for key in (mine if isinstance(mine, dict) else range(len(mine))):
            difference = unlike(mine[key], theirs[key].astype(mine[key].dtype) if what == "buffer" else theirs[key],
                                None if exact is None or mine[key].dtype.kind != "f" else exact[key], dtype)
            if difference:
                return "wrong", f"{what} {key}: {difference}"
    return "equal", ""


def plain(x: Any) -> Any:
    return x.detach().numpy() if hasattr(x, "detach") else x


def described(sample: Any) -> str:
    def short(x: Any) -> str:
        return str(list(x.shape)) if hasattr(x, "shape") else str(x)
    parts = [", ".join([*map(short, given.args), *(f"{k}={short(v)}" for k, v in given.kwargs.items() if v is not None)])
             for given in (sample.constructor_input, sample.forward_input)]
    return f"({parts[0][:200]})({parts[1][:120]})"
