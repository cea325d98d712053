"""What PyTorch's databases have besides samples, through our operations and layers: `reference_inputs` (more shapes, memory
layouts and values), `error_inputs` (which PyTorch refuses), and the samples again with NaN and infinities among their values.

An error input has to be refused by one of our own errors, in one line; `ACCEPTED` has those that we answer, and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from harness import Absent, Result, described, op_db, run_sample, translated

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.errors import MpitrainError

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0)

# Of results that are not PyTorch's: names of entries, what of them, and why.
UNLIKE = (
    (r"nn.functional.(celu|elu|selu|relu6|hardtanh|hardshrink|softshrink)|logit", r"gradient 0: off by (inf|\d)",
     "PyTorch's gradient at NaN is one thing where it takes eight numbers at once, and another in the rest of a row"),
    (r"nn.functional.celu", r"gradient 0: off by \S+e-0[89]", "PyTorch has 1 / alpha in float32"),
    (r"digamma|(special.)?polygamma.*", r"gradient 0: off by inf: .*float64\(-?inf\)",
     "at its poles, where PyTorch divides by the square of a sine that it has rounded, or says NaN"),
    (r"(special.)?polygamma.*", r"result 0: off by inf: \S+\((inf|-?0.0|nan)\)",
     "inf at its poles, 0 at infinity, and no value at -infinity; PyTorch has a rounded sine, NaN, and inf there"),
    (r"(special.)?polygamma.*", r"result 0: off by 4.8e-10: \S+\(1.6449340668482264\)", "pi^2 / 6; PyTorch's is off by 5e-10"),
    (r"(special.)?polygamma.*", r"gradient 0: off by \S+e-09", "PyTorch rounds pi x before it takes the sine"),
    (r"special.log_ndtr", r"gradient 0: off by 2.0e\+13: ", "the slope at -1e20 is 1e20, PyTorch says 0.4"),
    (r"prod", r"gradient 0: off by inf: \S+\(nan\)", "the product of 0 and infinity is NaN, PyTorch leaves zeros out"),
    (r"nanmean", r"gradient 0: off by inf: \S+\(0.0\)", "what is left out has no influence, PyTorch says NaN"),
    (r"amax|amin", r"gradient 0: off by inf", "NaN is the extremum, and has the gradient; PyTorch divides 0 by 0"),
    (r"__rdiv__", r"gradient 0: off by inf", "PyTorch adds up the numerators before it divides by 0"),
)

# Of error inputs that we answer: why, and a test of (name of the entry, sample).
ACCEPTED: dict[str, Callable[[str, Any], bool]] = {
    "numbers and arrays are taken where PyTorch's signature wants tensors (docs/operations.md)":
        lambda name, sample: any(isinstance(x, bool | int | float) for x in [sample.input, *sample.args][:2]),
    "integers and booleans become float32 where the result has fractions (docs/operations.md)":
        lambda name, sample: name == "mean" and not sample.input.is_floating_point(),
    "an input without channels has no windows, and its pool is as empty":
        lambda name, sample: "max_pool" in name and 0 in sample.input.shape,
}


# Of error inputs of layers, by the layer's name.
ACCEPTED_LAYERS: dict[str, str] = {}


def unlike(name: str, detail: str) -> bool:
    """Whether a reason is known."""
    return any(re.fullmatch(which, name) and re.search(what, detail) for which, what, _ in UNLIKE)


def samples(torch: Any, entry: Any, what: str, kind: Any, gradients: bool, count: int) -> Iterator[Any]:
    """Some of the entry's samples, reference or error inputs. Reference inputs are views of a leaf, and become leaves here."""
    torch.manual_seed(0)
    try:
        found = list(islice(getattr(entry, what)("cpu", kind, requires_grad=gradients), count))
    except ValueError:                            # PyTorch's own generator asks for gradients of integers
        found = list(islice(getattr(entry, what)("cpu", kind, requires_grad=False), count))

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.detach().requires_grad_(x.requires_grad)
        return type(x)(map(leaf, x)) if isinstance(x, list | tuple) and not isinstance(x, torch.Size) else x
    for sample in found:
        sample.input, sample.args = leaf(sample.input), tuple(map(leaf, sample.args))
        sample.kwargs = {name: leaf(x) for name, x in sample.kwargs.items()}
        yield sample


def references(torch: Any, name: str, ours: Callable[..., Any], count: int, largest: int) -> Result:
    """The reference inputs of an entry, those of up to `largest` numbers."""
    entry, result = op_db()[name], Result(name)
    dtype = "float64" if torch.float64 in entry.dtypes else "int64"
    kind = getattr(torch, dtype)
    gradients = entry.supports_autograd and kind.is_floating_point and kind in entry.backward_dtypes
    for number, sample in enumerate(samples(torch, entry, "reference_inputs", kind, gradients, count)):
        if not hasattr(sample.input, "numel") or sample.input.numel() <= largest:
            outcome, detail = run_sample(torch, entry, ours, sample, dtype)
            outcome = "unlike" if outcome == "wrong" and unlike(name, detail) else outcome
            result.add(outcome, f"{dtype} reference {number} {described(sample)}: {detail}" if detail else "")
    return result


def specials(torch: Any, name: str, ours: Callable[..., Any], count: int) -> Result:
    """The first samples of an entry, with NaN, infinities, zeros and ones in place of some of the input's values."""
    entry, result = op_db()[name], Result(name)
    gradients = entry.supports_autograd and torch.float64 in entry.backward_dtypes
    for number, sample in enumerate(samples(torch, entry, "sample_inputs", torch.float64, gradients, count)):
        x = sample.input
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float64 or not x.numel():
            continue
        values = x.detach().clone().reshape(-1)
        places = torch.arange(0, len(values), 2 if len(values) > len(SPECIAL) else 1)
        values[places] = torch.tensor([SPECIAL[(i + number) % len(SPECIAL)] for i in range(len(places))], dtype=x.dtype)
        sample.input = values.reshape(x.shape).requires_grad_(x.requires_grad)
        outcome, detail = run_sample(torch, entry, ours, sample, "float64")
        outcome = "unlike" if outcome == "wrong" and unlike(name, detail) else outcome
        result.add(outcome, f"special {number} {described(sample)}: {detail}" if detail else "")
    return result


def errors(torch: Any, name: str, ours: Callable[..., Any]) -> Result:
    """The error inputs of an entry: refused, accepted with a reason, absent; or wrong or raw."""
    entry, result = op_db()[name], Result(name)
    torch.manual_seed(0)
    if entry.error_inputs_func is None:
        return result
    for number, error in enumerate(entry.error_inputs("cpu")):
        sample = error.sample_input
        given = [sample.input, *sample.args], dict(sample.kwargs)
        try:
            entry.op(*given[0], **given[1])
            continue                              # it says another error than expected, or none
        except Exception as refusal:
            theirs = str(refusal).partition("\n")[0][:80]
        try:
            args, kwargs = translated(torch, given, [])
        except (Absent, ValueError):              # NumPy has no such dtype, or not as many dims
            result.add("absent")
            continue
        outcome, detail = refused(partial(ours, *args, **kwargs))
        reason = next((why for why, holds in ACCEPTED.items() if outcome == "answers" and holds(name, sample)), None)
        kind = "accepted" if reason else "wrong" if outcome == "answers" else outcome
        result.add(kind, f"error {number} {described(sample)}: {detail}; torch says {theirs}" if kind in ("wrong", "raw") else "")
    return result


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except MpitrainError as error:
        return ("raw", f"two lines: {error}") if "\n" in str(error) else ("refused", "")
    except Absent:
        return "absent", ""
    except TypeError as error:
        said = str(error)
        return ("absent", "") if "unexpected keyword" in said or "positional argument" in said else ("raw", repr(error))
    except Exception as error:
        return "raw", repr(error)
    return "answers", "answers"


def module_errors(torch: Any, entry: Any, make: Callable[..., Any]) -> Result:
    """The error inputs of a layer: its constructor, or its forward, has to refuse."""
    result = Result(entry.name)
    if entry.module_error_inputs_func is None:
        return result
    torch.manual_seed(0)
    for number, error in enumerate(entry.module_error_inputs_func(entry, "cpu", torch.float32, False, True)):
        given = error.module_error_input

        outcome, detail = refused(partial(made_and_called, torch, make, given))
        kind = ("accepted" if entry.name in ACCEPTED_LAYERS else "wrong") if outcome == "answers" else outcome
        forward = given.forward_input.args if given.forward_input is not None else ()
        where = f"({given.constructor_input.args} {given.constructor_input.kwargs})({[getattr(x, 'shape', x) for x in forward]})"
        result.add(kind, f"error {number} {where}: {detail}; torch says {str(error.error_regex)[:80]}" if (
            kind in ("wrong", "raw")) else "")
    return result


def made_and_called(torch: Any, make: Callable[..., Any], given: Any) -> None:
    def ours(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Tensor(x.detach().numpy())
        return type(x)(map(ours, x)) if isinstance(x, list | tuple) else x
    made = make(*map(ours, given.constructor_input.args), **{key: ours(x) for key, x in given.constructor_input.kwargs.items()})
    module, call = getattr(made, "module", made), getattr(made, "call", None)
    if isinstance(module, nn.Module):
        module.initialize(dtype="float32")
    if given.forward_input is not None:
        (call or module)(*map(ours, given.forward_input.args),
                         **{key: ours(x) for key, x in given.forward_input.kwargs.items()})


def by_element(entry: Any) -> bool:
    """Whether it is a function of each element, or a reduction: PyTorch's own classes of entries."""
    return any(kind.__name__ in ("UnaryUfuncInfo", "BinaryUfuncInfo", "ReductionOpInfo") for kind in type(entry).__mro__)
