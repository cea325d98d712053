""".pt files: what torch.save writes is read, what we write torch.load reads, and nothing of a file is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.errors import DataError, MpitrainError
from mpitrain.interchange import torch_files

torch = pytest.importorskip("torch", reason="needs PyTorch (pip install mpitrain[bench])")

def saved(tmp_path: Path, value: Any, **more: Any) -> Path:
    torch.save(value, tmp_path / "x.pt", **more)
    return tmp_path / "x.pt"


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 5)
    return {"float": base, "transposed": base.T, "a part": base[1:3, ::2], "double": torch.randn(3).double(),
            "bfloat16": torch.randn(4).bfloat16(), "half": torch.randn(2, 2).half(), "long": torch.arange(4),
            "bool": torch.tensor([True, False]), "number": torch.tensor(2.5), "empty": torch.zeros(0, 3),
            "parameter": torch.nn.Parameter(torch.randn(2)), "bytes": torch.arange(3, dtype=torch.uint8)}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_torch_saves_is_read(tmp_path: Path, protocol: int) -> None:
    for value in (state(), {"model": state(), "optimizer": {"state": {0: {"step": torch.tensor(3.)}}, "lr": 1e-3}, "epoch": 3}):
        found = torch_files.read(saved(tmp_path, value, pickle_protocol=protocol)).tensors
        for name, tensor in state().items():
            wanted = tensor.detach().float().numpy() if tensor.dtype == torch.bfloat16 else tensor.detach().numpy()
            ours = found[name].values()
            assert ours.dtype == wanted.dtype and ours.shape == wanted.shape and ours.tobytes() == wanted.tobytes(), name


def test_equal_arrays_make_equal_bytes_which_torch_reads(tmp_path: Path) -> None:
    arrays = {name: np.array(tensor.detach().float().numpy() if name == "bfloat16" else tensor.detach().numpy())
              for name, tensor in state().items()}
    torch_files.write(tmp_path / "a.pt", arrays, {"another name": "float"})
    before = (tmp_path / "a.pt").read_bytes()
    torch_files.write(tmp_path / "a.pt", arrays, {"another name": "float"}, overwrite=True)
    assert (tmp_path / "a.pt").read_bytes() == before
    found = torch.load(tmp_path / "a.pt")
    assert found["another name"].data_ptr() == found["float"].data_ptr()
    for name, array in arrays.items():
        assert found[name].numpy().tobytes() == array.tobytes() and found[name].shape == array.shape, name
        assert torch.load(tmp_path / "a.pt", mmap=True)[name].numpy().tobytes() == array.tobytes()


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def archive(path: Path, content: bytes, storages: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("m/data.pkl", content)
        for key, data in (storages or {}).items():
            made.writestr(f"m/data/{key}", data)
    return path


def tensor(shape: bytes, strides: bytes, offset: bytes = b"K\0", size: bytes = b"K\x04") -> bytes:
    """The pickle of {"a": a tensor}, of these instructions."""
    return (b"\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
            b"X\x01\0\0\0" b"0X\x03\0\0\0cpu"
            + size + b"tQ" + offset + shape + strides + b"\x89ccollections\nOrderedDict\n)RtRs.")


@pytest.mark.parametrize(("content", "said"), [
    (pickle.dumps({"a": Runs()}, 2), "asks for posix.system, which is no tensor"),
    (pickle.dumps({"a": Runs()}, 5), "asks for posix.system, which is no tensor"),
    (b"cos\nsystem\n.", "asks for os.system"), (b"(S'touch ran'\nios\nsystem\n.", "instruction STRING"),
    (b"\x80\x02]r\xff\xff\xff\xff.", "expected a table of tensors, found a list"), (b"", "ends 1 bytes early"),
    (b"\x8e" + b"\xff" * 7 + b"\x7f.", "bytes early"), (b"\x8d" + b"\xff" * 8 + b".", "bytes early"),
    (b"\x8b\xff\xff\xff\x7f.", "a whole number of"), (b"t.", "wants a mark"), (b"0.", "instruction POP"),
    (b"h\x05.", "has not made"),
    (b"}}Ns.", "expected a word or a number|wants"), (b"}(K\1u.", "a key has no value"),
    (b"})" + b"\x85" * 100_000 + b"Ns.", "a key is a tuple"),
    (b"\x80\x09.", "newer than 5"), (b"}R.", "an instruction takes|calls what is no function"),
    (b"Q.", "takes what is not there"),
    (tensor(b"K\x05\x85", b"K\x01\x85"), "beyond its storage of 4"),
    (tensor(b"K\x04\x85", b"K\x01\x85", b"K\x01"), "beyond its storage"),
    (tensor(b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "beyond its storage"),
    (tensor(b"J\xff\xff\xff\x7f\x85", b"K\0\x85"), "beyond"),
    (tensor(b"K\x02\x85", b"J\xff\xff\xff\xff\x85"), "beyond its storage"), (tensor(b"K\x02\x85", b")"), "calls torch._utils"),
    (tensor(b"K\0\x8a\x08" + bytes(7) + b"\x20\x86", b"K\x01K\x01\x86", size=b"K\x04"), "beyond its storage of 4"),
    (tensor(b"K\x04\x85", b"K\x01\x85", size=b"K\x09"), "lies in storage"),
    (tensor(b"(" + b"K\x01" * 70 + b"t", b"(" + b"K\0" * 70 + b"t"), "beyond")])
def test_a_hostile_pickle_is_refused_in_a_line_and_runs_nothing(tmp_path: Path, content: bytes, said: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said) as caught:
        torch_files.read(archive(tmp_path / "x.pt", content, {"0": bytes(16)}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000 and not (tmp_path / "ran").exists()


def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    good = tensor(b"K\x04\x85", b"K\x01\x85")
    assert torch_files.read(archive(tmp_path / "x.pt", good, {"0": bytes(16)})).tensors["a"].shape == (4,)
    for path, said in ((archive(tmp_path / "x.pt", good, {"0": bytes(16)}, zipfile.ZIP_DEFLATED), "is compressed"),
                       (archive(tmp_path / "y.pt", good), "and there are none")):
        with pytest.raises(DataError, match=said):
            torch_files.read(path)
    data = archive(tmp_path / "x.pt", good, {"0": b"0123456789abcdef"}).read_bytes()
    for changed, said in ((data.replace(b"0123", b"0124"), "checksum"), (data[:-30], "damaged or cut off"),
                          (pickle.dumps({}), "bare pickle"),
                          (b"PK" + bytes(100), "damaged or cut off"), (data.replace(b"data.pkl", b"data.pkx"), "no data.pkl")):
        (tmp_path / "x.pt").write_bytes(changed)
        with pytest.raises(DataError, match=said):
            torch_files.read(tmp_path / "x.pt")
    for value, said in (([torch.ones(1)], "found a list"), ({"a": 1}, "no table of tensors"),
                        ({"a": torch.ones(2, dtype=torch.complex64).conj().imag}, "kept as the negative"),
                        ({"model": {"a": torch.ones(1), "b": 3}}, '"b"')):
        with pytest.raises(DataError, match=said):
            torch_files.read(saved(tmp_path, value))


@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_mutant_is_refused_in_a_line_or_has_tensors_within_its_storages(tmp_path: Path, count: int) -> None:
    """Mutants of the pickle and of the archive: no other exception, no crash, and not 64 MiB more memory."""
    rng = random.Random(2)
    torch.save(state(), tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as made:
        inside = {name.partition("/")[2]: made.read(name) for name in made.namelist()}
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for i in range(count):
        if i % 2:
            data = changed(whole, rng)
        else:
            data = b"".join(bytes(chunk)
                            for chunk in torch_files._zipped("x/", inside | {"data.pkl": changed(inside["data.pkl"], rng)}))
        (tmp_path / "x.pt").write_bytes(data)
        try:
            for stored in torch_files.read(tmp_path / "x.pt").tensors.values():
                zlib.crc32(np.ascontiguousarray(stored.values()))
        except MpitrainError as error:
            assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1000
            refused += 1
    assert refused > 0.8 * count and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def changed(whole: bytes, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 6))):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place:place + 1] = rng.choice((b"\xff\xff\xff\xff", bytes([rng.randrange(256)]),
                                                b"\x8a\x08" + b"\xff" * 7 + b"\x7f"))
        elif kind == 2:
            data[place:place] = data[place:place + rng.randrange(1, 60)]
        else:
            del data[place:place + rng.randrange(1, 30)]
        if not data:
            return b"."
    return bytes(data)
