"""Text: the same bits with a cache and without, alone and in a batch, whatever ranks have the model; and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from launch import Result, mpirun

from mpitrain.autograd import no_grad, row_by_row
from mpitrain.backend import native
from mpitrain.cli import main
from mpitrain.errors import MpitrainError
from mpitrain.infer.cache import Cache
from mpitrain.train.build.saved import load

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("model.name=gpt", "model.layers=3", "model.heads=2", "model.width=32", "model.block=40", "model.vocabulary=90")
KEYS = (*MODEL, "train.steps=60", "train.batch_size=16", "data.validation=tail:0.1", "optimizer.name=adamw", "optimizer.lr=1e-2")
PROMPTS = ("The ", "A rank ", "s", "checkpoint of the model", "mesh")
needs_c = pytest.mark.skipif(native.load("product") is None, reason="needs C: NumPy promises no bits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    text = (ROOT / "docs" / "architecture.md").read_text().encode("ascii", "replace").decode()
    (folder / "text.txt").write_text(text[:20000])
    (folder / "run.toml").write_text("")
    for words in (("data", "import", "text", "text.txt", "--out", "tokens"),
                  ("train", "run.toml", *KEYS, "data.path=tokens", "run.out=run")):
        done = mpirun(1, "-m", "mpitrain", *words, cwd=folder)
        assert done.rc == 0, done.err
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder / "run"


def generate(run: Path, ranks: int, *words: str, out: Path | None = None) -> Result:
    more = ("--prompts", str(run.parent / "prompts.txt"), "--out", str(out)) if out else ()
    return mpirun(ranks, "-m", "mpitrain", "generate", str(run), *words, *more, cwd=run.parent)


def texts(run: Path, out: Path, ranks: int, *words: str) -> list[str]:
    done = generate(run, ranks, *words, out=out)
    assert done.rc == 0, done.err
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["number"] for answer in answers] == list(range(len(PROMPTS)))
    return [answer["prompt"] + answer["text"] for answer in answers]


@needs_c
def test_logits_have_the_same_bits_with_a_cache_and_in_a_batch(run: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 80, (3, 40))
    with no_grad(), row_by_row():
        whole = load(run).model(tokens).array
        assert load(run).model(tokens[1:2]).array.tobytes() == whole[1:2].tobytes()
        model = load(run).model
        cache = Cache(model, 4, 40, np.float32)
        cache.use([3, 0, 2], [0, 0, 0])
        assert model(tokens[:, :7]).array.tobytes() == whole[:, :7].tobytes()
        for place in range(7, 40):
            cache.use([3, 0, 2], [place] * 3)
            assert model(tokens[:, place:place + 1]).array.tobytes() == whole[:, place:place + 1].tobytes(), place
        cache.use([1], [0])                                                     # a text of its own, in several pieces
        first = model(tokens[:1, :5]).array
        cache.use([1], [5])
        assert np.concatenate([first, model(tokens[:1, 5:30]).array], axis=1).tobytes() == whole[:1, :30].tobytes()


DRAWN = ("--temperature", "0.9", "--top-k", "20", "--top-p", "0.95", "--seed", "5", "--tokens", "30")


@needs_c
def test_a_text_is_the_same_alone_in_a_batch_without_cache_and_on_any_ranks(run: Path, tmp_path: Path) -> None:
    wanted = texts(run, tmp_path / "a", 1, *DRAWN)
    alone = generate(run, 1, "--prompt", PROMPTS[0], *DRAWN)
    assert alone.out == wanted[0] + "\n", alone.err
    assert len(set(wanted)) == len(PROMPTS) and all(len(text) > 25 for text in wanted)
    for number, (ranks, word) in enumerate([(1, "--no-cache"), (2, "--slots=2"), (2, "mesh.tp=2"), (2, "mesh.pp=2")]):
        assert texts(run, tmp_path / f"b{number}", ranks, *DRAWN, word) == wanted, (ranks, word)


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("how", [("--tokens", "36"), DRAWN], ids=["greedy", "drawn"])
def test_a_text_is_the_same_on_all_meshes(run: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    wanted = texts(run, tmp_path / "a", 1, *how, "--no-cache")
    meshes = [(1,), (3, "--slots=1"), (4,), (4, "mesh.pp=2", "mesh.tp=2"), (4, "mesh.pp=4"), (4, "mesh.pp=2"), (2, "mesh.tp=2"),
              (2, "mesh.pp=2", "--no-cache"), (2, "mesh.tp=2", "--slots=3")]
    for number, (ranks, *words) in enumerate(meshes):
        assert texts(run, tmp_path / f"b{number}", int(ranks), *how, *map(str, words)) == wanted, (ranks, words)


@pytest.mark.parametrize(("words", "said"), [
    (("--prompt", "rü"), "character 2 of the prompt is 'ü', which is not among the"),
    (("--prompt", ""), "the prompt is empty; give it a character at least"),
    (("--prompt", "a" * 41), "the prompt has 41 tokens, and the model takes 40 (model.block)"),
    (("--prompt", "a", "--temperature", "-1"), "--temperature is -1.0, expected a number of 0 or more"),
    (("--prompt", "a", "--temperature", "nan"), "--temperature is nan, expected"),
    (("--prompt", "a", "--top-p", "0"), "--top-p is 0.0, expected a number in (0, 1]"),
    (("--prompt", "a", "--top-k", "-3"), "--top-k is -3, expected"),
    (("--prompt", "a", "--tokens", "-1"), "--tokens is -1, expected"),
    (("--prompts", "prompts.txt"), "--prompts FILE and --out FILE go together"),
    (("--prompts", "none.txt", "--out", "x"), "there is no such file of prompts"),
    (("--prompts", "prompts.txt", "--out", "prompts.txt"), "the answers would replace their own prompts"),
    (("--prompt", "a", "--vocabulary", "."), "there is no table of tokens here"),
])
def test_what_cannot_be_done_is_refused_in_a_line(run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...],
                                                  said: str) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(MpitrainError, match=re.escape(said)):
        main(["generate", "run", *words])


@pytest.mark.slow
def test_a_step_that_is_not_there_is_refused_on_all_ranks(run: Path) -> None:
    done = generate(run, 2, "--prompt", "a", "--step", "7")
    assert done.rc not in (0, None) and "there is no checkpoint of step 7" in done.error_lines[0], done.err
    assert len(done.error_lines) == 1


def test_a_text_ends_at_the_models_block_or_slides_on(run: Path) -> None:
    done = generate(run, 1, "--prompt", "The ", "--tokens", "60")
    assert len(done.out) == 42 and "ends at model.block = 40, 37 of 60 tokens; go on with --slide" in done.err
    slid = generate(run, 1, "--prompt", "The ", "--tokens", "60", "--slide")
    assert len(slid.out) == 65 and slid.out.startswith(done.out[:-1])
