"""The tables of docs/models.md, from the table of models and from `published`; run as a program, it writes them anew."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from published import PUBLISHED  # noqa: E402

from mpitrain import models  # noqa: E402
from mpitrain.errors import MeshError  # noqa: E402
from mpitrain.models import MODELS  # noqa: E402
from mpitrain.placement.tensor_plan import narrow, read_plan  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {              # those that a model needs and that have no line of their own
    "elastic_gpt": {"depths": [1, 2], "heads": [2, 4], "hidden": [32, 64], "width": 32, "block": 16, "vocabulary": 64},
    "elastic_mlp": {"inputs": 64, "outputs": 10},
    "gpt": {"layers": 12, "heads": 12, "width": 768, "block": 1024, "vocabulary": 50257},
    "gru": {"inputs": 3, "hidden": 12, "outputs": 1}, "tcn": {"inputs": 1, "channels": [32, 32], "outputs": 1},
    "mlp": {"inputs": 784, "hidden": [512, 512], "outputs": 10}}
FEW = 2, 3, 5                                          # ranks
PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
PARTS = ("published", "all")
SENTENCE = r"(?<=\.) (?=[A-Z`])"                   # the end of one; "et al. 2016" goes on


def published() -> list[str]:
    lines = ["| model | arguments | sample | parameters | M multiply-adds | of |", "|---|---|---|---|---|---|"]
    for name, found in PUBLISHED.items():
        arguments = ", ".join(f"`{key} = {_toml(value)}`" for key, value in found.arguments.items())
        sample = f"{found.shape[0]} tokens" if found.tokens else " x ".join(map(str, found.shape))
        work = "" if found.gigaflops is None else f"{1e3 * found.gigaflops:,.6g}"
        lines.append(f"| `{name.partition(':')[0]}` | {arguments} | {sample} | {found.parameters:,} | {work} | {found.source} |")
    return lines


def every() -> list[str]:
    lines = ["| model | what it is | `mesh.tp` |", "|---|---|---|"]
    for name in sorted(set(models.__all__) - {"MODELS"}):             # not those that a test has registered
        paragraph = " ".join((inspect.getdoc(MODELS[name]) or "").partition("\n\n")[0].split())
        lines.append(f"| `{name}` | {re.split(SENTENCE, paragraph)[0]} | {_share(name)} |")
    return lines


def _share(name: str) -> str:
    """How much of the parameters a rank has of those that share a model's layers, on as few ranks as its sizes allow."""
    known = {key.partition(":")[0]: found.arguments for key, found in reversed(PUBLISHED.items())}
    model = MODELS[name](**SIZES.get(name) or known.get(name, {}))
    if not model.plan:
        return "-"
    layers, whole = read_plan(model, model.plan), model.count_parameters()
    for n in FEW:
        try:
            narrow(layers, 0, n)
        except MeshError:                              # Their number of heads is not even.
            continue
        return f"{sum(p.size for p in model.parameters()) / whole:.0%}" + ("" if n == 2 else f" of {n}")
    raise AssertionError(f"the layers of {name} cannot be cut over {FEW} ranks")


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def with_tables(text: str) -> str:
    """The page with the tables as they should be, each between two comments."""
    for part, lines in zip(PARTS, (published(), every())):
        before, found, rest = text.partition(f"<!-- {part} -->\n")
        _, ends, after = rest.partition(f"<!-- end of {part} -->\n")
        assert found and ends, f"{PAGE} has lost the comments around the table of {part}"
        text = "\n".join([before + found.rstrip("\n"), *lines, ends]) + after
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
