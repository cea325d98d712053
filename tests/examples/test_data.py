"""What the `data.py` of series, tables and graphs make: baselines of books to the digit, windows in order, faults as one line."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import importlib.util
import re
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
from launch import ROOT, Job, Result, clean_environment

from mpitrain.data import foreign, importers, packages
from mpitrain.errors import DataError, MissingError, MpitrainError


def script(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{example}_data", ROOT / f"examples/{example}/data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example: str, out: Path, *paths: Path) -> Result:
    environment = {**clean_environment(), "PYTHONPATH": ":".join(map(str, (*paths, ROOT)))}
    words = [sys.executable, "-P", str(ROOT / f"examples/{example}/data.py"), "--out", str(out)]
    return Job(words, environment, out.parent).finish()


def needs(name: str, version: str) -> None:
    try:
        packages.python_package(name, version)
    except MissingError as error:
        pytest.skip(error.message)


def rows(folder: Path) -> tuple[Any, Any]:
    with h5py.File(folder / "shard-00000.h5") as file:
        return file["x"][:], file["y"][:]


def test_nyse_prints_the_baselines_of_the_book(tmp_path: Path) -> None:
    needs("ISLP", "0.6.0")
    result = run("nyse", tmp_path / "data")
    assert result.rc == 0, result.err
    assert result.out == ("4276 days to train on, 1770 to judge by; R2 of least squares 0.413, of yesterday's volume 0.180\n")
    x, y = rows(tmp_path / "data/train")
    assert x.shape == (4276, 5, 3) and y.shape == (4276, 1)
    assert np.array_equal(x[1:, :4], x[:-1, 1:]) and np.array_equal(y[:-1, 0], x[1:, 4, 1])      # the days, the oldest first


def test_loans_are_judged_as_scikit_learn_would() -> None:
    loans, rng = script("loans"), np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y = (rng.random(400) < 1 / (1 + np.exp(-(0.5 + x @ [1.0, -2.0])))).astype(int)
    scores = np.round(x[:, 0], 1)                                                     # with many that are equal
    pairs = scores[y == 1][:, None] - scores[y == 0]
    assert loans.auc(scores, y) == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2, abs=1e-12)
    weights = loans.logistic(x, y)
    p = 1 / (1 + np.exp(-(weights[0] + x @ weights[1:])))
    assert abs((p - y).sum()) < 1e-8 and np.abs(x.T @ (p - y)).max() < 1e-8              # where the likelihood is largest
    assert loans.f1(p > 0.5, y) == pytest.approx(2 * (y[p > 0.5]).sum() / ((p > 0.5).sum() + y.sum()))


def test_each_sampled_node_is_a_neighbour_of_the_one_before() -> None:
    needs("networkx", "3.6.1")
    karate = script("karate")
    neighbours = {0: [1, 2, 3, 4, 5, 6], 1: [0], 2: [0, 3], 3: [0, 2], 4: [0], 5: [0], 6: [0]}
    drawn = karate.neighbourhoods(neighbours, [0, 1, 3], np.random.default_rng(0))
    assert drawn.shape == (3, 1 + 5 + 25)
    for row in drawn:
        parents = [row[0]] * 5 + [node for node in row[1:6] for _ in range(5)]
        assert all(child in neighbours[parent] for parent, child in zip(parents, row[1:]))
    assert len(set(drawn[0, 1:6])) == 5, "without replacement where there are enough"


def test_the_club_that_networkx_has_no_more_is_a_line_with_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("networkx", "3.6.1")
    import networkx
    karate, social = script("karate"), networkx.generators.social
    graph = karate.club()
    assert (len(graph), graph.number_of_edges()) == (34, 78) and graph.nodes[0]["club"] == "Mr. Hi"
    graph.remove_edge(0, 1)
    monkeypatch.setattr(social, "karate_club_graph", lambda: graph)
    with pytest.raises(DataError, match="expected 34 members, 78 friendships .*, found 34, 77 and .* networkx==3.6.1"):
        karate.club()
    monkeypatch.delattr(social, "karate_club_graph")
    with pytest.raises(DataError, match="has no karate_club_graph: .* networkx==3.6.1"):
        karate.club()


@pytest.mark.parametrize("content", ["def broken(:\n", "raise RuntimeError('two\\nlines')\n", "1 / 0\n"])
def test_a_networkx_that_cannot_be_imported_is_a_line_with_the_cure(tmp_path: Path, content: str) -> None:
    """Any of its files may be damaged, and only the one that has the club in it is compared with its hash."""
    path = "networkx/generators/social.py"
    (tmp_path / "site" / path).parent.mkdir(parents=True)
    (tmp_path / "site" / path).write_text("")
    (tmp_path / "site/networkx/__init__.py").write_text(content)
    about = tmp_path / "site/networkx-3.6.1.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Name: networkx\nVersion: 3.6.1\n")
    about.joinpath("RECORD").write_text(f"{path},,")
    result = run("karate", tmp_path / "data", tmp_path / "site")
    assert result.rc == 65 and len(result.error_lines) == 1 and "has no karate_club_graph: " in result.error_lines[0], result.err
    assert "pip install --force-reinstall --no-deps networkx==3.6.1" in result.error_lines[0]
    assert result.err.count("\n") == 1


def test_a_mail_that_was_sent_twice_is_on_one_side() -> None:
    x = np.random.default_rng(0).integers(0, 4, (900, 3)).astype(float)                 # 64 different ones at most
    test = script("spam").held_out(x)
    assert 0.2 < test.mean() < 0.5
    assert not {row.tobytes() for row in x[test]} & {row.tobytes() for row in x[~test]}


@pytest.mark.parametrize(("example", "name"), [("gunpoint", "GunPoint"), ("italy_power", "ItalyPowerDemand")])
def test_a_truncated_series_is_one_line(tmp_path: Path, example: str, name: str) -> None:
    head = f"@problemName {name}\n@univariate true\n@equalLength true\n@seriesLength 3\n@classLabel true 1 2\n@data\n"
    path = f"aeon/datasets/data/{name}/{name}_TRAIN.ts"
    file = tmp_path / "site" / path
    file.parent.mkdir(parents=True)
    file.write_text(head + "1,2,3:1\n1,2")
    about = tmp_path / "site/aeon-1.6.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Name: aeon\nVersion: 1.6.0\n")
    whole = base64.urlsafe_b64encode(hashlib.sha256(b"another").digest()).rstrip(b"=").decode()
    for record, said in ((f"{path},sha256={whole},400", "is not the file of aeon 1.6.0"),
                         (f"{path},,", 'expected "v,v,...,v:class"')):
        about.joinpath("RECORD").write_text(record)
        result = run(example, tmp_path / "data", tmp_path / "site")
        assert result.rc == 65 and len(result.error_lines) == 1 and said in result.error_lines[0], result.err
        assert "pip install --force-reinstall --no-deps aeon==1.6.0" in result.error_lines[0]


OF_FILES = [path.parent.name for path in sorted((ROOT / "examples").glob("*/data.py"))
            if re.search(r"(python|debian)_file\(", path.read_text()) and path.parent.name != "karate"]     # imports its package
FILES = {"darcy": 2, "fashion": 4, "gunpoint": 2, "italy_power": 2, "khan": 4}     # how many each reads; the others one


@pytest.mark.parametrize("example", OF_FILES)
def test_a_damaged_file_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    """Each file that an example reads is cut off, empty or missing in turn; half of its data would stand in the way later."""
    finders = {name: getattr(packages, name) for name in ("python_file", "debian_file")}
    asked: list[str] = []
    turn, damage = 0, ""

    def find(finder: Any, name: str, *rest: str) -> packages.Packaged:
        try:
            found = finder(name, *rest)
        except MissingError as error:
            pytest.skip(error.message)
        asked.append(rest[-1])
        if len(asked) != turn + 1:
            return found
        path = tmp_path / damage / found.path.name
        path.parent.mkdir(exist_ok=True)
        if damage != "missing":
            content = found.path.read_bytes()
            path.write_bytes(content[:len(content) // 2] if damage == "cut" else b"")
        return packages.Packaged(path, "install it again")

    module, out = script(example), tmp_path / "out"
    for name, finder in finders.items():
        monkeypatch.setattr(packages, name, functools.partial(find, finder))
    monkeypatch.setattr(sys, "argv", ["data.py", "--out", str(out)])
    for damage in ("missing", "empty", "cut"):
        for turn in range(FILES.get(example, 1)):
            asked.clear()
            with pytest.raises(MpitrainError) as caught:
                module.main()
            assert caught.value.exit_code in (65, 66) and "\n" not in str(caught.value)
            assert not out.exists(), f"{asked[turn]} was {damage}"
    turn = -1
    asked.clear()
    assert module.main() == 0 and len(asked) == FILES.get(example, 1) and list(out.rglob("manifest.json"))


@pytest.mark.parametrize("example", [name for name in OF_FILES if name != "darcy"])           # which looks at shapes
def test_a_table_without_its_last_row_is_refused_with_the_rows_that_were_expected(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    """As another version of a package may have it, whose hash fits."""
    def shorter(read: Any) -> Any:
        def found(*arguments: Any) -> Any:
            return tuple(part[:-1] for part in table) if isinstance(table := read(*arguments), tuple) else \
                {name: cells[:-1] for name, cells in table.items()}
        return found

    for module, name in ((foreign, "read_table"), (foreign, "read_frame"), (foreign, "read_lazy_frame"),
                         (importers, "read_idx_pair")):
        monkeypatch.setattr(module, name, shorter(getattr(module, name)))
    series, text = importers.read_series, foreign.read_text
    if example == "breast_cancer":                 # which reads lines
        monkeypatch.setattr(foreign, "read_text", lambda file: text(file).rstrip().rpartition("\n")[0])
    monkeypatch.setattr(importers, "read_series", lambda file: foreign.Series(*(part[:-1] for part in series(file)[:2]),
                                                                              series(file).classes))
    monkeypatch.setattr(sys, "argv", ["data.py", "--out", str(tmp_path / "out")])
    try:
        with pytest.raises(DataError, match=r"expected ([\d,]+) [a-z-]+, found ([\d,]+); ") as caught:
            script(example).main()
    except MissingError as error:
        pytest.skip(error.message)
    expected, found = (int(number.replace(",", "")) for number in re.findall(r"(?:expected|found) ([\d,]+)", str(caught.value)))
    assert found == expected - 1 and not (tmp_path / "out").exists()


def lazily(folder: Path, **frames: Any) -> Path:
    """R's pair of files with those data frames."""
    rdata = pytest.importorskip("rdata", reason="needs rdata: pip install rdata==1.1.0")
    places, packed = {}, b""
    for name, frame in frames.items():
        data = written(rdata, folder / "one.rds", frame)
        body = len(data).to_bytes(4, "big") + zlib.compress(data)
        places[name] = np.array([len(packed), len(body)], np.int32)
        packed += body
    index = written(rdata, folder / "index.rds", {"variables": places})
    (folder / "Rdata.rdx").write_bytes(gzip.compress(index))
    (folder / "Rdata.rdb").write_bytes(packed)
    return folder / "Rdata.rdb"


def written(rdata: Any, path: Path, value: Any) -> bytes:
    rdata.write_rds(path, value, compression=None)
    return path.read_bytes()


def test_a_frame_that_r_loads_lazily_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas, with rdata: pip install rdata==1.1.0")
    path = lazily(tmp_path, other=pandas.DataFrame({"a": [1.0]}), ratings=pandas.DataFrame({"s": ["1", "2"], "y": [4.0, 5.0]}))
    file = packages.Packaged(path, "install it again")
    table = foreign.read_lazy_frame(file, "ratings", ["y", "s"])
    assert table["y"].tolist() == [4.0, 5.0] and table["s"].tolist() == ["1", "2"]
    with pytest.raises(DataError, match='no data frame "grades" .there: other, ratings.; install it again'):
        foreign.read_lazy_frame(file, "grades")
    with pytest.raises(DataError, match='no column "d" .there: s, y.'):
        foreign.read_lazy_frame(file, "ratings", ["d"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=f'"ratings" should end at byte {len(whole)}, and the file has {len(whole) - 3}'):
        foreign.read_lazy_frame(file, "ratings")
    path.write_bytes(whole[:-20] + bytes(20))
    with pytest.raises(DataError, match="cannot be read as R's .rdb: .*; install it again"):
        foreign.read_lazy_frame(file, "ratings")
    path.with_suffix(".rdx").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as R's .rdx"):
        foreign.read_lazy_frame(file, "ratings")
