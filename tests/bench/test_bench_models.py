"""`mpitrain bench models`: what it writes of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import mpirun

from mpitrain.bench.models import Run, known, samples, usual
from mpitrain.cli import main
from mpitrain.comm.job import signals
from mpitrain.errors import UsageError
from mpitrain.models import MODELS
from mpitrain.plan.flops import count


def test_each_model_is_one_object_and_one_line(tmp_path: Path) -> None:
    result = mpirun(1, "-m", "mpitrain", "bench", "models", "--models", "lenet,resnet20", "--size", "16", "--batch", "2",
                    "--steps", "2", "--json", "r.json", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.rc == 0 and result.error_lines == [], result.err
    lenet, resnet = (json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines())
    products = 16 * 16 * 25 * 6 + 4 * 4 * 25 * 6 * 16 + 2 * 2 * 16 * 120 + 120 * 84 + 84 * 10
    assert (lenet["model"], lenet["shape"], lenet["multiply_adds"]) == ("lenet", [1, 16, 16], products)
    assert lenet["parameters"] * 4 == lenet["bytes"] and resnet["parameters"] == 269_722
    for found in (lenet, resnet):
        assert found["forward_seconds"] > 0
        assert 0 < found["step_seconds_low"] <= found["step_seconds"] <= found["step_seconds_high"]
        assert found["step_flops_a_second"] == pytest.approx(6 * found["multiply_adds"] * 2 / found["step_seconds"])
        assert found["kept_bytes_a_sample"] is None or found["kept_bytes_a_sample"] > 4 * 256
        assert found["step_joules"] is None or found["step_joules"] >= 0
    lines = result.out.splitlines()
    assert len(lines) == 6 and lines[2].startswith("joules are ")
    assert lines[4].startswith("lenet ") and lines[5].startswith("resnet20 ")


@pytest.mark.parametrize(("words", "said"), [
    (("--models", "resnet19"), '--models knows no "resnet19"'),
    (("--models", "mlp", "--size", "24"), "--size is of images, and mlp takes samples of shape (784,)"),
    (("--batch", "0"), "--batch must be at least 1, found 0"), (("--precision", "float16"), '--precision knows no "float16"')])
def test_what_cannot_be_measured_is_refused_before_mpi_is_started(words: tuple[str, ...], said: str,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ignore", lambda: None)      # SIGUSR1, in this process and in all that later tests start
    with pytest.raises(UsageError) as caught:
        main(["bench", "models", *words])
    assert said in caught.value.message


def test_models_with_defaults_are_known_and_take_images_unless_said_otherwise() -> None:
    assert {"lenet", "resnet18", "vgg16", "mlp", "gpt"} <= set(known()) <= set(MODELS)
    assert usual("resnet18", None).shape == (3, 224, 224) and usual("resnet18", 64).shape == (3, 64, 64)
    assert usual("lenet", 20).arguments == {"size": 20}
    with pytest.raises(UsageError, match="leave --size out"):
        usual("gpt", 32)


LARGE = ("gpt2_large", "gpt2_xl")                  # whose blocks are those of gpt2, 36 and 48 times


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in known()])
def test_the_usual_sample_of_a_model_fits_it(name: str) -> None:
    """Its work is counted: what runs fits, and nothing large is allocated."""
    how = usual(name, None)
    assert count(MODELS[name](**how.arguments), samples(how, 1, "float32")).forward > 0


def test_images_that_leave_one_place_of_each_channel_are_measured() -> None:
    """In training a norm of one sample's one value would be refused; the batch has more."""
    how = usual("resnet18", 32)
    run = Run(MODELS["resnet18"](classes=4, width=4), samples(how, 2, "float32"), "float32")
    run.model.train()
    run.step()
