"""Text: the same bits with a cache and without, alone and in a batch, whatever ranks have the model; and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import Result, clean_environment
from standing import mpirun

from mpitrain import nn
from mpitrain.autograd import no_grad, row_by_row
from mpitrain.backend import native
from mpitrain.cli import main
from mpitrain.config import load_run
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.infer.blocks import joined
from mpitrain.infer.cache import Cache
from mpitrain.infer.engine import Coming, for_text
from mpitrain.infer.generate import Request, Writer
from mpitrain.infer.sample import Sampling, likeliest
from mpitrain.infer.together import take_all_rows
from mpitrain.models import MODELS
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
    llama = ("model.name=llama", "model.heads=4", "model.key_heads=2", "model.hidden=48", "train.steps=20", "run.out=llama")
    experts = ("model.experts=4", "model.every=2", "train.steps=20", "run.out=experts")
    for words in (("data", "import", "text", "text.txt", "--out", "tokens"),
                  ("train", "run.toml", *KEYS, "data.path=tokens", "run.out=run"),
                  ("train", "run.toml", *KEYS, "data.path=tokens", *experts),
                  ("train", "run.toml", *KEYS, "data.path=tokens", *llama)):
        done = mpirun(1, "-m", "mpitrain", *words, cwd=folder)
        assert done.rc == 0, done.err
    (folder / "bad.jsonl").write_text('{"prompt": "a\\ud800"}\n')
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


@needs_c
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rotary_positions_have_the_same_bits_with_a_cache(dtype: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 90, (3, 40))
    model = MODELS["gpt"](layers=2, heads=2, width=32, block=40, vocabulary=90)
    model.initialize(3, dtype)
    model.eval()
    plain = model(tokens).array
    for name in ("block0", "block1"):
        model[name].attention.rope = 100.0
    with no_grad(), row_by_row():
        whole = model(tokens).array
        assert np.abs(whole - plain).max() > 1e-3 * np.abs(plain).max()
        cache, starts = Cache(model, 4, 40, dtype), [3, 9, 1]                    # each row is somewhere else in its text
        assert all(together is None for name, _, together, _ in joined(list(model.blocks.items())) if name != "norm")
        for row, slot in enumerate([3, 0, 2]):
            cache.use([slot], [0])
            assert model(tokens[row:row + 1, :starts[row]]).array.tobytes() == whole[row:row + 1, :starts[row]].tobytes()
        for place in range(30):
            at = [start + place for start in starts]
            cache.use([3, 0, 2], at)
            made = model(tokens[[0, 1, 2], at][:, None]).array
            assert made.tobytes() == whole[[0, 1, 2], at][:, None].tobytes(), place


DRAWN = ("--temperature", "0.9", "--top-k", "5", "--top-p", "0.95", "--seed", "5", "--tokens", "30")


@needs_c
def test_a_text_is_the_same_alone_in_a_batch_without_cache_and_on_any_ranks(run: Path, tmp_path: Path) -> None:
    wanted = texts(run, tmp_path / "a", 1, *DRAWN)
    alone = generate(run, 1, "--prompt", PROMPTS[0], *DRAWN)
    assert alone.out == wanted[0] + "\n", alone.err
    assert len(set(wanted)) == len(PROMPTS) and all(len(text) > 25 for text in wanted)
    for number, (ranks, word) in enumerate([(1, "--no-cache"), (2, "--slots=2"), (2, "mesh.tp=2"), (2, "mesh.pp=2")]):
        assert texts(run, tmp_path / f"b{number}", ranks, *DRAWN, word) == wanted, (ranks, word)


@needs_c
def test_a_model_with_experts_gives_the_same_text_alone_in_a_batch_and_with_experts_on_other_ranks(run: Path,
                                                                                                   tmp_path: Path) -> None:
    moe = run.parent / "experts"
    wanted = texts(moe, tmp_path / "a", 1, *DRAWN)
    assert generate(moe, 1, "--prompt", PROMPTS[0], *DRAWN).out == wanted[0] + "\n"
    for number, (ranks, word) in enumerate([(1, "--no-cache"), (2, "mesh.ep=2")]):
        assert texts(moe, tmp_path / f"b{number}", ranks, *DRAWN, word) == wanted, (ranks, word)


def test_experts_take_all_rows_as_a_mixture_with_room_for_all_does() -> None:
    mixture = nn.MixtureOfExperts(6, 10, 4, 2, capacity=2.0)       # as many places as rows
    mixture.initialize(3, "float64")
    x = np.random.default_rng(1).standard_normal((3, 5, 6))
    with no_grad():
        wanted = mixture(x).array
        take_all_rows(mixture)
        np.testing.assert_allclose(mixture(x).array, wanted, rtol=1e-12, atol=1e-15)
        mixture.capacity = 0.01
        with row_by_row():
            whole = mixture(x).array
            assert mixture(x[1:2, 2:3]).array.tobytes() == whole[1:2, 2:3].tobytes()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9, 10, 11])
def test_the_likeliest_tokens_are_those_of_a_stable_sort_also_put_together_of_parts(count: int) -> None:
    row = np.random.default_rng(3).integers(0, 4, 10).astype(np.float32)            # with ties
    order = np.argsort(-row, kind="stable")[:count or None]
    values, places = likeliest(row, count)
    assert places.tolist() == order.tolist() and values.tolist() == row[order].tolist()
    parts = [likeliest(row[:6], count), likeliest(row[6:], count)]
    joined, found = likeliest(np.concatenate([parts[0][0], parts[1][0]]), count)
    assert np.concatenate([parts[0][1], parts[1][1] + 6])[found].tolist() == order.tolist() and joined.tolist() == values.tolist()
    row[7] = np.nan
    assert np.isnan(likeliest(row, count)[0][0])


class Played:
    """An engine that gives texts' next tokens one turn later, as the first stage of two sees it; each is the last one plus 1."""

    groups, slots, capacity, cache = [[0, 2], [1, 3]], 4, 100, True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def next_tokens(self, tokens: Any, slots: list[int], starts: Any, choices: Any) -> Coming:
        self.asked.append(slots)
        return Coming([text[-1] + 1 for text in tokens])


def test_requests_are_shared_out_over_the_groups_of_a_pipeline_and_a_dropped_one_gives_its_slot_back() -> None:
    engine = Played()
    writer = Writer(engine)                                                         # type: ignore[arg-type]
    requests = [Request(number, [10 * number], 3, Sampling()) for number in range(5)]
    writer.waiting += requests[:2]
    assert not [*writer.turn(), *writer.turn()] and sorted(writer.live) == [0, 1]       # one in each group
    writer.waiting += requests[2:]
    assert not [*writer.turn(), *writer.turn()]
    assert sorted(writer.live) == [0, 1, 2, 3] and len(writer.waiting) == 1
    dropped = writer.live[2]
    writer.drop(dropped)
    ended = [request for _ in range(12) for request in writer.turn()]
    assert len(ended) == 4 and dropped not in ended and not writer.live
    assert all(request.made == [10 * request.number + i for i in (1, 2, 3)] for request in ended)
    assert {frozenset(slot % 2 for slot in slots) for slots in engine.asked} == {frozenset([0]), frozenset([1])}


def test_a_request_for_no_tokens_gets_none_also_behind_others() -> None:
    engine = Played()
    engine.groups = [[0, 1, 2, 3]]
    writer = Writer(engine)                                                         # type: ignore[arg-type]
    counts = (2, 0, 0, 1)
    ended = list(writer.run(Request(number, [7], tokens, Sampling()) for number, tokens in enumerate(counts)))
    assert {request.number: len(request.made) for request in ended} == dict(enumerate(counts))
    assert {request.ended for request in ended} == {"length"}


@needs_c
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_heads_that_share_keys_have_the_same_bits_with_a_cache(key_heads: int) -> None:
    model = MODELS["llama"](layers=2, heads=4, key_heads=key_heads, width=32, hidden=40, block=40, vocabulary=30)
    model.initialize()
    model.eval()
    tokens = np.random.default_rng(0).integers(0, 30, (2, 30))
    with no_grad(), row_by_row():
        wanted = model(tokens).array
        cache, found = Cache(model, 3, 40, np.float32), []
        assert cache.layers[0].keys.shape == (3, key_heads, 40, 8)            # keys are kept once
        for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 30))]:
            cache.use([0, 2], [start, start])
            found.append(model(tokens[:, start:stop]).array)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), wanted)


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "experts", "llama"])
@pytest.mark.parametrize("how", [("--tokens", "36"), DRAWN], ids=["greedy", "drawn"])
def test_a_text_is_the_same_on_all_meshes(run: Path, tmp_path: Path, how: tuple[str, ...], name: str) -> None:
    run = run.parent / name
    wanted = texts(run, tmp_path / "a", 1, *how, "--no-cache")
    meshes = [(1,), (3, "--slots=1"), (4,), (4, "mesh.pp=2", "mesh.tp=2"), (4, "mesh.pp=4"), (4, "mesh.pp=2"), (2, "mesh.tp=2"),
              (2, "mesh.pp=2", "--no-cache"), (2, "mesh.tp=2", "--slots=3")]
    meshes += [(4, "mesh.ep=4"), (4, "mesh.ep=2", "mesh.pp=2"), (4, "mesh.ep=2", "mesh.tp=2")] if name == "experts" else []
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
    (("--prompts", "bad.jsonl", "--out", "x"), "character 2 of prompt 1 of bad.jsonl is '\\ud800'"),
    (("--prompts", "prompts.txt", "--out", "/dev/full", "--overwrite"), "--out names a file in a folder that is there"),
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


@needs_c
@pytest.mark.slow
def test_a_rank_along_tp_keeps_its_own_heads(run: Path, tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text("""
import sys
from pathlib import Path
from mpitrain.comm.job.guard import Process
from mpitrain.config import load_run
from mpitrain.infer.engine import Engine
def main():
    with Engine(load_run(Path(sys.argv[1]), ["mesh.tp=2"]), Path(sys.argv[1]), None, 3, 90) as engine:
        shapes = {layer.keys.shape for layer in engine.cache.layers}
        found = engine.session.control.gather_objects([list(shape) for shape in shapes])
    print(found)
    return 0
Process().run(main)
""")
    done = mpirun(2, tmp_path / "shapes.py", run)
    assert done.rc == 0 and "[[[3, 1, 40, 16]], [[3, 1, 40, 16]]]" in done.out, done.err


def test_a_reader_that_has_seen_enough_ends_it_quietly(run: Path) -> None:
    command = [sys.executable, "-m", "mpitrain", "generate", str(run), "--prompt", "The ", "--slide", "--tokens", "100000"]
    job = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert job.stdout is not None and job.stderr is not None and job.stdout.read(10)
    job.stdout.close()
    assert job.wait(30) == 141 and job.stderr.read() == b""
    job.stderr.close()


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("rule", [("block", "shrink.pattern=16x1", "shrink.sparsity=0.7"), ("magnitude", "shrink.sparsity=0.9")])
def test_a_pruned_run_says_what_it_would_say_with_dense_products(run: Path, tmp_path: Path, rule: tuple[str, ...]) -> None:
    pruned = run.parent / rule[0]
    done = mpirun(1, "-m", "mpitrain", "train", "run.toml", *KEYS, "data.path=tokens", f"run.out={rule[0]}", "train.steps=6",
                  "model.width=256", "shrink.end=4", f"shrink.prune={rule[0]}", *rule[1:], cwd=run.parent)
    assert done.rc == 0, done.err
    dense = texts(pruned, tmp_path / "dense", 1, "--tokens", "12", "--seed", "2", "shrink.products=dense")
    for number, (ranks, mesh) in enumerate(((1, ()), (2, ()), (2, ("mesh.pp=2",)), (2, ("mesh.tp=2",)))):
        assert texts(pruned, tmp_path / f"sparse{number}", ranks, "--tokens", "12", "--seed", "2", *mesh) == dense, mesh


@needs_c
@pytest.mark.parametrize(("name", "how"), [("run", (*DRAWN, "--slots=2")),
                                           pytest.param("llama", ("--tokens", "12"), marks=pytest.mark.slow)])
def test_a_text_on_a_device_is_that_of_the_host(run: Path, tmp_path: Path, name: str, how: tuple[str, ...]) -> None:
    """Of float32, whose roundings choose no other token here."""
    out, program = tmp_path / "device", str(ROOT / "tests" / "train" / "device_program.py")
    done = mpirun(1, program, "generate", str(run.parent / name), "--device", "gpu", *how, "--prompts",
                  str(run.parent / "prompts.txt"), "--out", str(out), cwd=run.parent)
    assert done.rc == 0, done.err
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["prompt"] + answer["text"] for answer in answers] == texts(run.parent / name, tmp_path / "host", 1, *how)


def test_a_part_of_a_model_does_not_generate_on_a_device(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"each rank generates with a whole model, found mesh\.pp = 1, mesh\.tp = 2"):
        for_text(load_run(run, ["mesh.tp=2"]), "gpu")
