"""`train.recompute`: which blocks run again in backward; the gradients are the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.config import load_config
from mpitrain.errors import ConfigError
from mpitrain.train.build.model import keep_inputs_only

NAMES = ("embed", "block0", "block1", "block2", "head")
calls: list[str] = []


class Counted(nn.Linear):
    def forward(self, x: Any) -> Any:
        calls.append(self.path.split(".")[0])
        return ops.tanh(super().forward(x))


def made() -> nn.Sequential:
    return nn.Sequential(*((name, Counted(6, 6)) for name in NAMES))


def run(model: nn.Sequential) -> tuple[list[str], list[bytes]]:
    """(blocks that ran again, gradients)."""
    model.initialize(3)
    calls.clear()
    ops.sum(model(Tensor(np.ones((4, 6), np.float32)))).backward()
    return [name for name in NAMES if calls.count(name) == 2], [p.grad.tobytes() for p in model.parameters()]


@pytest.mark.parametrize(("which", "again"), [
    (True, list(NAMES)), (False, []), (0, []), (2, ["embed", "block0"]), (9, list(NAMES)),
    (("block*",), ["block0", "block1", "block2"]), (("block1", "head"), ["block1", "head"]),
    (("b*0", "*1"), ["block0", "block1"])])
def test_the_blocks_asked_for_run_again_and_no_bit_changes(which: Any, again: list[str]) -> None:
    model = made()
    keep_inputs_only(model, which)
    found, gradients = run(model)
    assert found == again and gradients == run(made())[1]


def test_a_number_counts_on_each_stage_and_names_stay_names() -> None:
    model = made()
    keep_inputs_only(model, 1)
    assert run(model.slice(0, 2))[0] == ["embed"] and run(model.slice(2, 5))[0] == ["block1"]
    keep_inputs_only(model, ("block1", "block2"))
    assert run(model.slice(3, 5))[0] == ["block2"]


def test_what_names_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'train.recompute names "blok\*", and no block is called so'):
        keep_inputs_only(made(), ("embed", "blok*"))
    with pytest.raises(ConfigError, match="a Sequential of blocks"):
        keep_inputs_only(nn.Linear(2, 2), 1)


def test_a_configuration_says_all_a_number_or_names(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nname = "mlp"\n[data]\npath = "digits"\n[train]\nsteps = 1\n')
    found = [load_config(tmp_path / "run.toml", [f"train.recompute={text}"]).train.recompute
             for text in ("true", "false", "3", '["block*"]', "embed")]
    assert found == [True, False, 3, ("block*",), ("embed",)]
    with pytest.raises(ConfigError, match="recompute must be true, false, a number of blocks, 0 or more, or names"):
        load_config(tmp_path / "run.toml", ["train.recompute=-1"])
