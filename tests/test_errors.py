"""What is said of an exception that says nothing itself."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NoReturn

import pytest

from mpitrain.arguments import call_with
from mpitrain.backend import native
from mpitrain.data import images, importers
from mpitrain.errors import ConfigError, DataError, name_and_text, text_of
from mpitrain.registry import import_object


def raises(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(("error", "text", "both"), [
    (ValueError("odd"), "odd", "ValueError: odd"),
    (ValueError(), "ValueError", "ValueError"),
    (StopIteration(), "StopIteration", "StopIteration"),
    (MemoryError(" \n"), "MemoryError", "MemoryError"),
    (KeyError(""), "''", "KeyError: ''"),
])
def test_an_exception_without_text_is_called_by_its_type(error: BaseException, text: str, both: str) -> None:
    assert (text_of(error), name_and_text(error)) == (text, both)


@pytest.mark.parametrize("name", ["StopIteration", "MemoryError", "AssertionError"])
def test_a_users_module_that_fails_without_a_word(tmp_path: Path, name: str) -> None:
    (tmp_path / "net.py").write_text(f"raise {name}\n")
    with pytest.raises(ConfigError) as caught:
        import_object("net.py:net", "model", tmp_path)
    assert caught.value.message == f'model "net.py:net": importing it failed: {name}'


def test_a_users_function_that_fails_is_named_with_its_line_and_one_that_cannot_be_called_so_with_its_arguments() -> None:
    def net(width: int, /) -> None:
        raise ValueError("planted") if width else ValueError

    number = net.__code__.co_firstlineno + 1
    for call, text in ((lambda width: net(width), "ValueError at test_errors.py:{} in net: planted"),
                       (lambda width: net(0), "ValueError at test_errors.py:{} in net")):
        with pytest.raises(ConfigError) as caught:
            call_with(call, {"width": 3}, "it", "model")
        assert caught.value.message == f"it failed with {{'width': 3}}: {text.format(number)}"
        assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ConfigError, match=r"^it does not accept {'width': 3}: .* missing 1 required positional argument"):
        call_with(lambda given, /, width: None, {"width": 3}, "it", "model")


def test_a_compiler_that_fails_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_missing", {})
    monkeypatch.setattr(native, "compiler", lambda: ("cc",))
    monkeypatch.setattr(native, "_key", lambda source, cc: "none")
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: raises(OSError()))
    assert native.load.__wrapped__("rows") is None and native.missing() == {"rows": "the C compiler cc fails: OSError"}


def test_files_that_cannot_be_decoded_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "a.npz", "a.gz"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr("PIL.Image.open", lambda file: raises(ValueError()))
    monkeypatch.setattr("numpy.load", lambda file, **options: raises(EOFError()))
    monkeypatch.setattr(gzip, "decompress", lambda data: raises(EOFError()))
    for read, name, message in (
            (lambda path: images.decode_image(path, None), "a.png", "cannot be decoded as an image: ValueError"),
            (importers.load_numpy, "a.npz", "cannot be read as NPZ or NPY: EOFError"),
            (importers.read_bytes, "a.gz", "is not a complete gzip file: EOFError")):
        with pytest.raises(DataError) as caught:
            read(tmp_path / name)
        assert caught.value.message == message
