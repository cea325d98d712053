"""safetensors: what we write the reference package reads, what it writes we read, and what it refuses we refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mpitrain.errors import DataError, MissingError, MpitrainError, OutputError
from mpitrain.interchange import importing, safetensors

reference = pytest.importorskip("safetensors.numpy", reason="needs safetensors (pip install mpitrain[bench])")
KINDS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {kind: (rng.standard_normal((3, 5)) * 40).astype(kind) for kind in KINDS}
    return {**found, "a number": np.asarray(2.5), "empty": np.zeros((0, 4), "f4"), "transposed": found["float32"].T,
            "ü.€": np.arange(3)}


def test_the_reference_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    mine = arrays()
    safetensors.write(tmp_path / "ours", mine, {"format": "pt"})
    theirs = reference.load_file(tmp_path / "ours")
    reference.save_file({name: np.array(array, order="C") for name, array in mine.items()}, tmp_path / "theirs", {"a": "b"})
    found = safetensors.read(tmp_path / "theirs")
    assert set(theirs) == set(found.tensors) == set(mine) and found.metadata == {"a": "b"}
    for name, array in mine.items():
        for other in (theirs[name], found.tensors[name].values()):
            assert other.dtype == array.dtype and other.shape == array.shape and other.tobytes() == array.tobytes(), name
    assert np.array_equal(found.tensors["float32"].values((slice(1, 2), slice(2, 4))), mine["float32"][1:2, 2:4])


def test_bfloat16_becomes_the_same_numbers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    x = torch.randn(64, 3).to(torch.bfloat16)
    x[0, 0], x[0, 1], x[0, 2] = float("inf"), -0.0, 1e-40
    save_file({"x": x}, tmp_path / "x")
    found = safetensors.read(tmp_path / "x").tensors["x"]
    assert found.dtype == "bfloat16" and found.values().tobytes() == x.float().numpy().tobytes()


def file_of(tmp_path: Path, header: object, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return tmp_path / "x"


def about(start: object = 0, stop: object = 4, dtype: object = "F32", shape: object = (1,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(("header", "said"), [
    (b"[1]", "begins with {"), (b"{", "no JSON"), (b"{" * 100_000, "no JSON"), (b'{"a":NaN}', "no JSON"),
    (b'{"a":1,"a":1}', 'the name "a" twice'), ({"a": 3}, "needs data_offsets"), ({"a": about(-4, 0)}, "needs data_offsets"),
    ({"a": about(4, 0)}, "needs data_offsets"), ({"a": about(0, 1 << 70)}, "needs data_offsets"),
    ({"a": about(True, 4)}, "needs data_offsets"), ({"a": about(4, 8)}, "without holes or overlaps"),
    ({"a": about(), "b": about(2, 6)}, "without holes or overlaps"), ({"a": about(0, 8, shape=(2,))}, "cut off"),
    ({}, "bytes that no tensor has"), ({"a": about(dtype="F8_E4M3", shape=(4,))}, 'has the dtype "F8_E4M3"'),
    ({"a": about(dtype=[])}, "has the dtype"), ({"a": about(shape=(-1,))}, "has the shape"),
    ({"a": about(shape=(2,))}, "takes 8 bytes"),
    ({"a": about(0, 0, shape=(0, 1 << 62, 1 << 62)), "b": about()}, "which no array has"),
    ({"a": about(shape=(1 << 32, 1 << 32))}, "takes more than 2^63 bytes"), ({"a": about(shape=[1] * 33)}, "has the shape"),
    ({"__metadata__": {"a": 1}, "a": about()}, "table of strings"), ({"a\n\x1b": 3}, r'"a\n\x1b" needs'),
    (b'{"\\ud800":1}', "no JSON")])
def test_a_wrong_header_is_refused_in_a_line(tmp_path: Path, header: object, said: str) -> None:
    with pytest.raises(DataError) as caught:
        safetensors.read(file_of(tmp_path, header, b"\0" * 4))
    assert said in caught.value.message and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
@pytest.mark.parametrize("length", [0x80, 0x180, 0x680, 0x4B50])
def test_a_length_that_begins_like_another_format_is_a_length(tmp_path: Path, length: int, name: str) -> None:
    text = json.dumps({"a": about()}).encode().ljust(length)
    (tmp_path / name).write_bytes(length.to_bytes(8, "little") + text + bytes(4))
    assert importing.read(tmp_path / name).tensors["a"].shape == (1,)


@pytest.mark.parametrize(("name", "content", "said"), [
    ("x.pt", b"junk" * 9, ".pt: the archive is damaged"), ("x.PTH", b"junk" * 9, ".pt: the archive is damaged"),
    ("x.pt", b"\x80\x02}.", ".pt: it is a bare pickle"), ("x.safetensors", b"\x80\x02}." * 9, "safetensors: the header has"),
    ("x.safetensors", b"PK\x03\x04" * 9, "safetensors: the header has"), ("x.bin", b"PK\x03\x04" * 9, ".pt: the archive is"),
    ("x.onnx", b"junk" * 9, "ONNX: it is damaged"), ("x.bin", b"\x08\x08:" * 9, "ONNX: it is damaged"),
    ("x.gguf", b"junk" * 9, "begins as no format does; its name says none, either: .safetensors, .pt, .pth, .onnx are read")])
def test_the_ending_says_the_format_and_then_the_first_bytes(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        importing.read(tmp_path / name)
    assert caught.value.message.partition(said)[1]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for content, said in ((b"", "an empty file"), (b"abc", "expected 8 bytes"),
                          ((1 << 32).to_bytes(8, "little") + b"{}", "cut off")):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataError, match=said):
            safetensors.read(tmp_path / "x")
    with pytest.raises(MissingError):
        safetensors.read(tmp_path / "none")
    with pytest.raises(DataError, match="no regular file"):
        safetensors.read(tmp_path)


def test_a_file_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    safetensors.write(tmp_path / "x", {"a": np.ones(3)}, {})
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        safetensors.write(tmp_path / "x", {}, {})
    assert (tmp_path / "x").read_bytes() == before
    safetensors.write(tmp_path / "x", {"a": np.zeros(3)}, {}, overwrite=True)
    assert (tmp_path / "x").read_bytes() != before and [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(OutputError, match="no folder"):
        safetensors.write(tmp_path / "none" / "x", {}, {})


@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_mutant_is_taken_where_the_reference_takes_it_and_else_refused_in_a_line(tmp_path: Path, count: int) -> None:
    """Mutants of a file: bytes changed, cut, doubled, numbers made large, in the header above all."""
    rng = random.Random(1)
    safetensors.write(tmp_path / "whole", {name: array for name, array in arrays().items() if array.size < 9 or name < "g"},
                      {"a": "b"})
    whole, verdicts = (tmp_path / "whole").read_bytes(), [0, 0]
    header = int.from_bytes(whole[:8], "little") + 8
    for _ in range(count):
        data = mutant(whole, header, rng)
        (tmp_path / "x").write_bytes(data)
        try:
            theirs: dict[str, np.ndarray] | None = reference.load(data)
        except Exception:
            theirs = None
        try:
            ours = {name: stored.values() for name, stored in safetensors.read(tmp_path / "x").tensors.items()}
        except MpitrainError as error:
            assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1000
            assert theirs is None or "has the dtype" in str(error), (error, data[:header])
            verdicts[0] += 1
        else:
            assert theirs is not None, data[:header]
            for name, array in ours.items():
                assert theirs[name].tobytes() == array.tobytes() and theirs[name].shape == array.shape
            verdicts[1] += 1
    assert min(verdicts) > count // 50


def mutant(whole: bytes, header: int, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        limit = rng.choice((8, header, header, header, len(data)))
        place = rng.randrange(max(1, min(limit, len(data))))
        kind = rng.randrange(6)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = data[place:place + rng.randrange(1, 40)]
        elif kind == 3:
            del data[place:place + rng.randrange(1, 9)]
        elif kind == 4:
            digits = [i for i in range(8, min(header, len(data))) if 48 <= data[i] < 58]
            if digits:
                at = rng.choice(digits)
                data[at:at + 1] = rng.choice((b"9", b"0", b"-1", b"99999999999999999999", b"1e3", b"true", b"null", b'"4"'))
        else:
            data[place:place + 1] = bytes([rng.randrange(256)])
        if len(data) > 8 and kind in (2, 3,
                                      4) and rng.random() < 0.8:               # the length follows, so that what is in it is read
            data[:8] = max(0, header + len(data) - len(whole) - 8).to_bytes(8, "little")
        if not data:
            break
    return bytes(data)
