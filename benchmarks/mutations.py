"""The small changes that could be made to each file of `mpitrain`: an operator, a comparison, a constant, a flag, a condition."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
             ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
             ast.RShift: (">>", "<<")}
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
               ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
               ast.NotIn: ("not in", "in")}


@dataclass(frozen=True)
class Mutant:
    """`text[start:stop]` of the file, as bytes, becomes `new`."""

    file: str
    line: int
    where: str
    start: int
    stop: int
    was: str
    new: str

    @property
    def name(self) -> str:
        """The same as long as its function's name and its line stay."""
        return hashlib.sha256("\0".join((self.file, self.where, self.was, self.new)).encode()).hexdigest()[:12]


class Finder(ast.NodeVisitor):
    """All the changes that could be made to one file."""

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text.encode()
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.function: list[str] = []
        self.found: list[Mutant] = []

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def end(self, node: ast.expr) -> int:
        return self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def add(self, line: int, start: int, stop: int, new: str) -> None:
        column = start - self.starts[line - 1]
        where = f"{'.'.join(self.function)}|{self.lines[line - 1].decode().strip()}|{column}"
        self.found.append(Mutant(self.file, line, where, start, stop, self.text[start:stop].decode(), new))

    def between(self, left: ast.expr, right: ast.expr, pair: tuple[str, str]) -> None:
        """The sign between two expressions, outside of comments and parentheses."""
        start, stop = self.end(left), self.at(right.lineno, right.col_offset)
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.text[start:stop])
        found = re.search(rb"\s+".join(map(re.escape, pair[0].encode().split())), gap)
        if found:
            line = (left.end_lineno or 0) + gap[:found.start()].count(b"\n")
            self.add(line, start + found.start(), start + found.end(), pair[1])

    def whole(self, node: ast.expr, new: str) -> None:
        self.add(node.lineno, self.at(node.lineno, node.col_offset), self.end(node), new)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS and not any(isinstance(side, (ast.JoinedStr, ast.Constant)) and isinstance(
                getattr(side, "value", ""), str) for side in (node.left, node.right)):
            self.between(node.left, node.right, OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self.between(left, right, COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, pair)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.whole(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.whole(node, repr(node.value + 1) if isinstance(node.value, int) else repr(node.value * 2 or 1.0))

    def condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        source = ast.get_source_segment(self.text.decode(), node.test) or ""
        self.whole(node.test, f"(not ({source}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = condition

    def scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """A function or class: annotations are skipped, defaults are not."""
        self.function.append(node.name)
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.function.pop()

    visit_FunctionDef = visit_ClassDef = scope

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 does not know where in the file the parts of an f-string are."""


def candidates(tree: Path, seed: int) -> list[Mutant]:
    """Every possible change, in the random order that the seed gives."""
    found: list[Mutant] = []
    for path in sorted((tree / "mpitrain").rglob("*.py")):
        finder = Finder(str(path.relative_to(tree)), path.read_text())
        finder.visit(ast.parse(finder.text))
        found += finder.found
    return sorted(found, key=lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest())
