"""The data of the examples of physics: a closed-form solution that solves its equation, and files that are not what they were."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mpitrain.data import packages
from mpitrain.errors import DataError, MissingError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"data_of_{name}", EXAMPLES / name / "data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_closed_form_solves_burgers_equation() -> None:
    """By differences of the fourth order, away from the shock, whose width is v / 2."""
    burgers, v, h = script("burgers"), 0.01 / np.pi, 1e-3
    x, t = (grid.reshape(-1) for grid in np.meshgrid([-0.75, -0.3, 0.2, 0.6], [0.1, 0.4, 0.9]))

    def u(right: int, up: int) -> np.ndarray:
        found: np.ndarray = burgers.solution(x + right * h, t + up * h)
        return found
    by_x = [u(k, 0) for k in (-2, -1, 0, 1, 2)]
    u_x = (by_x[0] - 8 * by_x[1] + 8 * by_x[3] - by_x[4]) / (12 * h)
    u_xx = (-by_x[0] + 16 * by_x[1] - 30 * by_x[2] + 16 * by_x[3] - by_x[4]) / (12 * h * h)
    u_t = (u(0, -2) - 8 * u(0, -1) + 8 * u(0, 1) - u(0, 2)) / (12 * h)
    assert np.abs(u_t + by_x[2] * u_x - v * u_xx).max() < 1e-7 < 1e-2 < np.abs(u_t).max()


def test_the_closed_form_has_its_quadrature_done_and_its_edges_right() -> None:
    burgers = script("burgers")
    x, t = np.array([-1.0, 1.0, 0.0, 0.4, 1e-3, -2e-3]), np.array([0.5, 1.0, 0.7, 0.0, 1.0, 0.6])
    found = burgers.solution(x, t)
    np.testing.assert_allclose(found[:4], [0, 0, 0, -np.sin(0.4 * np.pi)], atol=1e-12)
    np.testing.assert_allclose(found, burgers.solution(x, t, nodes=9_001, reach=15.0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"x": np.zeros((50, 16, 16), np.float32)}, r"expected a tensor y of shape \(50, 16, 16\), found x; install it"),
    ({"x": np.zeros((50, 32, 32), np.float32)}, r"expected a tensor x of shape \(50, 16, 16\), found \(50, 32, 32\); install it"),
    (None, "install it")])
def test_darcy_s_file_of_another_kind_is_named(tensors: dict[str, np.ndarray] | None, message: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "darcy_test_16.pt"
    if tensors is None:
        path.write_bytes(b"PK\x03\x04 and no more")
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.tensor(value) for name, value in tensors.items()}, path)
    monkeypatch.setattr(packages, "python_file", lambda *_: packages.Packaged(path, "install it again"))
    with pytest.raises(DataError, match=message) as caught:
        script("darcy").fields("test")
    assert str(path) in str(caught.value) and str(caught.value).count(str(path)) == 1


def test_darcy_s_fields_are_pressures_over_two_kinds_of_ground() -> None:
    try:
        x, y = script("darcy").fields("test")
    except MissingError as error:
        pytest.skip(error.message)
    assert x.shape == y.shape == (50, 1, 16, 16) and set(np.unique(x)) == {0, 1} and -0.2 < y.min() < 0.1 < y.max() < 3
