"""Models have the sizes that their papers and other libraries state."""

from __future__ import annotations

import numpy as np
import pytest
from published import PUBLISHED

from mpitrain.models import MODELS
from mpitrain.plan.flops import count

PRINTED = {"torchvision": 0.0005}                   # Its figures have three digits behind the point.


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_number_of_parameters_and_multiply_adds(name: str) -> None:
    wanted = PUBLISHED[name]
    model = MODELS[name.partition(":")[0]](**wanted.arguments)
    assert model.count_parameters() == wanted.parameters
    if wanted.gigaflops is not None:
        sample = np.zeros((1, *wanted.shape), np.int64 if wanted.tokens else np.float32)
        assert count(model, sample).forward / 1e9 == pytest.approx(wanted.gigaflops, rel=0.005, abs=PRINTED.get(wanted.source, 0))
