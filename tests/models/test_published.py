"""Models have the sizes that their papers and other libraries state."""

from __future__ import annotations

import pytest
from published import PUBLISHED

from mpitrain.models import MODELS


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_number_of_parameters(name: str) -> None:
    wanted = PUBLISHED[name]
    assert MODELS[name.partition(":")[0]](**wanted.arguments).count_parameters() == wanted.parameters
