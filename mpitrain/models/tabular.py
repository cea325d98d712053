"""Models of tables: DeepFM and FT-Transformer.

Letters: `B` batch, `F` columns of whole numbers, `N` columns of numbers, `D` width. Columns of whole numbers come as the numbers
that they are, 0 to their count less 1, whatever the type that a run casts them to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, constant
from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn import init
from mpitrain.nn.basic import Check
from mpitrain.nn.init import Initialiser


class Columns(nn.Module):
    """(B, F) whole numbers to rows (B, F, D) of one table, in which each column has so many rows as `categories` says."""

    def __init__(self, categories: Sequence[int], width: int, weight_init: Initialiser):
        self.categories = tuple(categories)
        self.first = tuple(accumulate(categories, initial=0))[:-1]
        self.table = nn.Embedding(sum(categories), width, weight_init=weight_init)

    def forward(self, x: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else Tensor(x)
        numbers = x.long()
        self._check(x.array, numbers.array, x.xp)
        rows: Tensor = self.table(numbers + constant(x.xp, self.first))
        return rows

    def _check(self, given: Array, numbers: Array, xp: Any) -> None:
        """A number beyond its column's would be another column's row, and a fraction would be cut off."""
        wrong = (numbers != given) | (numbers < 0) | (numbers >= constant(xp, self.categories))
        if wrong.any():
            place = int(wrong.reshape(-1).argmax())
            row, column = divmod(place, len(self.categories))
            raise DataError(f"column {column} of the model's whole numbers holds {float(given[row, column]):g}, expected a whole "
                            f"number in 0 ... {self.categories[column] - 1}; model.categories counts the values of each column",
                            row=row)


class Factors(nn.Module):
    """(B, F) whole numbers to (B, F D + 1): the rows of all columns, and behind them the factorisation machine's sum.

    That is a bias, a weight for each value, and the products of each two columns' rows (Rendle 2010), in time linear in F.
    """

    def __init__(self, categories: Sequence[int], width: int):
        self.weights = Columns(categories, 1, init.normal(0.01))
        self.rows = Columns(categories, width, init.normal(0.01))
        self.bias = nn.Parameter((1,), init.zeros)

    def forward(self, x: Any) -> Tensor:
        rows = self.rows(x)
        total = ops.sum(rows, dim=1)
        pairs = 0.5 * ops.sum(total * total - ops.sum(rows * rows, dim=1), dim=-1, keepdim=True)
        machine = ops.sum(self.weights(x), dim=1) + pairs + self.bias
        return ops.concatenate([ops.reshape(rows, rows.shape[0], -1), machine], dim=-1)


class Beside(nn.Module):
    """(B, I + 1) to (B, O + 1): a layer of the first I numbers; the last one passes by."""

    def __init__(self, inputs: int, outputs: int, dropout: float):
        self.linear = nn.Linear(inputs, outputs, activation="relu", weight_init=init.xavier_normal(), bias_init=init.zeros)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Tensor:
        return ops.concatenate([self.dropout(self.linear(x[:, :-1])), x[:, -1:]], dim=-1)


class Together(nn.Module):
    """(B, I + 1) to (B, 1): a weighted sum of the first I numbers, plus the last one."""

    def __init__(self, inputs: int):
        self.linear = nn.Linear(inputs, 1, bias=False, weight_init=init.xavier_normal())

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.linear(x[:, :-1]) + x[:, -1:]
        return y


def deepfm(categories: Sequence[int], width: int = 10, hidden: Sequence[int] = (400, 400, 400), dropout: float = 0.0
           ) -> nn.Sequential:
    """A factorisation machine and an MLP that share embeddings (Guo et al. 2017): (B, F) whole numbers to one number (B, 1).

    `categories` counts the values of each column. The number is a logit for train.loss = "binary_cross_entropy", or a rating.
    """
    _require_categories("deepfm", categories)
    require_sizes(width=width)
    require_list_of_sizes("hidden", hidden)
    widths = [len(categories) * width, *hidden]
    model = nn.Sequential(
        ("input", Check("deepfm", (None, len(categories)), "set model.categories")),
        ("embed", Factors(categories, width)),
        *((f"hidden{i}", Beside(inputs, outputs, dropout)) for i, (inputs, outputs) in enumerate(zip(widths, widths[1:]))),
        ("head", Together(widths[-1])))
    model.plan = {"embed.*.table": "vocabulary", "hidden*.linear": "gathered"}
    model.size_keys = {"hidden": [f"hidden{i}.linear" for i in range(len(hidden))]}
    return model


class Tokens(nn.Module):
    """(B, N + F) to (B, 1 + N + F, D): a class token, N numbers times a row each, F rows of a table; each column has a bias."""

    def __init__(self, numeric: int, categories: Sequence[int], width: int):
        values = init.uniform(1.0 / math.sqrt(width))
        self.numeric = numeric
        self.class_token = nn.Parameter((1, 1, width), values, decay=False)
        self.weight = nn.Parameter((numeric, width), values, decay=False) if numeric else None
        self.columns = Columns(categories, width, values) if categories else None
        self.bias = nn.Parameter((numeric + len(categories), width), values, decay=False)

    def forward(self, x: Any) -> Tensor:
        parts: list[Any] = []
        if self.weight is not None:
            parts.append(ops.expand_dims(x[:, :self.numeric], -1) * self.weight)
        if self.columns is not None:
            parts.append(self.columns(x[:, self.numeric:]))
        tokens = (ops.concatenate(parts, dim=1) if len(parts) > 1 else parts[0]) + self.bias
        first = ops.broadcast_to(self.class_token, (x.shape[0], *self.class_token.shape[1:]))
        return ops.concatenate([first, tokens], dim=1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), whose MLP is down(value(x) * relu(gate(x))) (ReGLU, Shazeer 2020).

    The first block has no norm before its attention, and the last one goes on with the class token alone: (B, 1, D).
    """

    chains = ("value", "dropout", "down"), ("gate", "dropout", "down")

    def __init__(self, width: int, heads: int, hidden: int, dropouts: tuple[float, float, float], first: bool, last: bool):
        of_attention, of_hidden, of_residual = dropouts
        self.last = last
        self.norm1 = None if first else nn.LayerNorm(width)
        self.attention = nn.MultiHeadAttention(width, heads, dropout=of_attention, qkv_init=init.default_weight)
        self.dropout1 = nn.Dropout(of_residual)
        self.norm2 = nn.LayerNorm(width)
        self.value, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, activation="relu")
        self.dropout = nn.Dropout(of_hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout2 = nn.Dropout(of_residual)

    def forward(self, x: Any) -> Tensor:
        x = x + self.dropout1(self.attention(x if self.norm1 is None else self.norm1(x)))
        if self.last:
            x = x[:, :1]
        y = self.norm2(x)
        out: Tensor = x + self.dropout2(self.down(self.dropout(self.value(y) * self.gate(y))))
        return out


class Answer(nn.Module):
    """(B, L, D) to (B, outputs): norm, ReLU and a linear layer of the class token."""

    def __init__(self, width: int, outputs: int):
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.linear(ops.relu(self.norm(x[:, 0])))
        return y


def ft_transformer(numeric: int, outputs: int, categories: Sequence[int] = (), width: int = 192, layers: int = 3, heads: int = 8,
                   hidden: int | None = None, attention_dropout: float = 0.2, hidden_dropout: float = 0.1,
                   residual_dropout: float = 0.0) -> nn.Sequential:
    """FT-Transformer (Gorishniy et al. 2021): each column of a table is a token; (B, numeric + F) to (B, outputs).

    The first `numeric` columns are numbers, those behind them whole numbers, whose values `categories` counts. `hidden` is the
    width inside of an MLP, 4/3 of `width` by default, as in the paper.
    """
    require_sizes(0, numeric=numeric)
    require_sizes(outputs=outputs, width=width, layers=layers, heads=heads)
    require_list_of_sizes("categories", categories)
    if not numeric + len(categories):
        raise ConfigError("ft_transformer: model.numeric is 0 and model.categories is empty; expected one column or more")
    hidden = int(width * 4 / 3) if hidden is None else hidden
    require_sizes(hidden=hidden)
    if width % heads:
        raise ShapeError(f"a width of {width} cannot be cut into {heads} heads; model.width must be a multiple of model.heads")
    dropouts = (attention_dropout, hidden_dropout, residual_dropout)
    model = nn.Sequential(
        ("input", Check("ft_transformer", (None, numeric + len(categories)), "set model.numeric and model.categories")),
        ("embed", Tokens(numeric, categories, width)),
        *((f"block{i}", Block(width, heads, hidden, dropouts, i == 0, i == layers - 1)) for i in range(layers)),
        ("head", Answer(width, outputs)))
    model.plan = {"block*.attention.qkv": "column", "block*.attention.out": "row", "block*.value": "column",
                  "block*.gate": "column", "block*.dropout": "channels", "block*.down": "row"}
    return model


def _require_categories(model: str, categories: Sequence[int]) -> None:
    require_list_of_sizes("categories", categories)
    if not categories:
        raise ConfigError(f"{model}: model.categories is empty, expected the number of values of each column")
