"""The hash of parameters, against its definition worked out by hand."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from mpitrain.checkpoint.hashes import array_line, total_sha256


def parameters_sha256(arrays: dict[str, np.ndarray]) -> str:
    return total_sha256(array_line(name, array) for name, array in arrays.items())


def test_the_hash_is_that_of_the_lines_in_the_documented_form() -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    scalar = np.array(2.5, np.float64)
    line_w = "w\tfloat32\t3x4\t" + hashlib.sha256(w.astype("<f4").tobytes()).hexdigest() + "\n"
    line_s = "scale\tfloat64\t\t" + hashlib.sha256(scalar.astype("<f8").tobytes()).hexdigest() + "\n"
    assert parameters_sha256({"w": w, "scale": scalar}) == hashlib.sha256((line_s + line_w).encode()).hexdigest()


def test_no_parameters_hash_to_the_hash_of_nothing() -> None:
    assert parameters_sha256({}) == hashlib.sha256(b"").hexdigest()


def test_names_are_sorted_by_their_bytes_and_not_by_the_mapping() -> None:
    values = {name: np.full(2, i) for i, name in enumerate(["é", "z", "a.10", "a.9", "B"])}
    backwards = dict(reversed(values.items()))
    lines = "".join(f"{name}\tint64\t2\t{hashlib.sha256(values[name].tobytes()).hexdigest()}\n"
                    for name in ["B", "a.10", "a.9", "z", "é"])
    assert parameters_sha256(values) == parameters_sha256(backwards) == hashlib.sha256(lines.encode()).hexdigest()


def test_memory_layout_and_byte_order_do_not_matter() -> None:
    values = np.arange(24, dtype=np.float64).reshape(4, 6)
    same = [values, np.asfortranarray(values), values.astype(">f8"), np.repeat(values, 2, axis=1)[:, ::2]]
    assert len({parameters_sha256({"w": array}) for array in same}) == 1


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.float64), np.zeros((3, 2), np.float32), np.zeros(6, np.float32),
                                   -np.zeros((2, 3), np.float32)], ids=["dtype", "shape", "rank", "sign of zero"])
def test_dtype_shape_and_every_bit_matter(other: np.ndarray) -> None:
    assert parameters_sha256({"w": other}) != parameters_sha256({"w": np.zeros((2, 3), np.float32)})


def test_an_empty_array_has_a_line_too() -> None:
    empty = np.zeros((0, 3), np.float32)
    line = f"e\tfloat32\t0x3\t{hashlib.sha256(b'').hexdigest()}\n"
    assert parameters_sha256({"e": empty}) == hashlib.sha256(line.encode()).hexdigest()
