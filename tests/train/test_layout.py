"""`reproducible = "layout"`: one set of bits on any number of ranks, and a clear line where that cannot be had."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import lines, mpirun, record, without_times, write
from standing import train

from mpitrain.errors import ConfigError, DesyncError
from mpitrain.train.machine import fingerprint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import layout_matrix  # noqa: E402

LAYOUT = ("train.reproducible=layout", "train.micro_batches=6", "optimizer.schedule=constant")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.promise("D5")
def test_each_model_has_one_hash_on_any_ranks_with_any_buckets_with_and_without_overlap() -> None:
    """20 steps of every model; each two settings meet. The plain mode shows that ranks can change the hash."""
    done = layout_matrix.run([*layout_matrix.pairs(), *layout_matrix.plain()], steps=20)
    shown = "\n".join(layout_matrix.table(done))
    for model in layout_matrix.MODELS:
        assert len({c["hash"] for c in done if c["model"] == model and c["mode"] == "layout"}) == 1, shown
    assert len({c["hash"] for c in done if c["mode"] == "run"}) > 1, shown


def test_the_cover_holds_every_pair_of_settings() -> None:
    chosen = layout_matrix.pairs()
    for one in layout_matrix.every_case():
        assert layout_matrix.pairs_of(one) <= set().union(*map(layout_matrix.pairs_of, chosen))
    assert len(chosen) < len(layout_matrix.every_case()) / 3
    for key, values in (("overlap", layout_matrix.OVERLAP), ("copies", layout_matrix.COPIES)):
        met = {(one["model"], one[key]) for one in chosen}
        assert met == {(model, value) for model in layout_matrix.MODELS for value in values}


@pytest.mark.slow
@pytest.mark.promise("D5")
def test_a_thread_and_one_copy_per_node_keep_the_bits_of_polling_and_of_a_copy_per_rank() -> None:
    cases = [layout_matrix.case("mlp", 2, 64 << 10, overlap, copies)
             for overlap, copies in (("polled", "rank"), ("thread", "rank"), ("left alone", "node"))]
    done = layout_matrix.run([*cases, layout_matrix.case("mlp", 1, 64 << 10, "polled", "rank")], steps=6)
    assert len(done) == 4 and len({one["hash"] for one in done}) == 1, done


@pytest.mark.promise("B8")
def test_a_run_continued_on_other_ranks_ends_with_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Also its metrics lines, to the last digit."""
    config = write(tmp_path)
    assert train(1, config, *LAYOUT, "train.steps=30", "train.eval_every=10", "run.out=one").rc == 0
    assert train(2, config, *LAYOUT, "train.steps=20", "train.eval_every=10", "run.out=two").rc == 0
    again = train(3, config, *LAYOUT, "train.steps=30", "train.eval_every=10", "run.out=two", "--resume")
    assert again.rc == 0 and "numerics" not in again.out, again.err
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    assert one["parameters_sha256"] == two["parameters_sha256"]
    assert without_times(lines(tmp_path / "one")) == without_times(lines(tmp_path / "two"))
    assert one["numerics"] == two["numerics"] and one["numerics"]["micro_batches"] == "6"
    assert one["numerics"]["blas_threads"] == "1" and one["threads"] == 1


@pytest.mark.slow
@pytest.mark.promise("B9")
def test_what_changed_since_the_checkpoint_is_said_in_one_line_and_training_goes_on(tmp_path: Path) -> None:
    config = write(tmp_path)
    assert train(1, config, *LAYOUT, "train.steps=4", "run.out=a").rc == 0
    again = train(1, config, *LAYOUT, "train.steps=8", "train.micro_batches=3", "run.out=a", "--resume",
                  "--change", "train.micro_batches")
    said = [line for line in again.out.splitlines() if "numerics" in line]
    assert again.rc == 0 and len(said) == 1 and 'micro_batches was "6", is "3"' in said[0]
    assert train(1, config, "train.steps=4", "run.out=b").rc == 0
    again = train(1, config, *LAYOUT, "train.steps=8", "run.out=b", "--resume")
    assert again.rc == 0 and again.out.count('was not written with train.reproducible = "layout"') == 1
    again = train(2, config, "train.steps=12", "run.out=b", "--resume")
    assert again.rc == 0 and again.out.count('was written with train.reproducible = "layout", and the run goes on without it: '
                                             "from here on the bits depend on its ranks") == 1
    assert "gradients were summed" not in again.out


@pytest.mark.promise("A8")
def test_ranks_of_different_numerics_do_not_start(tmp_path: Path) -> None:
    config = write(tmp_path)
    program = ("import os\n"
               "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.environ['MKL_CBWR'] = 'AVX2'\n"
               "import runpy; runpy.run_module('mpitrain', run_name='__main__', alter_sys=True)")
    result = mpirun(2, "-c", program, "train", config, *LAYOUT, cwd=tmp_path)
    assert result.rc == 76 and len(result.error_lines) == 1
    assert 'needs the same numerics on all ranks, but "settings" differs: "' in result.error_lines[0]
    assert 'MKL_CBWR=AVX2" on rank 1' in result.error_lines[0]


@pytest.mark.parametrize("arguments, message", [
    (["train.micro_batches=0"], "needs train.micro_batches: each micro-batch is computed by itself"),
    (["comm.algorithm=ring"], 'found comm.algorithm = "ring"; leave comm.algorithm = "auto"'),
    (["train.threads=2"], "needs one BLAS thread a rank, found train.threads = 2; set it to 0 or 1"),
    (["train.micro_batches=1"], "2 data-parallel ranks share 1 micro-batches"),
])
@pytest.mark.promise("D9")
def test_what_cannot_be_had_is_refused_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = train(2, write(tmp_path), *LAYOUT, *arguments)
    assert result.rc == 78 and len(result.error_lines) == 1 and message in result.error_lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.promise("D9")
def test_more_blas_threads_than_one_are_refused() -> None:
    from threadpoolctl import threadpool_limits
    with threadpool_limits(2), pytest.raises(ConfigError, match=r"one BLAS thread a rank, found 2; call .*threads.pin\(1\)"):
        fingerprint.refuse_threads()
    with threadpool_limits(1):
        fingerprint.refuse_threads()


class Ranks:
    """A communicator on which the others' values are known beforehand."""

    def __init__(self, *others: object):
        self.others = others

    def gather_objects(self, value: object) -> list[object]:
        return json.loads(json.dumps([value, *self.others]))


def test_numerics_tell_cpu_libraries_compilers_and_agree_with_themselves() -> None:
    found = fingerprint.numerics()
    assert found == fingerprint.numerics() and all(isinstance(value, str) for value in found.values())
    assert found["numpy"] == np.__version__ and ("openblas" in found["blas"] or "mkl" in found["blas"])
    assert found["native_product"].startswith(("compiled ", "not compiled: "))
    fingerprint.agree(found, "a", Ranks(["b", found]))
    assert fingerprint.changes(found, found) == ""


def test_of_long_texts_only_the_words_that_differ_are_named() -> None:
    one = {"cpu_features": "avx avx2 fma " + " ".join(f"avx512x{i}" for i in range(20))}
    two = {"cpu_features": one["cpu_features"].replace("avx512x3 ", "") + " amx"}
    with pytest.raises(DesyncError, match=r'"cpu_features" differs: "avx512x3" on rank 0 \(a\), "amx" on rank 2 \(c\)') as caught:
        fingerprint.agree(one, "a", Ranks(["b", one], ["c", two]))
    assert caught.value.exit_code == 76
    assert 'cpu_features was "amx", is "avx512x3"' in fingerprint.changes(two, one)
    assert "was not written" in fingerprint.changes(None, one)
    assert "goes on without it" in fingerprint.changes(one, None) and fingerprint.changes(None, None) == ""
