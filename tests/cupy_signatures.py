"""What CuPy's functions, ufuncs and methods take, for the stand-in (`fakegpu`), which refuses what CuPy would refuse; and what
there is in cupy.cuda.

    python tests/cupy_signatures.py        with CuPy installed (no GPU is needed): writes tests/cupy_signatures.json anew
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
Taken = dict[str, Any]
ANYTHING: Taken = {"positional": None, "keywords": None}                     # what no signature can be read of


def taken(parameters: Any) -> Taken:
    """How many positional arguments at most, and which keywords; None: any."""
    kinds = {p.kind for p in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return ANYTHING
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = None if inspect.Parameter.VAR_POSITIONAL in kinds else sum(p.kind in by_place for p in parameters)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {"positional": positional, "keywords": [p.name for p in parameters if p.kind in by_name]}


def of_ufunc(function: Any) -> Taken:
    """The methods among at, reduce, accumulate that it has: others raise NotImplementedError whatever they get."""
    methods = []
    for name in ("at", "reduce", "accumulate"):
        try:
            getattr(function, name)(None, None, None)
        except NotImplementedError:
            continue
        except Exception:                                                    # it got as far as looking at its arguments
            methods.append(name)
    return {"positional": function.nin + function.nout, "keywords": ["out", "casting", "dtype"], "methods": methods}


def of_module(cupy: Any, module: Any, prefix: str = "") -> dict[str, Taken]:
    found = {}
    for name in sorted(vars(module)):
        function = getattr(module, name)
        if name.startswith("_") or isinstance(function, type) or not callable(function):
            continue
        if isinstance(function, cupy.ufunc):
            found[prefix + name] = of_ufunc(function)
            continue
        try:
            found[prefix + name] = taken(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            found[prefix + name] = ANYTHING
    return found


def of_method(method: Any) -> Taken | None:
    """Methods are compiled: their signatures stand in the first lines of their docstrings. None for properties."""
    if not callable(method):
        return None
    match = re.match(r"\w+\.\w+\(self(?:, )?(.*?)\)( ->|$)", (method.__doc__ or "").split("\n")[0])
    if match is None:
        return ANYTHING
    text = re.sub(r"\b(int|_ndarray_base|Py_ssize_t|bool|shape_t) (?=\w)", "", match[1])
    return taken(inspect.signature(eval(f"lambda {text}: 0")).parameters.values())


def of_cuda(cuda: Any) -> dict[str, list[str]]:
    """The names in cupy.cuda, and those of what the stand-in (`fakecuda`) has of it."""
    parts = {"": cuda, **{name: getattr(cuda, name) for name in (
        "runtime", "Graph", "Device", "Event", "MemoryHook", "MemoryPool", "PinnedMemoryPool", "Stream")}}
    return {title: [name for name in dir(part) if not name.startswith("_")] for title, part in parts.items()}


def main() -> None:
    import cupy
    warnings.simplefilter("ignore")
    functions = {**of_module(cupy, cupy), **of_module(cupy, cupy.linalg, "linalg."), **of_module(cupy, cupy.fft, "fft.")}
    methods = {name: of_method(getattr(cupy.ndarray, name)) for name in sorted(dir(cupy.ndarray)) if not name.startswith("_")}
    lines = [f'"cuda": {json.dumps(of_cuda(cupy.cuda))}', f'"version": {json.dumps(cupy.__version__)}']
    for title, table in (("functions", functions), ("methods", methods)):
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())
        lines.append(f'"{title}": {{\n{rows}\n}}')
    FILE.write_text("{" + ",\n".join(lines) + "}\n")
    print(f"{FILE.name}: {len(functions)} functions and {len(methods)} methods of CuPy {cupy.__version__}")


if __name__ == "__main__":
    main()
