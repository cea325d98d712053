"""Each format becomes shards that hold the same values; what is wrong with a source is said with its place."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.data import Dataset, check_validation, describe
from mpitrain.data.columns import rows_of
from mpitrain.data.importers import import_csv, import_idx, import_images, import_npz, import_text, import_ts
from mpitrain.data.report import verify
from mpitrain.data.writing import write_shards
from mpitrain.errors import ConfigError, DataError, MissingError, MpitrainError, OutputError, UsageError

pytestmark = pytest.mark.usefixtures("one_parser")


def everything(folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    description = describe(folder)
    verify(folder)
    return *Dataset(description).read(np.arange(rows_of(description["shards"][0]))), description


def tokens(folder: Path) -> tuple[np.ndarray, list[str]]:
    dataset = Dataset(describe(folder))
    assert dataset.vocabulary is not None
    return dataset.read_field(dataset.x, np.arange(len(dataset))), dataset.vocabulary


def idx(values: np.ndarray) -> bytes:
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[values.dtype.str[1:]]
    return bytes([0, 0, code, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.astype(
        values.dtype.newbyteorder(">")).tobytes()


def test_text_by_characters_keeps_its_vocabulary(tmp_path: Path) -> None:
    text = "To be, or nöt to be:\r\n— 🎭 that is it.\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    values, vocabulary = tokens(import_text(tmp_path / "a.txt", tmp_path / "out"))
    assert "".join(vocabulary[t] for t in values) == text and vocabulary == sorted(set(text)) and values.dtype == np.uint8


def test_text_by_bytes_is_its_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 3)
    values, vocabulary = tokens(import_text(tmp_path / "a.txt", tmp_path / "out", level="byte"))
    assert values.tobytes() == bytes(range(256)) * 3 and len(vocabulary) == 256


def test_many_characters_take_wider_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 400))))
    values, _ = tokens(import_text(tmp_path / "a.txt", tmp_path / "out"))
    assert values.dtype == np.uint16 and values.tolist() == list(range(400))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4"])
def test_idx_files_come_in_as_images_with_one_channel(tmp_path: Path, packed: bool, dtype: str) -> None:
    x, y = np.arange(5 * 4 * 3).reshape(5, 4, 3).astype(dtype), np.array([0, 2, 1, 2, 0], "u1")
    end, pack = (".gz", gzip.compress) if packed else ("", bytes)
    (tmp_path / f"t-images-idx3-ubyte{end}").write_bytes(pack(idx(x)))
    (tmp_path / f"t-labels-idx1-ubyte{end}").write_bytes(pack(idx(y)))
    for i, source in enumerate((tmp_path, tmp_path / f"t-images-idx3-ubyte{end}")):
        got_x, got_y, found = everything(import_idx(source, tmp_path / f"out{i}"))
        assert np.array_equal(got_x, x[:, None]) and got_x.dtype == dtype and np.array_equal(got_y, y)
        assert found["classes"] == ["0", "1", "2"]


def test_npz_and_npy_pairs(tmp_path: Path) -> None:
    x, labels, targets = np.random.default_rng(0).random((6, 2)), np.arange(6), np.random.default_rng(1).random((6, 3))
    np.savez(tmp_path / "a.npz", x=x, y=labels, force=targets)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", targets)
    got_x, got_y, found = everything(import_npz(tmp_path / "a.npz", tmp_path / "1"))
    assert np.array_equal(got_x, x) and np.array_equal(got_y, labels) and found["kind"] == "classification"
    for folder in (import_npz(tmp_path / "a.npz", tmp_path / "2", y="force"),
                   import_npz(tmp_path / "x.npy", tmp_path / "3", targets=tmp_path / "y.npy")):
        got_x, got_y, found = everything(folder)
        assert np.array_equal(got_y, targets) and np.array_equal(got_x, x) and found["kind"] == "regression"
    np.save(tmp_path / "t.npy", np.arange(50, dtype="u2"))
    assert describe(import_npz(tmp_path / "t.npy", tmp_path / "4"))["kind"] == "tokens"


def test_csv_tables_with_and_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("width,kind,height\n1.5,2,3\n-1e3,0,4\n")
    x, y, found = everything(import_csv(tmp_path / "a.csv", tmp_path / "1", label="kind"))
    assert x.tolist() == [[1.5, 3], [-1000, 4]] and x.dtype == np.float32 and y.tolist() == [2, 0]
    (tmp_path / "b.csv").write_text("1,2,0.5\n3,4,0.25\n\n")
    x, y, found = everything(import_csv(tmp_path / "b.csv", tmp_path / "2"))
    assert x.tolist() == [[1, 2], [3, 4]] and y.tolist() == [0.5, 0.25] and found["kind"] == "regression"
    (tmp_path / "c.csv").write_text('a,b\n1,"dog"\n2,cat\n3,dog\n')
    x, y, found = everything(import_csv(tmp_path / "c.csv", tmp_path / "3", label=1))
    assert y.tolist() == [1, 0, 1] and found["classes"] == ["cat", "dog"]
    x, y, found = everything(import_csv(tmp_path / "a.csv", tmp_path / "4", label=0, kind="regression"))
    assert found["kind"] == "regression" and y.tolist() == [1.5, -1000]


def test_columns_of_categories_become_codes_behind_the_numbers_or_an_input_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("city,age,floor,rich\nrome,31,2,1\noslo,40,0,0\nrome,25,1,0\n")
    x, y, found = everything(import_csv(tmp_path / "a.csv", tmp_path / "1", categories=["city"], integers=["floor"]))
    assert x.tolist() == [[31, 1, 2], [40, 0, 0], [25, 1, 1]] and y.tolist() == [1, 0, 0]
    assert found["categories"] == {"city": ["oslo", "rome"], "floor": 3}
    x, y, _ = everything(import_csv(tmp_path / "a.csv", tmp_path / "2", categories=["city"], integers=["floor"], by_name=True))
    assert x.values["numbers"].tolist() == [[31], [40], [25]] and x.values["codes"].tolist() == [[1, 2], [0, 0], [1, 1]]
    assert x.values["codes"].dtype == np.uint8
    for options, words in (({"categories": ["citi"]}, 'did you mean "city"'), ({"integers": ["city"]}, '"rome" in column "city"'),
                           ({"categories": ["rich"]}, "is the target"), ({"categories": ["city"], "integers": ["city"]}, "twice"),
                           ({"by_name": True, "label": "city"}, "no column is among")):
        with pytest.raises((ConfigError, DataError)) as caught:
            import_csv(tmp_path / "a.csv", tmp_path / "3", **options)
        assert words in caught.value.message


@pytest.mark.parametrize(("code", "by_name", "words"), [
    (1 << 24, False, ""), (1 + (1 << 24), False, "16777217 in column \"item\" is larger than 16777216"),
    (1 + (1 << 24), True, ""), (10 ** 23, True, "count from 0 without gaps")])
def test_a_code_that_would_become_another_number_is_refused(tmp_path: Path, code: int, by_name: bool, words: str) -> None:
    (tmp_path / "a.csv").write_text(f"age,item,rich\n1,7,0\n2,{code},1\n3,{code - 1},1\n")
    if not words:
        x, _, _ = everything(import_csv(tmp_path / "a.csv", tmp_path / "1", integers=["item"], by_name=by_name))
        assert (x.values["codes"][:, 0] if by_name else x[:, 1]).tolist() == [7, code, code - 1]
        return
    with pytest.raises(DataError) as caught:
        import_csv(tmp_path / "a.csv", tmp_path / "1", integers=["item"], by_name=by_name)
    assert words in caught.value.message and caught.value.row == 1


def test_validation_rows_whose_codes_are_other_words_are_refused(tmp_path: Path) -> None:
    for name, cities in (("all", "oslo rome wien"), ("some", "oslo wien"), ("first", "oslo rome")):
        rows = "".join(f"{i},{city},{i % 2}\n" for i, city in enumerate(cities.split()))
        (tmp_path / "a.csv").write_text(f"age,city,rich\n{rows}")
        import_csv(tmp_path / "a.csv", tmp_path / name, categories=["city"])
    (tmp_path / "a.csv").write_text("city,age,rich\n3,oslo,1\n")
    import_csv(tmp_path / "a.csv", tmp_path / "age", categories=["age"])
    check_validation(describe(tmp_path / "all"), describe(tmp_path / "first"))
    for name, words in (("some", 'the code 1 of the column "city" is "wien", and in the training data "rome"'),
                        ("age", "the columns of categories are age, and in the training data city")):
        with pytest.raises(DataError) as caught:
            check_validation(describe(tmp_path / "all"), describe(tmp_path / name))
        assert words in caught.value.message


@pytest.mark.parametrize(("kind", "word"), [("classification", "the class 0"), ("tokens", "the token 0")])
def test_validation_rows_whose_numbers_stand_for_others_are_refused(tmp_path: Path, kind: str, word: str) -> None:
    def make(name: str, *names: str) -> Any:
        tokens = np.zeros(64, np.uint8)
        write_shards(tmp_path / name, tokens, kind=kind, vocabulary=names) if kind == "tokens" else \
            write_shards(tmp_path / name, np.zeros((4, 3), np.float32), np.zeros(4, np.int64), kind=kind, classes=names)
        return describe(tmp_path / name)
    training = make("training", "cat", "dog", "owl")
    check_validation(training, make("same", "cat", "dog", "owl"))
    check_validation(training, make("fewer", "cat", "dog"))
    with pytest.raises(DataError, match=f'{word} is "dog", and in the training data "cat"'):
        check_validation(training, make("turned", "dog", "cat", "owl"))


def test_a_table_of_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,item,rich\n")
    with pytest.raises(DataError, match="there are no rows"):
        import_csv(tmp_path / "a.csv", tmp_path / "1", integers=["item"])


def test_the_first_line_of_a_csv_table_without_a_header_says_how_many_columns_there_are(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("1,2,0.5\n")
    x, y, _ = everything(import_csv(tmp_path / "one.csv", tmp_path / "1"))
    assert x.tolist() == [[1, 2]] and y.tolist() == [0.5]
    (tmp_path / "shorter.csv").write_text("1,2,0.5\n3,4\n")
    with pytest.raises(DataError, match="row=1: 2 columns, but the first line has 3$"):
        import_csv(tmp_path / "shorter.csv", tmp_path / "2")


def test_images_by_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 6, 3)).astype("u1")
    for i, values in enumerate(pixels):
        folder = tmp_path / "src" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(values).save(folder / f"{i}.png")
        (folder / "notes.txt").write_text("not an image")
    x, y, found = everything(import_images(tmp_path / "src", tmp_path / "out"))
    assert found["classes"] == ["cat", "dog"] and x.shape == (7, 3, 5, 6)
    for values, label in zip(pixels, np.arange(7) % 2):
        (place,) = np.flatnonzero((x == np.moveaxis(values, 2, 0)).all((1, 2, 3)))
        assert y[place] == label
    image.fromarray(pixels[0, :, :, 0]).save(tmp_path / "src" / "cat" / "0.png")     # grey among RGB is converted
    import_images(tmp_path / "src", tmp_path / "out", overwrite=True)
    image.fromarray(pixels[0, :2]).save(tmp_path / "src" / "cat" / "0.png")
    with pytest.raises(DataError, match="the first image") as caught:
        import_images(tmp_path / "src", tmp_path / "out2")
    assert caught.value.file.endswith(".png")
    (tmp_path / "src" / "cat" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    with pytest.raises(DataError, match="cannot be decoded as an image"):
        import_images(tmp_path / "src", tmp_path / "out3")
    assert not (tmp_path / "out3").exists()


def test_images_without_pillow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r'pip install "mpitrain\[images\]"'):
        import_images(tmp_path, tmp_path / "out")


def write(tmp_path: Path, name: str, content: bytes) -> Path:
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


LABELS = idx(np.arange(3, dtype="u1"))
PAIR = ("t-images-idx3-ubyte", "t-labels-idx1-ubyte")


@pytest.mark.parametrize(("content", "error", "message"), [
    (b"", DataError, "the text is empty"), (b"ab\xffc", DataError, "byte 0xff is not UTF-8.*--level byte")])
def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, error: type[MpitrainError], message: str) -> None:
    with pytest.raises(error, match=message):
        import_text(write(tmp_path, "a.txt", content), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match='level "word" is not one of char, byte'):
        import_text(tmp_path / "a.txt", tmp_path / "out", level="word")


@pytest.mark.parametrize(("images", "labels", "message"), [
    (idx(np.zeros((3, 2, 2), "u1"))[:-1], LABELS, "declares 3x2x2 values, so 28 bytes, but has 27"),
    (b"\x7fELF", LABELS, "not an IDX file .*7f454c46"), (b"", LABELS, "starts with nothing"),
    (b"\0\0\x08\x03\0\0", LABELS, "declares"), (idx(np.zeros((4, 2, 2), "u1")), LABELS, "4 inputs but 3 labels"),
    (idx(np.zeros((3, 2, 2), "u1")), idx(np.zeros((3, 1), "u1")), "labels are 1-D integers"),
    (idx(np.zeros((3, 2, 2), "u1")), idx(np.array([0, -1, 2], "i1")), "label -1 is negative")])
def test_a_damaged_idx_pair_is_refused(tmp_path: Path, images: bytes, labels: bytes, message: str) -> None:
    write(tmp_path, PAIR[0], images)
    write(tmp_path, PAIR[1], labels)
    with pytest.raises(DataError, match=message):
        import_idx(tmp_path, tmp_path / "out")


def test_an_idx_pair_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found 0 and 0"):
        import_idx(tmp_path, tmp_path / "out")
    with pytest.raises(MissingError, match="file or folder to import is not there"):
        import_idx(tmp_path / PAIR[0], tmp_path / "out")
    write(tmp_path, PAIR[0], b"")
    with pytest.raises(MissingError, match="no labels file t-labels-idx1-ubyte beside it"):
        import_idx(tmp_path / PAIR[0], tmp_path / "out")
    broken = write(tmp_path, PAIR[0] + ".gz", gzip.compress(LABELS)[:-9])
    with pytest.raises(DataError, match="not a complete gzip file"):
        import_idx(broken, tmp_path / "out", labels=broken)


@pytest.mark.promise("F1")
def test_pickles_and_other_wrong_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", x=np.array([print], dtype=object), y=np.arange(1))
    with pytest.raises(DataError, match="holds Python objects, which are never loaded"):
        import_npz(tmp_path / "evil.npz", tmp_path / "out")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), z=np.zeros((3, 2), "i4"))
    with pytest.raises(DataError, match=r'no array "q" \(there: x, z\)'):
        import_npz(tmp_path / "a.npz", tmp_path / "out", y="q")
    with pytest.raises(DataError, match="no targets for inputs of shape"):
        import_npz(tmp_path / "a.npz", tmp_path / "out")
    with pytest.raises(DataError, match="neither labels"):
        import_npz(tmp_path / "a.npz", tmp_path / "out", y="z")
    np.save(tmp_path / "one.npy", np.float64(3))
    with pytest.raises(DataError, match="a single number"):
        import_npz(tmp_path / "one.npy", tmp_path / "out")
    with pytest.raises(DataError, match="come from another NPY file"):
        import_npz(tmp_path / "one.npy", tmp_path / "out", targets=tmp_path / "a.npz")
    with pytest.raises(DataError, match="cannot be read as NPZ or NPY"):
        import_npz(write(tmp_path, "b.npz", b"PK\x03\x04 broken"), tmp_path / "out")
    with pytest.raises(DataError, match="NPZ or NPY: it is of another format, or holds Python objects, which are never loaded"):
        import_npz(write(tmp_path, "c.h5", b"\x89HDF\r\n\x1a\n"), tmp_path / "out")
    with pytest.raises(MissingError):
        import_npz(tmp_path / "none.npz", tmp_path / "out")


@pytest.mark.parametrize(("content", "options", "error", "message", "row"), [
    ("", {}, DataError, "table is empty", None), ("a,b\n1,2\n3\n", {}, DataError, "1 columns, but the first line has 2", 1),
    ("a,b\n1,2\nx,3\n", {}, DataError, '"x" in column "a" is not a finite number', 1),
    ("a,b\n1,2\nnan,3\n", {}, DataError, '"nan" in column "a"', 1),
    ("a,b\n1,2\n", {"label": "c"}, ConfigError, r'no column "c" \(there: a, b\)', None),
    ("a,b\n1,2\n", {"label": 2}, ConfigError, "no column 2: the first line has 2", None),
    ("a,b\n1,2\n1,z\n", {"kind": "regression"}, DataError, 'target "z" is not a finite', 1),
    ("a,b\n1,2\n", {"kind": "x"}, UsageError, 'kind "x"', None), ("a,b\n1,-2\n", {}, DataError, "label -2 is negative", 0),
    ("a,b\n", {}, DataError, "no rows", None)])
def test_a_table_that_is_not_one_is_refused(tmp_path: Path, content: str, options: dict[str, Any], error: type[MpitrainError],
                                            message: str, row: int | None) -> None:
    with pytest.raises(error, match=message) as caught:
        import_csv(write(tmp_path, "a.csv", content.encode()), tmp_path / "out", **options)
    assert caught.value.row == row and not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_before_the_source_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    for function in (import_text, import_idx, import_npz, import_csv, import_images):
        with pytest.raises(OutputError, match="exists; choose another --out"):
            function(tmp_path / "no such source", tmp_path / "out")
    for function in (import_text, import_npz, import_csv, import_images):
        with pytest.raises(MissingError):
            function(tmp_path / "no such source", tmp_path / "new")


def test_mnist_comes_in_whole(tmp_path: Path, real_data: Path) -> None:
    x, y, found = everything(import_idx(real_data, tmp_path / "out"))
    assert x.shape == (10_000, 1, 28, 28) and y[:5].tolist() == [7, 2, 1, 0, 4] and len(found["classes"]) == 10
    raw = gzip.decompress((real_data / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    assert x.tobytes() == raw


def test_tiny_shakespeare_comes_in_whole(tmp_path: Path, real_data: Path) -> None:
    values, vocabulary = tokens(import_text(real_data / "tinyshakespeare.txt", tmp_path / "out"))
    assert len(values) == 1_115_394 and len(vocabulary) == 65
    assert "".join(np.array(vocabulary)[values]) == (real_data / "tinyshakespeare.txt").read_text()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["shards"][0]["x"]["sha256"]) == 2


def test_a_table_of_targets_alone_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the rows hold no values: the inputs' shape is 3x0"):
        import_csv(write(tmp_path, "a.csv", b"1\n2\n3\n"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


SERIES = "# made up\n@seriesLength 3\n@classLabel true Yes No\n@data\n1,2,3:No\n4,5,6.5:Yes\n-1,0,0.1:No\n"


def test_series_are_numbered_as_the_head_of_their_file_lists_the_classes(tmp_path: Path) -> None:
    (tmp_path / "a.ts").write_text(SERIES)
    x, y, description = everything(import_ts(tmp_path / "a.ts", tmp_path / "out"))
    assert np.array_equal(x, np.float32([[[1], [2], [3]], [[4], [5], [6.5]], [[-1], [0], [0.1]]])) and x.dtype == np.float32
    assert y.tolist() == [1, 0, 1] and description["classes"] == ["Yes", "No"]
    _, y, description = everything(import_ts(tmp_path / "a.ts", tmp_path / "named", classes={"No": "absent", "Yes": "there"}))
    assert y.tolist() == [0, 1, 0] and description["classes"] == ["absent", "there"]
    with pytest.raises(OutputError, match="the output folder exists"):
        import_ts(tmp_path / "a.ts", tmp_path / "out")


@pytest.mark.parametrize(("old", "new", "error", "said"), [
    (":Yes", ":Maybe", DataError, 'a.ts.* row=1: "Maybe" in column "class" is none of Yes, No; correct the file'),
    ("6.5", "?", DataError, 'row=1: "[?]" in column "values" is not a finite number; correct the file'),
    ("@classLabel true Yes No", "@classLabel false", DataError, "its head says that the series have no classes"),
    ("@classLabel true Yes No", "@targetLabel True", DataError, "its head says that the series have no classes"),
    ("4,5,", "4,", DataError, "the series has 2 values, and 3 were expected; correct the file")])
def test_series_that_do_not_fit_their_head_are_named(tmp_path: Path, old: str, new: str, error: type, said: str) -> None:
    (tmp_path / "a.ts").write_text(SERIES.replace(old, new))
    with pytest.raises(error, match=said):
        import_ts(tmp_path / "a.ts", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(MissingError, match="the file is not there"):
        import_ts(tmp_path / "b.ts", tmp_path / "out")
