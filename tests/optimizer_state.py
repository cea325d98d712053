"""An optimizer's state by name, as tests compare it and hand it on to another one."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import overwrite


def state_of(optimizer: Any) -> dict[str, Any]:
    """"m/block0.weight", ... (views, not copies) and "steps"."""
    layout = optimizer.layout
    views = {f"{kind}/{s.name}": view for kind, flat in optimizer.state.items()
             for s, view in zip(layout.segments, layout.views(flat), strict=True)}
    return views | {"steps": np.array(optimizer.steps)}


def set_state(optimizer: Any, state: dict[str, Any]) -> None:
    for name, view in state_of(optimizer).items():
        overwrite(view, state[name])
    optimizer.steps = int(state["steps"])
