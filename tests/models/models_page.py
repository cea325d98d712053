"""The tables of docs/models.md, from the table of models and from `published`; run as a program, it writes them anew."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from published import PUBLISHED  # noqa: E402

from mpitrain import models  # noqa: E402
from mpitrain.models import MODELS  # noqa: E402

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
    lines = ["| model | what it is |", "|---|---|"]
    for name in sorted(set(models.__all__) - {"MODELS"}):             # not those that a test has registered
        paragraph = " ".join((inspect.getdoc(MODELS[name]) or "").partition("\n\n")[0].split())
        lines.append(f"| `{name}` | {re.split(SENTENCE, paragraph)[0]} |")
    return lines


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
