"""Optimizer state that lies elsewhere: the same bits, less memory of the process, a clear line where there is no room."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakegpu import DeviceArray, put, xp
from launch import clean_environment
from optimizer_state import set_state, state_of
from runs import SMALL, record, train, write

from mpitrain import models, nn, optim
from mpitrain.backend import CPU, Device
from mpitrain.config import load_config
from mpitrain.errors import AccessError, MissingError, StorageError
from mpitrain.files import disk
from mpitrain.kernels.kernel import kind as kernels_are
from mpitrain.placement.shards import Shards
from mpitrain.train.build import offload
from mpitrain.train.build.offload import existing, files_folder, in_a_file, offloaded

FAKE = Device("gpu", xp)
ALONE = SimpleNamespace(rank=0, size=1, broadcast_object=lambda value: value, gather_objects=lambda value: [value])
MAKERS = {"sgd": lambda s: optim.SGD(s, lr=0.1, momentum=0.9), "adamw": lambda s: optim.AdamW(s, lr=0.01, weight_decay=0.1),
          "lamb": lambda s: optim.LAMB(s, lr=0.01, weight_decay=0.1), "lars": lambda s: optim.LARS(s, lr=0.01),
          "rmsprop": lambda s: optim.RMSprop(s, lr=0.01, momentum=0.5)}


def trained(make: Any, way: str, folder: Path, device: Device, steps: int = 3) -> tuple[nn.FlatStorage, optim.Optimizer]:
    """A small model after some updates with made-up gradients, with clipping and single segments."""
    storage = models.mlp(20, [30], 5).initialize(3, device=device)
    optimizer = offloaded(make, way, folder, storage, device, ALONE)
    rng = np.random.default_rng(1)
    for step in range(1, steps + 1):
        gradients = device.put(some_gradients(storage, rng))
        optimizer.update(gradients, lr=0.01, step=step, scale=0.5, segments=storage.segments[:2])
        optimizer.update(gradients, lr=0.01, step=step, scale=0.5, segments=storage.segments[2:])
    return storage, optimizer


def some_gradients(storage: Any, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Made up, and zero between parameters."""
    flat = np.zeros(storage.size, np.float32)
    for s in storage.segments:
        flat[s.start:s.stop] = rng.standard_normal(s.stop - s.start)
    return flat


@pytest.mark.parametrize("name", MAKERS)
def test_state_in_a_file_has_the_bits_of_state_in_memory(name: str, tmp_path: Path) -> None:
    plain, ours = (trained(MAKERS[name], way, tmp_path, CPU) for way in ("none", "file"))
    assert plain[0].values.tobytes() == ours[0].values.tobytes() and list(plain[1].state) == list(ours[1].state) != []
    for kind, flat in ours[1].state.items():
        assert flat.tobytes() == plain[1].state[kind].tobytes()
        assert mapped_file(flat).startswith(str(tmp_path)) and mapped_file(flat).endswith("(deleted)")
    assert not list(tmp_path.iterdir()), "nobody has to remove them"
    assert ours[0].allocate is None, "what else asks the storage for memory gets the usual"


def mapped_file(array: np.ndarray[Any, Any]) -> str:
    """What /proc says lies behind an array's memory."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(n, 16) for n in line.split()[0].split("-"))
        if low <= address < high:
            return " ".join(line.split()[5:])
    return ""


@pytest.mark.parametrize("way", ["host", "file"])
@pytest.mark.parametrize("name", MAKERS)
def test_parameters_on_a_device_are_updated_by_the_host(name: str, way: str, tmp_path: Path) -> None:
    """To the bit: the host's kernels equal their references, which the stand-in computes."""
    plain, (storage, optimizer) = trained(MAKERS[name], "none", tmp_path, CPU), trained(MAKERS[name], way, tmp_path, FAKE)
    assert type(storage.values) is DeviceArray and storage.values.get().tobytes() == plain[0].values.tobytes()
    assert all(type(flat) is np.ndarray for flat in optimizer.state.values()) and optimizer.steps == 3
    assert mapped_file(next(iter(optimizer.state.values()))).endswith("(deleted)") is (way == "file")
    own, others = state_of(optimizer), state_of(plain[1])
    assert list(own) == list(others) and all(own[key].tobytes() == others[key].tobytes() for key in own)


def test_values_that_somebody_else_has_written_come_down_first(tmp_path: Path) -> None:
    """As a checkpoint does that is read, or the broadcast at a run's start; the state that belongs to them is loaded too."""
    plain, ours = (trained(MAKERS["adamw"], way, tmp_path, device) for way, device in (("none", CPU), ("host", FAKE)))
    other = trained(MAKERS["adamw"], "none", tmp_path, CPU, steps=7)
    gradients = some_gradients(plain[0], np.random.default_rng(2))
    for (storage, optimizer), given in ((plain, gradients), (ours, put(gradients))):
        storage.segments[0].parameter.array[...] = 0.5
        storage.segments[0].parameter.mark_changed()
        set_state(optimizer, state_of(other[1]))
        optimizer.update(given, lr=0.01, step=8)
    assert ours[0].values.get().tobytes() == plain[0].values.tobytes()


def test_a_rank_has_state_for_its_slices_alone(tmp_path: Path) -> None:
    def run(way: str, device: Device) -> Any:
        layout = models.mlp(20, [300], 5).describe(3, device=device)
        shards = Shards(layout, 1, 2, bucket_bytes=8_000, cuts=[len(layout.segments)], whole=False)
        shards.values = shards.initialise(3)
        optimizer = offloaded(MAKERS["adamw"], way, tmp_path, shards, device, ALONE)
        gradients = device.put(some_gradients(shards, np.random.default_rng(1)))
        for unit in shards.units:
            optimizer.update(gradients, lr=0.01, step=1, segments=unit.parts)
        assert {flat.size for flat in optimizer.state.values()} == {shards.size}
        return shards.values

    plain = run("none", CPU).tobytes()
    assert run("file", CPU).tobytes() == plain == run("host", FAKE).get().tobytes() == run("file", FAKE).get().tobytes()


def test_a_disk_without_room_is_found_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r'"file": a file of [\d,]+ bytes .* cannot be made: .*, [\d,]+ are free; set '
                                           r"optimizer.offload_folder to a folder with room, or optimizer.offload = \"none\""):
        in_a_file(tmp_path, 1 << 55)

    def denied(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(offload.tempfile, "TemporaryFile", denied)
    with pytest.raises(AccessError, match="EACCES"):
        in_a_file(tmp_path, 100)


def test_a_folder_that_is_not_there_is_named_and_no_other_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "not", tmp_path / "file"):
        with pytest.raises(MissingError, match=r"optimizer state cannot be made: .*; set optimizer.offload_folder to a folder"):
            in_a_file(folder, 100)
    config = load_config(write(tmp_path, SMALL), ["optimizer.offload=file", f"run.out={tmp_path}/not/yet"])
    assert files_folder(config) == tmp_path
    config = load_config(write(tmp_path, SMALL), ["optimizer.offload=file", f"optimizer.offload_folder={tmp_path}/not"])
    assert files_folder(config) == tmp_path / "not"


def test_where_a_file_system_promises_nothing_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(fd: int, offset: int, length: int) -> None:
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(os, "posix_fallocate", unknown)
    memory = in_a_file(existing(tmp_path / "not" / "yet"), disk.BLOCK + 5)
    assert existing(tmp_path / "not" / "yet") == tmp_path and bytes(memory) == bytes(disk.BLOCK + 5)


def test_a_run_goes_on_with_state_in_files_and_has_the_bits_of_one_without(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL.replace("steps = 50", "steps = 6").replace("eval_every = 25", "eval_every = 6"))
    more = ["run.out=a", "checkpoint.every=3", "comm.sharding=gradients", "comm.bucket_mb=0.005"]
    result = train(2, config, *more)
    assert result.rc == 0, result.err
    plain, plain_out = record(tmp_path / "a"), result.out
    shutil.rmtree(tmp_path / "a/checkpoints/step-00000006")
    result = train(2, config, *more, "optimizer.offload=file", "--resume")
    assert result.rc == 0, result.err
    ours = record(tmp_path / "a")
    assert ours["parameters_sha256"] == plain["parameters_sha256"]
    heads, row = result.out.partition("memory of a rank in MiB, predicted / measured")[2].splitlines()[1:3]
    assert heads.split() == ["stage", "rank", "parameters", "gradients", "optimizer", "offloaded", "activations", "pool"]
    assert row.split()[:2] == ["0", "0"] and "offloaded" not in plain_out.rpartition("predicted / measured")[2]
    for which in ("predicted", "measured"):
        before, after = plain["memory"][which][0], ours["memory"][which][0]
        assert before["optimizer"] == after["offloaded"] and before["offloaded"] == after["optimizer"] == 0
        assert before["parameters"] == after["parameters"] == 4 * (64 * 32 + 32 + 32 * 10 + 16)        # 10 biases, on lines
    assert [rank["rank"] for rank in ours["memory"]["measured"]] == [0, 1]


def anonymous() -> int:
    """RssAnon, in bytes."""
    line, = re.findall(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(line) << 10


def grow_by_the_state(folder: Path) -> None:
    """In a process of its own: nothing that other tests have freed is there to be used again."""
    storage = models.mlp(1000, [2000], 500).initialize(0)
    gradients, grown = np.ones(storage.size, np.float32), {}
    for way in ("file", "none"):
        before = anonymous()
        optimizer = offloaded(MAKERS["adamw"], way, folder, storage, CPU, ALONE)
        optimizer.update(gradients, lr=0.01, step=1)
        grown[way] = anonymous() - before
        assert optimizer.nbytes == 2 * storage.values.nbytes
    assert grown["none"] - grown["file"] > 0.9 * optimizer.nbytes and grown["file"] < 0.1 * optimizer.nbytes, grown


@pytest.mark.skipif(kernels_are() == "numpy", reason="NumPy's expressions keep memory of their own")
def test_the_processs_own_memory_is_less_by_the_state(tmp_path: Path) -> None:
    """What is mapped from the file counts as the file's (RssFile): the system may take it back whenever it likes."""
    here = Path(__file__).parent
    code = (f"import sys; sys.path[:0] = {[str(here), str(here.parent), *sys.path]}; from pathlib import Path; "
            f"import test_offload; test_offload.grow_by_the_state(Path({str(tmp_path)!r}))")
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

