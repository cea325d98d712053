"""What README.md and docs/ say is true: commands run, code runs, tables agree with the code, links lead somewhere.

Every fenced block of a document is used, in order, in one folder that looks like a checkout after `make train`:

    sh      run by bash; mpirun starts 2 ranks at most (1 in pages about something else), a training run is cut to 3 steps
    python  run as a script
    bash    a batch script: only its syntax is checked
    toml    parsed
    text    a picture or a listing: nothing to check

A python or toml block whose first line is a comment with a file name (`# mine.py`) is added to that file instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import importlib.util
import inspect
import re
import shutil
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from configs import flat
from launch import ROOT, Job, clean_environment, find_mpirun

from mpitrain import errors
from mpitrain.config import SECTIONS
from mpitrain.config.load import kinds_of
from mpitrain.config.rules import check
from mpitrain.schedules.grid import Grid

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")

PYTHON = """#!/bin/bash
case " $* " in
    *" -m pytest "*) cd {root} && exec {python} "$@" --collect-only -p no:cacheprovider tests/schedules ;;
    *" -m mpitrain train "*) exec {python} "$@" train.steps=3 optimizer.warmup_steps=0 ;;
    *"/python_api.py "*) exec {python} -m py_compile "${{@: -1}}" ;;         # test_examples.py runs it
    *) exec {python} "$@" ;;
esac
"""
MPIRUN = """#!/bin/bash
ranks={limit}
while [ $# -gt 0 ]; do
    case $1 in
        -n) ranks=$2; shift 2 ;;
        --map-by) shift 2 ;;
        --mpi=*) shift ;;
        *) break ;;
    esac
done
exec {mpirun} -n $((ranks < {limit} ? ranks : {limit})) "$@"
"""
SBATCH = """#!/bin/bash
bash -n "$1"
"""
PIP = """#!/bin/bash
[ "$1" = install ] && exec {python} {here}/test_readme.py "${{@:2}}"
"""


class Block(NamedTuple):
    language: str
    text: str
    place: str


def figure_rows() -> Iterator[list[str]]:
    """The cells of each row, heads of tables left out, in the figures section of README.md and in docs/performance.md."""
    section = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("\n## ")[0]
    for line in (section + (ROOT / "docs/performance.md").read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "command" not in cells and set(cells[0]) != {"-"}:
            yield cells


def test_every_figure_has_a_number_and_a_command_that_is_there() -> None:
    from mpitrain.cli import found_verbs, parser
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    verbs = next(action for action in parser(found_verbs())._actions if isinstance(action, argparse._SubParsersAction))
    benches = next(action for action in verbs.choices["bench"]._actions if isinstance(action, argparse._SubParsersAction))
    rows = list(figure_rows())
    assert len(rows) > 80
    for row in rows:
        assert re.search(r"\d", row[1]), row
        program, *words = next(cell for cell in row if re.match("`(make|mpirun|python) ", cell)).strip("`").split()
        scripts = [word for word in words if word.endswith(".py")]
        assert all((ROOT / script).is_file() for script in scripts), row
        assert program != "make" or words[0] in targets, row
        assert "bench" not in words or words[words.index("bench") + 1] in benches.choices, row
        assert program == "make" or "bench" in words or "-c" in words or scripts, row


def draw() -> Any:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/figures/draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_and_tables_are_what_the_script_makes_of_the_results() -> None:
    script = draw()
    records = script.load(script.RESULTS)
    drawn = script.drawn(records)
    assert {path.name for path in script.HERE.glob("*.svg")} == set(drawn)
    for name, contents in drawn.items():
        assert (script.HERE / name).read_text() == contents, f"{name}: run python docs/figures/draw.py"
    for page in script.PAGES:
        assert script.fill(page.read_text(), records) == page.read_text(), f"{page.name}: run python docs/figures/draw.py"


def test_a_bar_is_as_long_as_its_ratio() -> None:
    script = draw()
    models = ("mlp", "lenet", "resnet20", "gpt-nano", "gpt-baby")
    row = {"bench": "train_vs_peers", "peer": "eager", "ranks": 1, "seconds": 0.01}
    records = [{**row, "model": model, "ratio": 1.5 * n} for n, model in enumerate(models, 1)]
    bars = re.findall(r'<rect [^>]*width="([\d.]+)" height="13"', script.one_rank(script.THEMES["dark"], records))
    assert [float(width) / float(bars[0]) for width in bars] == pytest.approx([1, 2, 3, 4, 5], rel=2e-3)


def test_a_measurement_that_is_added_takes_the_place_of_the_older_one() -> None:
    script = draw()
    old = [{"bench": "allreduce", "bytes": 8, "ratio": 1.0}, {"bench": "allreduce", "bytes": 16, "ratio": 2.0}]
    new = {"bench": "allreduce", "bytes": 8, "ratio": 3.0, "pairs": 9, "date": "2027-01-01"}
    assert script.merge(old, [new]) == [new, old[1]]


def test_the_page_on_running_names_every_flag_of_train() -> None:
    from mpitrain.cli import found_verbs, parser
    verbs = next(action for action in parser(found_verbs())._actions if isinstance(action, argparse._SubParsersAction))
    flags = {flag for action in verbs.choices["train"]._actions for flag in action.option_strings if flag.startswith("--")}
    line, = re.findall(r"^Flags of `train`: (.*)$", (ROOT / "docs/running.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(--\w+)", line)) == flags - {"--help"}


@pytest.mark.parametrize("options", [{}, {"micro_batches": 4, "algorithm": "ring"},
                                     {"micro_batches": 4, "wire_dtype": "bfloat16"}])
def test_the_page_on_reproducibility_names_every_key_that_layout_mode_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError) as refused:
        check(flat(reproducible="layout", **options), Grid({}), on_gpu=False)
    key = next(key for key in re.findall(r"[a-z]+\.[a-z_]+", str(refused.value)) if key != "train.reproducible")
    section = (ROOT / "docs/reproducibility.md").read_text().partition("## The same bits on any number of ranks")[2]
    refusal = rf"`{key}` must be given|^\| `{key}` other than .* \| refused: "
    assert re.search(refusal, section, re.MULTILINE), key


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for match in FENCE.finditer(text):
        yield Block(match[1], match[2], f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}")


def checkout(folder: Path, limit: int = 2) -> Path:
    """A folder with the examples, and an environment whose commands are small stand-ins around the real ones.

    `limit` is how many ranks mpirun may start.
    """
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("mnist", "shakespeare", "*.h5"))
    (folder / "tests").symlink_to(ROOT / "tests")
    commands = folder / ".venv/bin"
    commands.mkdir(parents=True)
    names = {"python": sys.executable, "mpirun": find_mpirun(), "root": ROOT, "here": Path(__file__).parent, "limit": limit}
    for name, text in (("python", PYTHON), ("mpirun", MPIRUN), ("srun", MPIRUN), ("sbatch", SBATCH), ("pip", PIP)):
        (commands / name).write_text(text.format(**names))
        (commands / name).chmod(0o755)
    (commands / "activate").write_text("")
    for name in ("ready", "ready-test"):
        (folder / ".venv" / name).touch()
    return folder


def make_inputs(folder: Path) -> None:
    """The files that docs/data.md imports."""
    from PIL import Image
    (folder / "corpus.txt").write_text("to be or not to be\n" * 20)
    pixels, labels = np.arange(12 * 9, dtype=np.uint8), np.arange(12, dtype=np.uint8) % 3
    for name, head, values in (("images-idx3", [12, 3, 3], pixels), ("labels-idx1", [12], labels)):
        header = bytes([0, 0, 8, len(head)]) + b"".join(n.to_bytes(4, "big") for n in head)
        (folder / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))
    np.savez(folder / "arrays.npz", x=np.ones((6, 2), np.float32), y=np.zeros(6, np.float32))
    (folder / "table.csv").write_text("length,width,species\n1.5,2,oak\n2.5,3,elm\n")
    (folder / "GunPoint_TRAIN.ts").write_text("@problemName GunPoint\n@univariate true\n@equalLength true\n@seriesLength 3\n"
                                              "@classLabel true 1 2\n@data\n1,2,3:1\n2,3,4:2\n")
    (folder / "theirs").mkdir()
    with h5py.File(folder / "theirs/one.h5", "w") as file:
        file["fields"], file["labels"] = np.ones((8, 3), np.float32), np.arange(8) % 2
    for kind in ("cat", "dog"):
        (folder / "photos" / kind).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "photos" / kind / "1.png")


@pytest.mark.parametrize("document", [pytest.param(path, marks=() if path.name == "README.md" else pytest.mark.slow, id=path.name)
                                      for path in DOCUMENTS])
def test_every_block_of_a_document_runs(document: Path, tmp_path: Path) -> None:
    folder = checkout(tmp_path, limit=2 if document.name in ("README.md", "extending.md") else 1)
    if document.name == "data.md":
        make_inputs(folder)
    for block in blocks(document):
        name = FILE_NAME.match(block.text)
        if name and block.language in ("python", "toml"):
            with open(folder / name[1], "a") as file:
                file.write(block.text)
        elif block.language == "python":
            script = folder / "block.py"
            script.write_text(block.text)
            run([sys.executable, str(script)], folder, block)
        elif block.language == "sh":
            run(["bash", "-euo", "pipefail", "-c", block.text], folder, block)
        elif block.language == "bash":
            run(["bash", "-n", "-c", block.text], folder, block)
        else:
            assert block.language in ("toml", "text"), f"{block.place}: what is a block of {block.language!r}?"
    for path in folder.glob("*.toml"):
        tomllib.loads(path.read_text())


def run(command: list[str], folder: Path, block: Block) -> None:
    environment = clean_environment()
    environment["PATH"] = f"{folder}/.venv/bin:{environment['PATH']}"
    result = Job(command, environment, folder).finish(90)
    assert result.rc == 0, f"{block.place}:\n{block.text}\n--- stdout\n{result.out[-3000:]}\n--- stderr\n{result.err[-3000:]}"


def test_a_block_that_fails_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="somewhere:1"):
        run(["bash", "-euo", "pipefail", "-c", "false | true\n"], tmp_path, Block("sh", "", "somewhere:1"))


def test_extras_that_are_installed_somewhere_exist() -> None:
    assert refuse_extras([".[images]"]) == [] and refuse_extras([".[nonsense]"]) == ["nonsense"]


def refuse_extras(arguments: list[str]) -> list[str]:
    """The extras among pip's arguments that setup.cfg does not know."""
    setup = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    known = re.findall(r"^(\w+) =$", setup, re.MULTILINE)
    asked = [name for word in arguments for name in re.findall(r"\[([\w,]+)\]", word)]
    return [extra for names in asked for extra in names.split(",") if extra not in known]


def anchors(document: Path) -> set[str]:
    """What a link may name behind its ``#``: the headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text())
    for target in re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text):
        path, _, anchor = "".join(target).partition("#")
        found = document.parent / path if path else document
        assert found.exists(), f"{document.name} links to {path}"
        assert not anchor or anchor in anchors(found), f"{document.name} links to {path}#{anchor}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "data.md"], ids=lambda path: path.name)
def test_files_and_folders_that_a_document_names_are_there(document: Path) -> None:
    """Paths of the repository in code marks: mpitrain/'s own without its name, files by their ending, folders by a slash."""
    text = FENCE.sub("", document.read_text())
    own = {path.name for path in (ROOT / "mpitrain").iterdir()} | {path.name for path in ROOT.iterdir()}
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text):
        if name.split("/")[0] in own or document.name == "architecture.md":
            assert (ROOT / "mpitrain" / name).exists() or (ROOT / name).exists(), f"{document.name} names {name}"


def test_the_readme_is_short_and_the_licence_is_there() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 220
    assert "the mpitrain developers" in (ROOT / "LICENSE").read_text()
    for document in DOCUMENTS:
        assert max(map(len, FENCE.sub("", document.read_text()).splitlines())) < 300


def test_the_page_on_running_lists_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs/running.md").read_text(), re.MULTILINE)
    table = {code: int(status) for status, codes in rows for code in re.findall(r"E_\w+", codes)}
    raised = dict(re.findall(r'code, exit_code = "(E_\w+)", (\d+)', inspect.getsource(errors)))
    assert len(raised) > 10
    for code, status in raised.items():
        assert table.get(code) == int(status), code


def test_the_training_step_in_the_documents_is_the_one_that_runs() -> None:
    from mpitrain.train.trainer import Trainer
    shown = next(b.text for b in blocks(ROOT / "docs/architecture.md") if "def train_step" in b.text)

    def statements(source: str) -> list[str]:
        return [line.partition("  # ")[0].partition("   #")[0].strip() for line in source.splitlines()[1:]]
    assert statements(shown) == statements(inspect.getsource(Trainer.train_step))


# ---- docs/configuration.md ------------------------------------------------------------------------------------------

WORDS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "true or false"}


def type_words(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"list of {' or '.join(type_words(kind) + 's' for kind in kinds_of(typing.get_args(hint)[0]))}"
    if typing.get_origin(hint) is dict:
        return "table"
    return " or ".join(type_words(h) if typing.get_origin(h) else WORDS[h] for h in kinds_of(hint))


def sections() -> dict[str, str]:
    text = (ROOT / "docs/configuration.md").read_text()
    return dict(re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def keys_of(section: str) -> dict[str, tuple[str, Any, str]]:
    """key -> (type, default, meaning) of the table of a section."""
    rows = re.findall(r"^\| `(\w+)` \| ([a-z ]+) \| `([^`]+)` \| (.*) \|$", sections()[section], re.MULTILINE)
    return {key: (kind, tomllib.loads(f"value = {default}")["value"], meaning) for key, kind, default, meaning in rows}


def test_the_documents_know_every_section() -> None:
    assert list(sections()) == list(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_documents_know_every_key_its_type_and_its_default(section: str) -> None:
    kind = type(SECTIONS[section])
    hints = typing.get_type_hints(kind)
    expected = {}
    for field in dataclasses.fields(kind):
        if field.name != "arguments":
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = list(value) if isinstance(value, tuple) else value
            expected[field.name] = (type_words(hints[field.name]), default)
    assert {key: row[:2] for key, row in keys_of(section).items()} == expected


def test_the_documents_know_every_model_and_its_keys() -> None:
    from mpitrain.models import MODELS
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", sections()["model"], re.MULTILINE)
    found = {name: re.findall(r"`(\w+)`", keys) for names, keys in rows for name in re.findall(r"`(\w+)`", names)
             if name not in ("name", "init_from", "formats", "ranks", "shapes")}
    assert found == {name: list(inspect.signature(MODELS[name]).parameters) for name in MODELS}


def test_the_documents_name_everything_that_has_a_name() -> None:
    from mpitrain import data, nn, optim
    from mpitrain.comm.messages.algorithms import names
    named: list[tuple[Any, str]] = [
        (optim.OPTIMIZERS, keys_of("optimizer")["name"][2]), (optim.SCHEDULES, sections()["optimizer"]),
        (nn.LOSSES, sections()["train"]), (names(), keys_of("comm")["algorithm"][2]),
        (data.TRANSFORMS, keys_of("data")["transform"][2]), (data.AUGMENTATIONS, keys_of("data")["augment"][2]),
        (nn.ACTIVATIONS, sections()["model"])]
    for registry, text in named:
        assert set(registry) <= set(re.findall(r"`(\w+)`", text)), text


if __name__ == "__main__":                        # the stand-in for pip
    wrong = refuse_extras(sys.argv[1:])
    if wrong:
        sys.exit(f"setup.cfg has no extra {', '.join(wrong)}")
