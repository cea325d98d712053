"""Tensors read from ONNX files: ours come back, PyTorch's come in under the names of a state_dict, hostile ones are refused."""

from __future__ import annotations

import random
import resource
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ConfigError, DataError, MissingError, MpitrainError, OtherModelError
from mpitrain.interchange import bring_in, onnx_file
from mpitrain.interchange.exporting import Wanted, export

onnx = pytest.importorskip("onnx", reason="needs onnx (pip install mpitrain[onnx])")
from saved_models import fresh, outputs  # noqa: E402

GPT = {"layers": 2, "heads": 4, "width": 32, "block": 12, "vocabulary": 19}
SHAPES: dict[str, tuple[int, ...]] = {"resnet20": (3, 16, 16)}


@pytest.mark.parametrize(("name", "keys"), [
    ("mlp", {"inputs": 12, "hidden": [8], "outputs": 3}), ("lenet", {"widths": [3, 5, 9, 7]}), ("resnet20", {}),
    ("gpt", {**GPT, "bias": True, "activation": "gelu_tanh"}), ("gpt", {**GPT, "tied": False})])
def test_our_graph_comes_back_with_its_bits(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    saved = fresh(name, **keys)
    export(saved, Wanted(tmp_path / "m.onnx", shape=SHAPES.get(name, ()), cache=name == "gpt"), lambda _: None)
    (tmp_path / "m.onnx").rename(tmp_path / "named otherwise")                  # then its first byte says the format
    back = bring_in(tmp_path / "named otherwise", tmp_path / "run", tell=lambda _: None)
    assert back.hashes() == saved.hashes() and back.step == 7 and back.config.model.arguments == saved.config.model.arguments


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_tensors_in_a_file_beside_the_graph_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    saved = fresh("mlp", kind, inputs=40, hidden=[30], outputs=3)
    monkeypatch.setattr("mpitrain.interchange.onnx_writer.EXTERNAL", 0)
    export(saved, Wanted(tmp_path / "m.onnx"), lambda _: None)
    assert bring_in(tmp_path / "m.onnx", tmp_path / "run", tell=lambda _: None).hashes() == saved.hashes()
    (tmp_path / "m.onnx.data").write_bytes((tmp_path / "m.onnx.data").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"ends at byte [0-9]+ of .m.onnx.data., which has [0-9]+: it is cut off"):
        onnx_file.read(tmp_path / "m.onnx")
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(MissingError, match="m.onnx.data"):
        onnx_file.read(tmp_path / "m.onnx")


def exported(model: Any, path: Path, *inputs: Any, **more: Any) -> Path:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, str(path), dynamo=False, **more)
    return path


@pytest.mark.parametrize(("names", "keys"), [
    ("nanogpt", {"bias": False}), pytest.param("nanogpt", {"bias": True}, marks=pytest.mark.slow),
    pytest.param("gpt2", {}, marks=pytest.mark.slow)])
def test_a_gpt_that_pytorch_exported_comes_in(tmp_path: Path, names: str, keys: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from torch_models import HuggingFaceGPT2, NanoGPT, randomise
    theirs = randomise((NanoGPT if names == "nanogpt" else HuggingFaceGPT2)(**GPT, **keys)).eval()
    tokens = torch.arange(10)[None] % 19
    path = exported(theirs, tmp_path / "m.onnx", tokens, input_names=["x"], dynamic_axes={"x": {1: "length"}})
    saved = bring_in(path, tmp_path / "run", names=names, overrides=["model.heads=4"], tell=lambda _: None)
    wanted = theirs(tokens).detach().numpy()
    assert np.abs(outputs(saved, tokens.numpy()) - wanted).max() <= 1e-5 * np.abs(wanted).max()
    path = exported(theirs, tmp_path / "m.onnx", tokens)
    with pytest.raises(ConfigError, match="export it with dynamic_axes"):
        bring_in(path, tmp_path / "run2", names=names, overrides=["model.heads=4"], tell=lambda _: None)


@pytest.mark.slow
def test_norms_that_an_exporter_has_folded_are_said(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch_models import ResNet, randomise
    theirs, images = randomise(ResNet([2, 2, 2, 2], classes=3)).eval(), torch.zeros(1, 3, 32, 32)
    with pytest.raises(DataError, match="folded norms into convolutions.*TrainingMode.PRESERVE"):
        bring_in(exported(theirs, tmp_path / "m.onnx", images), tmp_path / "run", names="torchvision", tell=lambda _: None)
    path = exported(theirs, tmp_path / "m.onnx", images, do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE)
    saved = bring_in(path, tmp_path / "run", names="torchvision", tell=lambda _: None)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype("f4")
    wanted = theirs(torch.from_numpy(x)).detach().numpy()
    assert np.abs(outputs(saved, x) - wanted).max() <= 1e-5 * np.abs(wanted).max()


def written(path: Path, *tensors: Any, change: Callable[[Any], object] = lambda _: None) -> Path:
    graph = onnx.helper.make_graph([], "g", [], [], tensors)
    change(graph)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


def tensor(name: str = "a.weight", kind: int = 1, dims: tuple[int, ...] = (2,), raw: bytes | None = bytes(8),
           **external: str) -> Any:
    made = onnx.TensorProto(name=name, data_type=kind, dims=dims)
    if raw is not None:
        made.raw_data = raw
    for key, value in external.items():
        made.data_location = 1
        made.external_data.add(key=key, value=value)
    return made


def test_numbers_are_read_from_every_field(tmp_path: Path) -> None:
    for kind, name in onnx_file.DTYPES.items():
        if name != "bfloat16":
            array = np.array([[0, 1, 1], [1, 0, 1]], name)
            made = onnx.helper.make_tensor("a.weight", kind, array.shape, array.ravel().tolist())
            for one in (made, onnx.numpy_helper.from_array(array, "a.weight")):
                found = onnx_file.read(written(tmp_path / "x", one)).tensors["a.weight"]
                assert found.dtype == name and found.values().tobytes() == array.tobytes()
    half = onnx.helper.make_tensor("a.weight", 16, (2,), [1.5, -2.0])
    assert onnx_file.read(written(tmp_path / "x", half)).tensors["a.weight"].values().tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("tensors", "said"), [
    ([], "no initialiser"), ([tensor("onnx::Add_3")], "no initialiser"), ([tensor()] * 2, "initialisers have one name"),
    ([tensor(kind=8)], "data type 8"), ([tensor(kind=99)], "data type 99"), ([tensor(dims=(3,))], "takes 12 bytes, and has 8"),
    ([tensor(dims=(1 << 40, 1 << 40))], "takes more than 2^63 bytes"), ([tensor(dims=(-1,))], "has the shape (-1,)"),
    ([tensor(dims=(1,) * 33)], "has the shape"), ([tensor(raw=None)], "takes 8 bytes, and has 0"),
    ([onnx.TensorProto(name="a.weight", data_type=3, dims=[1], int32_data=[300])], "numbers that int8 has not"),
    ([tensor("a\n\x1b", kind=99)], r'"a\n\x1b" has the data type'),
    ([tensor("a.nbits", dims=(2,))], "expected uint8 (outputs, groups, 16)"),
    ([tensor("onnx::Conv_3")], "folded norms into convolutions"),
    ([tensor(raw=None, location="../secret")], "not in the file's folder"),
    ([tensor(raw=None, location="/etc/passwd")], "not in the file's folder"),
    ([tensor(raw=None, location="link")], "not in the file's folder"),
    ([tensor(raw=None, location="in/../../secret")], "not in the file's folder"),
    ([tensor(raw=None, location="")], "not in the file's folder"), ([tensor(raw=None, location=".")], "not in the file's folder"),
    ([tensor(dims=(0, 1 << 62, 1 << 62), raw=b"")], "which no array has"),
    ([tensor(raw=None, location="a\n\x1bb")], "not in the file's folder"),
    ([tensor(raw=None, location="a\0b")], "not in the file's folder"), ([tensor(raw=None, location="in")], "no regular file"),
    ([tensor(raw=None, location="data", offset="-8")], "expected whole numbers"),
    ([tensor(raw=None, location="data", offset="9" * 30)], "expected whole numbers"),
    ([tensor(raw=None, location="data", length="4")], "takes 8 bytes, and has 4"),
    ([tensor(raw=None, location="data", offset="8")], "cut off"),
    ([tensor(raw=None, location="x" * 300)], "File name too long")])
def test_what_does_not_fit_is_refused_in_a_line(tmp_path: Path, tensors: list[Any], said: str) -> None:
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    for place in (tmp_path / "secret", folder / "data"):
        place.write_bytes(bytes(8))
    (folder / "link").symlink_to("../secret")
    with pytest.raises(MpitrainError) as caught:
        onnx_file.read(written(folder / "x.onnx", *tensors))
    assert said in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_files_of_something_else_are_refused_in_a_line(tmp_path: Path) -> None:
    good = written(tmp_path / "x", tensor()).read_bytes()
    for data in (b"junk" * 9, good[:-3], b"\x08" * 50, good.replace(b"a.weight", b"\xff.weight")):
        (tmp_path / "x.onnx").write_bytes(data)
        with pytest.raises(DataError, match="damaged, or no ONNX graph|no initialiser"):
            onnx_file.read(tmp_path / "x.onnx")
    for text in ("{", "[[1], [1, 2]]", '"a"', "[" * 100_000, "{}"):
        model = onnx.ModelProto.FromString(good)
        model.metadata_props.add(key="data/mean", value=text)
        (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(DataError, match="data/mean.* is not what export writes"):
            onnx_file.read(tmp_path / "x.onnx")
    written(tmp_path / "x.onnx", tensor(), change=lambda graph: graph.sparse_initializer.add())
    with pytest.raises(DataError, match="sparse initialisers"):
        onnx_file.read(tmp_path / "x.onnx")
    with pytest.raises(OtherModelError, match=r"which the file has not \(did you mean"):
        bring_in(written(tmp_path / "x.onnx", tensor("head.weigth", dims=(1, 2))), tmp_path / "run", names="pytorch",
                 overrides=["model.name=mlp", "model.inputs=2", "model.hidden=[]", "model.outputs=1"], tell=lambda _: None)


@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_mutant_is_refused_in_a_line_or_read_whole(tmp_path: Path, count: int) -> None:
    """Mutants of a small graph with tensors inside and beside it: no other exception, no crash, and not 64 MiB more memory."""
    rng = random.Random(3)
    (tmp_path / "data").write_bytes(bytes(64))
    numbers = onnx.helper.make_tensor("b.bias", 3, (4,), [1, 2, 3, 4])
    nodes = [onnx.helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/a/MatMul")]
    outside = tensor("c.weight", raw=None, location="data", offset="8", length="8")
    whole = written(tmp_path / "x.onnx", tensor("d"), numbers, outside, tensor("onnx::MatMul_1", dims=(1, 2)),
                    change=lambda graph: graph.node.extend(nodes)).read_bytes()
    onnx_file.read(tmp_path / "x.onnx")
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(count):
        (tmp_path / "x.onnx").write_bytes(mutant(whole, rng))
        try:
            for stored in onnx_file.read(tmp_path / "x.onnx").tensors.values():
                zlib.crc32(np.ascontiguousarray(stored.values()))
        except MpitrainError as error:
            assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1000
            refused += 1
    assert refused > 0.3 * count and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def mutant(whole: bytes, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 6))):
        place, kind = rng.randrange(len(data)), rng.randrange(4)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place:place + 1] = rng.choice((b"\xff" * 9 + b"\x01", bytes([rng.randrange(256)]), b"\xff\xff\xff\xff\x07"))
        elif kind == 2:
            data[place:place] = data[place:place + rng.randrange(1, 60)]
        else:
            del data[place:place + rng.randrange(1, 30)]
        data = data or bytearray(b".")
    return bytes(data)
