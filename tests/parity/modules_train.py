"""PyTorch's losses as ours."""

from __future__ import annotations

from typing import Any

from harness import Absent
from map_train import reduction_of
from module_harness import Fitted

from mpitrain import nn

# Without SoftMarginLoss, whose samples PyTorch itself refuses: it has no derivative by the target. op_db has its function.
NAMES = """BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss HingeEmbeddingLoss HuberLoss
    KLDivLoss L1Loss MSELoss MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss
    PoissonNLLLoss SmoothL1Loss"""


def loss(name: str) -> Any:
    def make(*args: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", **kwargs: Any) -> Fitted:
        made = getattr(nn, name)(*args, reduction=reduction_of(size_average, reduce, reduction), **kwargs)

        def call(*inputs: Any, **named: Any) -> Any:
            if name == "PoissonNLLLoss" and made.options["full"] and (inputs[1].array <= 0).any():
                raise Absent("counts of less than 0, for which PyTorch's derivative by the target is NaN and ours is not")
            return made(*inputs, *named.values())
        return Fitted(None, call)
    return make


MAP = {f"nn.{name}": loss(name) for name in NAMES.split()}
