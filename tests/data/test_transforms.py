"""Scaling and standardising learn from the training rows only; augmentation depends on the sample, not on its company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_inputs import features

from mpitrain.data import TRANSFORMS, Dataset, Transforms, augmentations, describe, split, write_shards
from mpitrain.data.keyed import sample_keys
from mpitrain.errors import CheckpointError, ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_parser")


def make(tmp_path: Path, x: np.ndarray) -> Dataset:
    return Dataset(describe(write_shards(tmp_path / "out", x, np.arange(len(x)), kind="classification")))


def test_standardise_uses_the_training_rows_alone_and_matches_numpy(tmp_path: Path) -> None:
    x = (features(10_000, 7) + np.arange(7) * 1000).astype("f4")
    x[:, 3] = 5.1                                     # never changes
    dataset = make(tmp_path, x)
    training, _ = split(len(x), 0.3)
    transforms = Transforms("standardise")
    transforms.fit(dataset, training)
    rows = x[training].astype(np.float64)
    state = transforms.state_dict()
    assert np.allclose(state["0.standardise.mean"], rows.mean(0), rtol=1e-12)
    expected = rows.std(0)
    expected[3] = 1.0
    assert np.allclose(state["0.standardise.deviation"], expected, rtol=1e-11)
    out = transforms(x[:50])
    assert out.dtype == np.float32 and np.allclose(out, (x[:50] - rows.mean(0)) / expected, atol=1e-5)


def test_images_are_standardised_per_channel(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (300, 3, 4, 5)).astype("u1")
    transforms = Transforms("standardise")
    transforms.fit(make(tmp_path, x), range(300))
    assert transforms.state_dict()["0.standardise.mean"].shape == (3, 1, 1)
    out = transforms(x)
    assert np.allclose(out.mean((0, 2, 3)), 0, atol=1e-5) and np.allclose(out.std((0, 2, 3)), 1, atol=1e-5)


@pytest.mark.parametrize(("dtype", "largest", "out"), [("u1", 16, "f4"), ("u1", 255, "f4"), ("f8", 3.5, "f8"), ("i2", 0, "f4")])
def test_scale_divides_by_the_largest_magnitude(tmp_path: Path, dtype: str, largest: float, out: str) -> None:
    x = np.zeros((20, 3), dtype)
    x[7, 1] = largest
    transforms = Transforms(["scale"])
    transforms.fit(make(tmp_path, x), range(20))
    assert np.allclose(transforms(x), x / (largest or 1)) and transforms(x).dtype == np.dtype(out)


def test_state_goes_through_a_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    x = features(500, 4)
    dataset = make(tmp_path, x)
    fitted, fresh = Transforms(["scale", "standardise"]), Transforms(["scale", "standardise"])
    fitted.fit(dataset, range(400))
    fresh.load_state_dict({k: v.copy() for k, v in fitted.state_dict().items()})
    assert np.array_equal(fitted(x), fresh(x)) and abs(fresh(x[:400]).mean()) < 1e-5


def test_a_checkpoint_of_other_transforms_is_refused(tmp_path: Path) -> None:
    dataset = make(tmp_path, features(50, 4))
    fitted = Transforms("standardise")
    fitted.fit(dataset, range(50))
    with pytest.raises(CheckpointError, match=r"are not those of this run \(none\)"):
        Transforms().load_state_dict(fitted.state_dict())
    with pytest.raises(CheckpointError, match='no "largest" for the transform scale'):
        Transforms("scale").load_state_dict({})
    other = Transforms("standardise")
    other.fit(make(tmp_path / "b", features(50, 3)), range(50))
    with pytest.raises(CheckpointError, match=r"has shape \(4,\) in the checkpoint, but the data needs \(3,\)"):
        other.load_state_dict(fitted.state_dict())


def test_nan_in_the_training_rows_is_found_while_fitting(tmp_path: Path) -> None:
    x = features(50, 4)
    x[31, 2] = np.nan
    with pytest.raises(DataError, match="value 2 of this row is nan") as caught:
        Transforms("standardise").fit(make(tmp_path, x), range(50))
    assert caught.value.row == 31


def test_a_users_own_function_and_class_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\nfrom mpitrain.data import Transform\n"
        "def double(x):\n    return 2 * x\n"
        "def shift(x, keys):\n    return x + (keys % 5)[:, None].astype(x.dtype)\n"
        "class Centre(Transform):\n"
        "    def fit(self, blocks):\n        self.m = np.asarray(sum(b.sum() for b in blocks()))\n"
        "    def __call__(self, x):\n        return x - self.m\n"
        "    def state_dict(self):\n        return {'m': self.m}\n"
        "constant = 3\n")
    dataset = make(tmp_path, np.ones((6, 2), "f4"))
    transforms = Transforms(["own.py:double", "own.py:Centre"], tmp_path)
    transforms.fit(dataset, range(6))
    assert np.array_equal(transforms(np.ones((1, 2), "f4")), np.full((1, 2), 2 - 24))
    assert list(transforms.state_dict()) == ["1.own.py:Centre.m"]
    (shift,) = augmentations("own.py:shift", tmp_path)
    assert shift(np.zeros((1, 2)), np.array([7], np.uint64)).tolist() == [[2, 2]]
    for make_it in (Transforms, augmentations):
        with pytest.raises(ConfigError, match='"own.py:constant" is a int; expected a function'):
            make_it("own.py:constant", tmp_path)
    with pytest.raises(ConfigError, match=r'unknown transform "standardize" \(did you mean "standardise"\?\)'):
        Transforms("standardize")
    with pytest.raises(ConfigError, match="unknown augmentation"):
        augmentations("blur")


@pytest.mark.parametrize("name", ["flip", "crop"])
def test_an_augmentation_gives_a_sample_the_same_look_in_any_company(name: str) -> None:
    x = features(64, 3, 16, 24)
    keys = sample_keys(11, np.arange(64) * 7)
    (augment,) = augmentations(name)
    whole = augment(x, keys)
    assert whole.dtype == x.dtype and whole.shape == x.shape
    order = np.random.default_rng(2).permutation(64)
    for part in np.split(order, [1, 10, 33]):
        assert np.array_equal(augment(x[part], keys[part]), whole[part])
    assert not np.array_equal(augment(x, sample_keys(12, np.arange(64) * 7)), whole)
    with pytest.raises(ConfigError, match=rf'"{name}" needs images .* a row has shape \(5,\)'):
        augment(np.zeros((2, 5)), keys[:2])


def test_flip_mirrors_about_half_of_the_images() -> None:
    x = features(1000, 1, 2, 5)
    out = augmentations("flip")[0](x, sample_keys(1, np.arange(1000)))
    mirrored = (out == x[..., ::-1]).all((1, 2, 3))
    assert ((out == x).all((1, 2, 3)) ^ mirrored).all() and 430 < mirrored.sum() < 570


def test_crop_shifts_by_up_to_an_eighth_and_fills_with_zeros() -> None:
    x = 1 + np.arange(16 * 16, dtype="f4").reshape(1, 1, 16, 16).repeat(400, 0)
    out = augmentations("crop")[0](x, sample_keys(1, np.arange(400)))
    seen = set()
    for image in out[:, 0]:
        found = [(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)
                 if np.array_equal(image, np.pad(x[0, 0], 2)[2 + dy:18 + dy, 2 + dx:18 + dx])]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 25


def test_standardising_large_integers_keeps_their_differences() -> None:
    values = 1_500_000_000 + np.arange(-10, 11, dtype=np.int64)[:, None]
    transform = TRANSFORMS["standardise"]()
    transform.fit(lambda: iter([values]))
    expected = (values - values.mean()) / values.std()
    np.testing.assert_allclose(transform(values), expected, rtol=1e-6)
