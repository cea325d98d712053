"""What a file may be, and everything it may not be: refused by name, within limits, in one line."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from data_inputs import CORPUS, features, in_chunks

from mpitrain.data import Dataset, Limits, describe, probe, write_shards
from mpitrain.data.probe import Parser, check_reply
from mpitrain.errors import AccessError, DataError, MissingError, StorageError
from mpitrain.files import hdf5_map, parser_child
from mpitrain.files import parser as files_parser
from mpitrain.files.parser import start_parser
from mpitrain.train.build.inputs import describe_files

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[..., Path]
QUICK = Limits(cpu_seconds=0.5, seconds=60.0)


@pytest.mark.parametrize(("name", "x", "message"), [
    ("declares-32-tib.h5", "x", r"declares 35,184,372,088,832 bytes .* but the file of 1,400 bytes holds 0"),
    ("external-link.h5", "x", r'external link to "/x" in "other.h5"'),
    ("external-storage.h5", "x", r'keeps its values in the external file "secret.txt"'),
    ("link-loop.h5", "a", "soft link that leads in a circle"),
    ("mutant-crashes-libhdf5.h5", "data/x", r"makes the HDF5 library crash \(SIGSEGV\)"),
    ("mutant-hangs-libhdf5-1.h5", "data/x", "keeps the HDF5 library busy for more than 0.5 s"),
    ("mutant-hangs-libhdf5-2.h5", "data/x", "keeps the HDF5 library busy for more than 0.5 s"),
    ("virtual-dataset.h5", "x", "virtual dataset: its values lie in other files")])
@pytest.mark.promise("C3", "F3", "F4", "C7")
def test_every_hostile_file_is_refused_by_name_whether_x_is_named_or_not(name: str, x: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(DataError, match=message) as caught:
        describe(CORPUS / name, x=x, limits=QUICK)
    assert time.monotonic() - started < 50
    errors = [caught.value]
    if "hangs" not in name:                          # (those cost their whole limit each time)
        with pytest.raises(DataError) as guessed:
            describe(CORPUS / name, limits=QUICK)
        errors.append(guessed.value)
    for error in errors:
        assert error.file == str(CORPUS / name) and error.exit_code == 65 and "\n" not in str(error)


def test_the_corpus_is_covered_completely() -> None:
    assert len(list(CORPUS.glob("*.h5"))) == 8


@pytest.mark.parametrize(("name", "canary"), [("external-link.h5", "other.h5"), ("virtual-dataset.h5", "other.h5"),
                                              ("external-storage.h5", "secret.txt")])
@pytest.mark.promise("F3")
def test_no_other_file_is_opened(tmp_path: Path, name: str, canary: str) -> None:
    (tmp_path / name).write_bytes((CORPUS / name).read_bytes())
    os.mkfifo(tmp_path / canary)                     # whoever opens it waits for a writer, and so runs into the limit
    with pytest.raises(DataError, match="external|virtual"):
        describe(tmp_path / name, limits=Limits(seconds=10))


@pytest.mark.promise("C3", "F4")
def test_a_parser_that_stops_answering_is_ended_after_the_limit(plain_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = Parser._start, []

    def start_and_stop(parser: Parser, file: Path) -> None:
        start(parser, file)
        assert parser.process is not None
        started.append(parser.process)
        os.kill(parser.process.pid, signal.SIGSTOP)              # as if the file system did not answer
    monkeypatch.setattr(Parser, "_start", start_and_stop)
    with pytest.raises(DataError, match="took more than 0.2 s"):
        describe(plain_file(x=features(3, 2), y=np.arange(3)), limits=Limits(seconds=0.2))
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.promise("C1")
def test_a_truncated_file_is_refused_at_every_length(plain_file: Write, tmp_path: Path) -> None:
    whole = plain_file(x=features(40, 3), y=np.arange(40)).read_bytes()
    for i, length in enumerate(np.linspace(0, len(whole) - 1, 8).astype(int)):
        path = tmp_path / f"short-{i}.h5"
        path.write_bytes(whole[:length])
        with pytest.raises(DataError) as caught:
            describe(path)
        assert caught.value.file == str(path)
    assert re.search(r"truncated file, [\d,]+ bytes of [\d,]+; it is damaged or incomplete: copy it again", str(caught.value))


def test_a_path_that_can_be_no_file_is_missing_and_no_trouble_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (("file/x", "Not a directory"), ("loop", "Too many levels"), ("a" * 300, "File name too long")):
        with pytest.raises(MissingError, match=f"cannot look at the data: {words}"):
            describe(tmp_path / name)


@pytest.mark.parametrize(("content", "message"), [(b"", "the file is empty"), (b"\0" * 5000, "no HDF5 signature"),
                                                  (b"PK\x03\x04", "data import")])
@pytest.mark.promise("C1")
def test_a_file_that_is_not_hdf5_is_refused_with_the_way_out(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(DataError, match=message):
        describe(tmp_path / "a.h5")


@pytest.mark.promise("F6")
def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(DataError, match="not a regular file"):
        describe(tmp_path / "pipe.h5")
    with pytest.raises(DataError, match="not a regular file"):
        describe("/dev/zero")


def test_missing_files_and_names_are_told_apart_from_bad_ones(tmp_path: Path, plain_file: Write) -> None:
    with pytest.raises(MissingError, match=r"no built-in data set of that name \(built in: digits\)"):
        describe("digit")
    with pytest.raises(MissingError, match=r"neither manifest.json nor files ending in .h5"):
        describe(tmp_path)
    path = plain_file(data__x=features(4, 2), data__y=np.arange(4))
    with pytest.raises(DataError, match=r'no dataset "data/z" \("/data" holds: x, y\)'):
        describe(path, x="data/z")
    with pytest.raises(DataError, match='"data" is a group, not a dataset'):
        describe(path, x="data")
    with pytest.raises(DataError, match='data.y="y" is given without data.x'):
        describe(path, y="y")


def test_an_unreadable_file_is_a_permission_error(plain_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain_file(x=features(4, 2), y=np.arange(4))

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "open", refuse)          # (root may read everything, so the refusal is made here)
    with pytest.raises(AccessError, match="no permission to read the data"):
        describe(path)


VLEN = h5py.vlen_dtype(np.int32)


@pytest.mark.parametrize(("values", "message"), [
    (np.array(["a", "bc"], dtype=object), "holds strings"), (np.array([b"ab", b"cd"]), "holds strings"),
    (np.zeros(2, [("a", "f4"), ("b", "i4")]), "holds compound records"), (np.zeros(2, "c8"), "holds compound records"),
    (np.array([np.arange(2, dtype="i4"), np.arange(3, dtype="i4")], dtype=VLEN), "holds variable-length values"),
    (np.zeros(2, "V5"), "holds opaque bytes"), (np.zeros(2, np.longdouble), "16-byte number format"),
    (np.float32(3), "is a scalar"), (np.zeros((0, 3), "f4"), "has no values: its shape is 0x3"),
    (h5py.Empty("f4"), "is empty")])
@pytest.mark.promise("C5")
def test_types_that_cannot_be_trained_on_are_refused_by_name(plain_file: Write, values: Any, message: str) -> None:
    if isinstance(values, np.ndarray) and values.dtype == object and isinstance(values[0], str):
        values = (values.tolist(), {"dtype": h5py.string_dtype()})
    with pytest.raises(DataError, match=message) as caught:
        describe(plain_file(inputs=values, y=np.arange(2)), x="inputs", y="y")
    assert caught.value.dataset == "/inputs"


@pytest.mark.parametrize(("values", "message"), [
    ({"x": np.zeros((4, 2), "c8"), "y": np.arange(4)}, '"/x" holds compound records'),
    ({"x__real": np.zeros((4, 2)), "y": np.arange(4)}, '"/x" is a group, not a dataset'),
    ({"x": np.arange(4), "y": np.array([b"a", b"b", b"c", b"d"])}, '"/y" holds strings')])
def test_inputs_or_targets_that_cannot_be_used_do_not_make_tokens_of_the_others(plain_file: Write, values: dict[str, Any],
                                                                                 message: str) -> None:
    with pytest.raises(DataError, match=message):
        describe(plain_file(**values))


def test_an_integer_with_odd_precision_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        twelve_bits = h5py.h5t.STD_U16LE.copy()
        twelve_bits.set_precision(12)
        h5py.h5d.create(file.id, b"x", twelve_bits, h5py.h5s.create_simple((4,)))
    with pytest.raises(DataError, match="2-byte number format of its own"):
        describe(tmp_path / "a.h5", x="x")


def test_filters_we_cannot_undo_are_refused_with_the_way_out(plain_file: Write) -> None:
    for options, name in (({"compression": "lzf"}, r"lzf \(number 32000\)"), ({"scaleoffset": 2}, r"scaleoffset \(number 6\)")):
        with pytest.raises(DataError, match=f"needs the HDF5 filter {name}.*h5repack"):
            describe(plain_file(x=(features(40, 3), options | {"chunks": (10, 3)}), y=np.arange(40)))


def test_chunks_that_were_never_written_are_not_taken_for_zeros(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (100, 3), "f4", chunks=(10, 3))[:50] = 1
        file["y"] = np.arange(100)
        file.create_dataset("late", (100,), "f4")
    with pytest.raises(DataError, match="in 10 chunks, but the file of .* bytes holds 5 of them"):
        describe(tmp_path / "a.h5")
    with pytest.raises(DataError, match=r"declares 400 bytes.*\(never written\)"):
        describe(tmp_path / "a.h5", x="late", y="y")


def test_soft_links_inside_the_file_are_followed_when_named(plain_file: Write) -> None:
    x = features(9, 2)
    path = plain_file(run__field=x, y=np.arange(9.0))
    with h5py.File(path, "r+") as file:
        file["latest"] = h5py.SoftLink("/run")
        file["run/alias"] = h5py.SoftLink("field")
    assert np.array_equal(Dataset(describe(path, x="latest/alias", y="y")).read(np.arange(9))[0], x)


def test_attributes_of_every_usual_kind_do_no_harm(plain_file: Write) -> None:
    path = plain_file(x=features(9, 2), y=np.arange(9))
    with h5py.File(path, "r+") as file:
        file.attrs["text"], file.attrs["numbers"], file["x"].attrs["units"] = "a simulation", np.arange(9), "m/s"
        file.attrs["reference"] = file["x"].ref
        file.attrs["strings"] = ["a", "b"]
        file.attrs["large"] = np.zeros(6000)
    assert describe(path)["kind"] == "classification"


def test_inputs_and_targets_are_found_without_names_when_only_one_choice_makes_sense(plain_file: Write) -> None:
    found = describe(plain_file(data__x=features(4, 2), data__y=np.arange(4.0), other=np.arange(9)))
    assert (found["x"], found["y"], found["kind"]) == ("/data/x", "/data/y", "regression")
    found = describe(plain_file(labels=np.arange(4), images=features(4, 1, 3, 3)))
    assert (found["x"], found["y"], found["kind"]) == ("/images", "/labels", "classification")
    assert describe(plain_file(text=np.arange(40, dtype="u2")))["kind"] == "tokens"
    with pytest.raises(DataError, match=r"among 3 datasets \(/a 4x2, /b 4x2, /c 4\); set data.x and data.y"):
        describe(plain_file(a=features(4, 2), b=features(4, 2), c=np.arange(4)))


def test_targets_that_fit_no_kind_are_refused(plain_file: Write) -> None:
    with pytest.raises(DataError, match="there are no targets: set data.y"):
        describe(plain_file(a=features(4, 2)))
    assert describe(plain_file(x=features(4, 2), y=np.ones((4, 3), "i4")))["kind"] == "classification"
    with pytest.raises(DataError, match=r'5 rows in "/x", but 4 in "/y"') as caught:
        describe(plain_file(x=features(5, 2), y=np.arange(4)))
    assert caught.value.dataset == "/y"


@pytest.mark.promise("C5")
def test_shards_that_do_not_fit_the_first_are_refused_before_any_step(plain_file: Write, tmp_path: Path) -> None:
    plain_file("a-0.h5", x=features(4, 2), y=np.arange(4))
    odd = plain_file("a-1.h5", x=features(4, 3), y=np.arange(4))
    with pytest.raises(DataError, match=r"rows of float32 3, but the first shard \(a-0.h5\) has rows of float32 2") as caught:
        describe(tmp_path)
    assert caught.value.file == str(odd)
    plain_file("a-1.h5", x=features(4, 2, dtype="f8"), y=np.arange(4))
    with pytest.raises(DataError, match="rows of float64 2, but"):
        describe(tmp_path)
    plain_file("a-1.h5", z=features(4, 2), y=np.arange(4))
    with pytest.raises(DataError, match='no dataset "/x"'):
        describe(tmp_path)


def test_a_folder_without_manifest_is_its_files_in_the_order_of_their_names(plain_file: Write, tmp_path: Path) -> None:
    x = features(30, 2)
    for i in (2, 0, 1):
        plain_file(f"part-{i}.h5", x=x[10 * i:10 * i + 10], y=np.arange(10))
    assert np.array_equal(Dataset(describe(tmp_path)).read(np.arange(30))[0], x)


def test_a_description_survives_json(tmp_path: Path) -> None:
    found = describe(in_chunks(write_shards(tmp_path / "o", features(9, 2), np.arange(9), kind="classification")))
    assert json.loads(json.dumps(found)) == found


@pytest.mark.promise("F12")
def test_a_module_in_the_data_folder_is_not_imported(plain_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain_file(x=features(9, 2), y=np.arange(9))
    for name in ("h5py.py", "json.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('imported the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert describe(path.name)["kind"] == "classification"


def test_a_missing_h5py_is_said_as_such(plain_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parser, "_reply", lambda *_: {"ready": False, "message": "No module named 'h5py'"})
    with pytest.raises(StorageError, match="could not import h5py: No module named 'h5py'"):
        describe(plain_file(x=features(9, 2), y=np.arange(9)))


def test_a_parser_that_a_program_has_started_answers_for_several_files_and_is_ended(tmp_path: Path, plain_file: Write) -> None:
    path, process = plain_file(x=features(9, 2), y=np.arange(9)), start_parser()
    found = describe_files(str(path), str(path), tmp_path, "", "", process)
    assert found["training"] == found["validation"] == describe(path)
    assert process.returncode == -signal.SIGKILL, "the one that was given has answered, and ends before MPI starts"
    process = start_parser()
    with pytest.raises(MissingError):
        describe_files("nothing.h5", 0.2, tmp_path, "", "", process)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("reads", [True, False])
def test_a_parser_that_ends_at_once_is_blamed_and_not_the_file(reads: bool, plain_file: Write,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended before we write to it, or has read what we wrote."""
    path, popen = plain_file(x=features(9, 2), y=np.arange(9)), subprocess.Popen

    def ended(command: list[str], **how: Any) -> Any:
        process = popen([*command, *["reads"] * reads], **how)
        if not reads:
            process.wait()
        return process
    monkeypatch.setattr(files_parser, "CHILD", "import sys\nif sys.argv[1:]: sys.stdin.readline()\nsys.exit(3)")
    monkeypatch.setattr(subprocess, "Popen", ended)
    with pytest.raises(StorageError, match=r"ended before it could import h5py \(exit status 3\)"):
        describe(path)


def test_a_parser_that_has_died_after_one_file_refuses_the_next_one(plain_file: Write) -> None:
    path = plain_file(x=features(9, 2), y=np.arange(9))
    with pytest.raises(DataError, match=r"makes the HDF5 library crash \(SIGSEGV\)"), Parser() as parser:
        parser.ask(path, None, None)
        assert parser.process is not None
        os.kill(parser.process.pid, signal.SIGSEGV)
        os.waitid(os.P_PID, parser.process.pid, os.WEXITED | os.WNOWAIT)
        parser.ask(path, None, None)


@pytest.mark.promise("F4")
def test_a_lying_parser_is_not_believed(plain_file: Write) -> None:
    path = plain_file(x=features(9, 2), y=np.arange(9))
    good = {"name": "/x", "shape": [9, 2], "dtype": "<f4", "storage": "contiguous", "offset": 100}
    check_reply({"x": good, "y": None}, path)
    for wrong in ({"offset": path.stat().st_size - 71}, {"offset": -1}, {"shape": [9, -2]}, {"dtype": "V9"}):
        with pytest.raises(DataError, match="contradicts itself"):
            check_reply({"x": good | wrong, "y": None}, path)


@pytest.mark.promise("F10")
def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x\n\x1b[31mmpitrain: fake"] = np.array(["a"], dtype=h5py.string_dtype())
        file["x\n\x1b[31mmpitrain: other"] = features(4, 2)
        file["third"] = features(5, 2)
        file["fourth"] = features(5, 2)
    with pytest.raises(DataError) as caught:
        describe(tmp_path / "a.h5")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.promise("C7", "F5")
def test_the_limits_of_the_parser_are_said_with_their_numbers(plain_file: Write, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain_file(x=(features(64, 4), {"chunks": (1, 4)}), y=np.arange(64))
    monkeypatch.setattr(probe, "MAX_ANSWER", 500)
    with pytest.raises(DataError, match="chunk index is larger than 0 MiB; repack"):
        describe(path)
    request = {"file": str(path), "datasets": {}}
    for name, message in (("MAX_OBJECTS", "holds more than 1 objects; name the datasets"),
                          ("MAX_CHUNK", "has chunks of 16 bytes; at most 1")):
        with monkeypatch.context() as patch:
            patch.setattr(hdf5_map, name, 1)
            with pytest.raises(hdf5_map.Refused, match=message):
                parser_child.answer(request)
    assert parser_child.answer(request)["x"]["chunk"] == [1, 4]


@pytest.mark.promise("C7", "F5")
def test_so_many_objects_are_looked_at_as_the_limit_says_and_no_more(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(10_000):
            h5py.h5g.create(file.id, b"%d" % i)
        assert hdf5_map.list_datasets(file)[0] == {}
        h5py.h5g.create(file.id, b"one more")
        with pytest.raises(hdf5_map.Refused, match="^holds more than 10000 objects; name the datasets"):
            hdf5_map.list_datasets(file)


@pytest.mark.promise("C7")
def test_chunks_beyond_the_end_of_the_file_are_refused(plain_file: Write, tmp_path: Path) -> None:
    path = plain_file(x=(features(64, 4), {"chunks": (16, 4)}), y=np.arange(64))
    place = describe(path)["shards"][0]["x"]["offsets"][3]
    content = path.read_bytes()
    assert content.count(place.to_bytes(8, "little")) == 1           # its entry in the chunk index
    path.write_bytes(content.replace(place.to_bytes(8, "little"), (1 << 40).to_bytes(8, "little")))
    with pytest.raises(DataError, match=r'of "/x" \(256 bytes at offset 1,099,511,627,776\) does not fit the file'):
        describe(path)


@pytest.mark.promise("F4", "C7")
def test_parsing_a_small_file_may_take_less_memory_than_a_large_one(tmp_path: Path) -> None:
    file = tmp_path / "a.h5"
    file.write_bytes(bytes(10_000))
    assert 192 << 20 < parser_child.spare_memory(str(file)) < 193 << 20
    os.truncate(file, 1 << 30)                                            # a sparse one
    assert parser_child.spare_memory(str(file)) == 1 << 30


@pytest.mark.promise("F4", "C7")
def test_running_out_of_the_memory_limit_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise MemoryError
    monkeypatch.setattr(parser_child, "answer", explode)
    reply = parser_child.reply_to({"file": "a.h5", "datasets": {}})
    assert reply == {"refused": "parsing it needs more than 1024 MiB of memory", "dataset": None, "memory": True}


LIMITED = """if True:
    import resource, sys
    from mpitrain.data import describe
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    print(describe("digits")["kind"])"""


@pytest.mark.promise("A3")
def test_a_limit_on_address_space_that_leaves_enough_is_no_reason_to_blame_the_file() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(1 << 30)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "classification\n", done.stderr


@pytest.mark.promise("A3")
def test_a_limit_on_address_space_that_leaves_too_little_is_blamed_and_not_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies, one that cannot import, one that says so; its own limit would be the test's too."""
    for act in (lambda parser, *_: (_ for _ in ()).throw(parser._died(CORPUS / "x")),
                lambda *_: {"ready": False, "message": "failed to map segment from shared object"},
                lambda *_: {"ready": True, "refused": "parsing it needs more", "dataset": None, "memory": True}):
        for name in ("_exchange", "_reply"):
            monkeypatch.setattr(Parser, name, act)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 28, 1 << 28))
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(
            wait=lambda: 1, kill=lambda: None, stdin=io.BytesIO(), stdout=io.BytesIO()))
        with pytest.raises(MemoryError, match=r"limit on address space, 256 MiB \(ulimit -v\); raise it, to 1536 MiB"):
            describe("digits")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
        with pytest.raises((DataError, StorageError)):
            describe("digits")


SHORT = """if True:
    import resource, sys
    from mpitrain.data import describe
    resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
    describe(sys.argv[1], x=sys.argv[2] or None)"""


@pytest.mark.parametrize(("name", "x", "said"), [
    ("digits", "", ""),
    (str(CORPUS / "mutant-hangs-libhdf5-1.h5"), "data/x", "was ended by the limit on processor time, 2 s (ulimit -t); raise it")])
def test_a_limit_on_processor_time_is_blamed_where_it_ends_the_parser_and_not_the_file(name: str, x: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", SHORT, name, x], capture_output=True, text=True, cwd=ROOT)
    assert said in done.stderr and bool(done.returncode) == bool(said) and "hostile" not in done.stderr, done.stderr


@pytest.mark.promise("C7", "F5")
def test_a_small_chunk_that_unpacks_to_very_much_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        for name, columns in (("bomb", 36 << 20), ("large", 4 << 20)):
            file.create_dataset(name, (1, columns), "f4", chunks=(1, columns), compression="gzip", shuffle=True)
            file[name].id.write_direct_chunk((0, 0), bytes(1 << 18), 0)
        file["y"] = np.arange(1)
    with pytest.raises(DataError, match=r"unpacks from 262,144 bytes to 150,994,944; beyond 134,217,728 it may grow 100 times"):
        describe(path, x="bomb", y="y")
    assert describe(path, x="large", y="y")["x"] == "/large"


def test_an_unreadable_folder_or_a_failing_disk_is_named(plain_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain_file(x=features(4, 2), y=np.arange(4))
    for number, error, message in ((errno.EACCES, AccessError, "no permission"),
                                   (errno.EIO, StorageError, "Input/output error")):
        def fail(*_: object, number: int = number, **__: object) -> Any:
            raise OSError(number, os.strerror(number))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fail)
            with pytest.raises(error, match=message):
                describe(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(StorageError, match="reading the data failed: Input/output error"):
            describe(path)


def test_a_question_may_take_so_much_processor_time_beyond_what_is_spent(monkeypatch: pytest.MonkeyPatch,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_utime=3.25, ru_stime=4.5))
    asked = [{"paths": []}, {"file": "a.h5", "cpu_seconds": 2.0}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in asked)))
    monkeypatch.setattr(parser_child, "reply_to", lambda request: {})
    parser_child.main()
    assert limits[resource.RLIMIT_CPU][0] == 10                           # 3.25 + 4.5 + 2, in whole seconds
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"ready": True}


def test_an_installed_package_does_not_stand_before_the_standard_library_in_the_parser() -> None:
    order = files_parser.CHILD.partition("from mpitrain")[0] + (
        f"import json, mpitrain; paths = sys.path; print(paths.index({str(ROOT)!r}) > paths.index(json.__path__[0][:-5]))")
    done = subprocess.run([sys.executable, "-I", "-c", order], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
