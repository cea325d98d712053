"""Metrics against scikit-learn, of any chunks of the rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.metrics import About, Seen, find_metrics, judged, refuse_metrics

sk: Any = pytest.importorskip("sklearn.metrics", reason="scikit-learn cannot be imported: make test installs it",
                              exc_type=ImportError)
NEAR = {"rel": 1e-12, "abs": 1e-14}


def measured(entry: Any, outputs: Any, targets: Any, kind: str, *, cut: int = 37, outputs_are: str = "logits",
             ignore: int | None = None) -> Any:
    """The metric of chunks of `cut` rows, put together as ranks do."""
    metric, = find_metrics([entry])
    parts = [np.asarray(metric.part(Seen(outputs[i:i + cut], targets[i:i + cut], kind, outputs_are, ignore)))
             for i in range(0, len(outputs), cut)]
    if metric.adds == "rows":
        return metric.value(np.concatenate(parts))
    return metric.value(sum(parts) if metric.adds == "counts" else np.stack(parts).astype(np.float64))


def numbers(shape: tuple[int, ...], offset: float = 0.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    targets = rng.normal(size=shape) + offset
    return (targets + 0.3 * rng.normal(size=shape)).astype(np.float32), targets


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("shape", [(301,), (301, 3)])
def test_metrics_of_numbers_are_scikit_learns(shape: tuple[int, ...], offset: float) -> None:
    p, y = numbers(shape, offset)
    out = p.astype(np.float64)
    for name, expected in (("mae", sk.mean_absolute_error(y, out)), ("mse", sk.mean_squared_error(y, out)),
                           ("rmse", np.sqrt(sk.mean_squared_error(y, out))), ("r2", sk.r2_score(y, out)),
                           ({"name": "r2", "outputs": "variance"}, sk.r2_score(y, out, multioutput="variance_weighted"))):
        assert measured(name, p, y, "values") == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("value", [0.1, 1 / 3, 123.456])
@pytest.mark.parametrize("rows", [10, 14, 29])
def test_r2_of_targets_that_never_change_is_0_whatever_their_mean_rounds_to(value: float, rows: int) -> None:
    y = np.full((rows, 1), value)
    assert measured("r2", y + 1, y, "values") == 0.0


def test_r2_of_targets_that_never_change_is_as_scikit_learns() -> None:
    y = np.ones((50, 2))
    p = y.copy()
    p[3, 1] = 2.0
    assert measured("r2", p, y, "values") == sk.r2_score(y, p) == 0.5


def test_the_relative_norm_is_the_mean_over_rows() -> None:
    p, y = numbers((40, 5, 6))
    gap = np.linalg.norm((p - y).reshape(40, -1), axis=1) / np.linalg.norm(y.reshape(40, -1), axis=1)
    assert measured("relative_l2", p, y, "values") == pytest.approx(gap.mean(), **NEAR)


def classes(n: int, c: int, *, ties: bool = False) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(c)
    z = rng.normal(size=(n, c)).astype(np.float32)
    if ties:
        z = np.round(z * 2).astype(np.float32)
    labels = np.where(rng.random(n) < 0.6, z.argmax(axis=1), rng.integers(0, c, n))
    e = np.exp(z.astype(np.float64) - z.max(axis=1, keepdims=True))
    return z, labels, e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("c", [2, 5])
def test_metrics_of_classes_are_scikit_learns(c: int) -> None:
    z, y, p = classes(407, c)
    got = z.argmax(axis=1)
    expected = {"accuracy": sk.accuracy_score(y, got), "balanced_accuracy": sk.balanced_accuracy_score(y, got),
                "log_loss": sk.log_loss(y, p), "perplexity": np.exp(sk.log_loss(y, p))}
    for name, value in expected.items():
        assert measured(name, z, y, "classes") == pytest.approx(value, **NEAR), name
    for average in ("macro", "micro", "weighted", *(["binary"] if c == 2 else [])):
        for name, function in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score)):
            found = measured({"name": name, "average": average}, z, y, "classes")
            assert found == pytest.approx(function(y, got, average=average), **NEAR), (name, average)
    assert measured("confusion", z, y, "classes") == sk.confusion_matrix(y, got).tolist()
    shares = measured({"name": "confusion", "normalise": True}, z, y, "classes")
    assert np.array(shares) == pytest.approx(sk.confusion_matrix(y, got, normalize="true"))


def test_a_class_that_nobody_has_is_not_averaged_and_no_row_divided_by_is_0() -> None:
    z, y, _ = classes(100, 5)
    z[:, 3], y = -9.0, np.where(y == 3, 1, y)
    z[:, 4] = -9.0                                            # Class 4 has labels, and is never predicted.
    got = z.argmax(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in (("precision", sk.precision_score), ("f1", sk.f1_score)):
            assert measured(name, z, y, "classes") == pytest.approx(function(y, got, average="macro"), **NEAR)
        assert measured("balanced_accuracy", z, y, "classes") == pytest.approx(sk.balanced_accuracy_score(y, got), **NEAR)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_breaks_ties_as_scikit_learn(k: int) -> None:
    z, y, _ = classes(300, 5, ties=True)
    assert measured({"name": "top_k", "k": k}, z, y, "classes") == sk.top_k_accuracy_score(y, z, k=k, labels=range(5))


def test_outputs_that_are_no_numbers_find_nothing() -> None:
    z, y, _ = classes(40, 5)
    z[:10], z[10:20, 2] = np.nan, np.nan
    kept = measured({"name": "top_k", "k": 3}, z[20:], y[20:], "classes")
    assert measured({"name": "top_k", "k": 3}, z, y, "classes") == kept / 2 > 0


@pytest.mark.parametrize("ties", [False, True])
def test_the_area_of_two_classes_counts_ties_as_halves(ties: bool) -> None:
    z, y, _ = classes(300, 2, ties=ties)
    score = z[:, 1].astype(float) - z[:, 0]
    assert measured("auc", z, y, "classes") == pytest.approx(sk.roc_auc_score(y, score), **NEAR)
    assert measured("average_precision", z, y, "classes") == pytest.approx(sk.average_precision_score(y, score), **NEAR)


def test_the_area_of_more_classes_is_the_mean_of_each_against_the_others() -> None:
    z, y, p = classes(300, 5)
    assert measured("auc", z, y, "classes") == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"), **NEAR)
    one_hot = np.eye(5)[y]
    assert measured("average_precision", z, y, "classes") == pytest.approx(sk.average_precision_score(one_hot, p), **NEAR)


def test_binary_targets_may_be_several_of_a_row() -> None:
    rng = np.random.default_rng(7)
    z = rng.normal(size=(200, 3)).astype(np.float32)
    y = (z + rng.normal(size=z.shape) > 0.2).astype(np.float32)
    p = 1 / (1 + np.exp(-z.astype(np.float64)))
    assert measured("auc", z, y, "binary") == pytest.approx(sk.roc_auc_score(y, z), **NEAR)
    assert measured("log_loss", z, y, "binary") == pytest.approx(sk.log_loss(y.ravel(), p.ravel()), **NEAR)
    assert measured("f1", p, y, "binary", outputs_are="probabilities") == pytest.approx(
        sk.f1_score(y.ravel(), p.ravel() > 0.5), **NEAR)
    assert measured("accuracy", z[:, :1], y[:, 0], "binary") == sk.accuracy_score(y[:, 0], z[:, 0] > 0)


def test_labels_left_out_and_of_several_dims_count_as_for_the_accuracy() -> None:
    rng = np.random.default_rng(8)
    z, y = rng.normal(size=(30, 4, 3)).astype(np.float32), rng.integers(0, 3, (30, 4))
    y[rng.random(y.shape) < 0.3] = -1
    kept = y.ravel() >= 0
    got, true = z.reshape(-1, 3).argmax(axis=1)[kept], y.ravel()[kept]
    assert measured("f1", z, y, "classes", ignore=-1) == pytest.approx(sk.f1_score(true, got, average="macro"), **NEAR)
    assert measured("confusion", z, y, "classes", ignore=-1) == sk.confusion_matrix(true, got).tolist()


def test_probabilities_of_0_and_1_cost_nothing_where_they_are_right() -> None:
    p, y = np.array([[0.0], [1.0]]), np.array([0.0, 1.0])
    assert measured("log_loss", p, y, "binary", outputs_are="probabilities") == 0.0


@pytest.mark.parametrize("entry, words", [
    ("acuracy", ['unknown metric "acuracy"', "accuracy"]), ({"k": 3}, ["a table is a name"]),
    ({"name": "top_k", "n": 3}, ["no train.metrics.n"]), ({"name": "f1", "average": "mean"}, ["an average is one of"]),
    ({"name": "top_k", "k": 0}, ["1 or more"]),
    ({"name": "f1", "label": "step"}, ['"step" is in results by itself', "another label"]),
    ({"name": "confusion", "label": "accuracy"}, ['"accuracy" is in results by itself']), ("loss", ["unknown metric"])])
def test_what_is_no_metric_is_refused(entry: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        find_metrics([entry])
    assert all(word in str(error.value) for word in words), error.value


def test_two_metrics_of_one_name_are_refused_and_labels_keep_them_apart() -> None:
    with pytest.raises(ConfigError, match="give one of them a label"):
        find_metrics(["mae", "mae"])
    found = find_metrics([{"name": "f1", "average": "macro"}, {"name": "f1", "average": "micro"}, {"name": "f1", "label": "own"}])
    assert [metric.label for metric in found] == ["f1_macro", "f1_micro", "own"]


def about(kind: str = "classes", n: int | None = 3, shape: tuple[int, ...] = (3,), **more: Any) -> About:
    return About(kind, more.pop("outputs_are", "logits"), n, shape, more.pop("rows", 10), more.pop("counts", None))


@pytest.mark.parametrize("entry, outputs, words", [
    ("mae", about(), "labels of classes"), ("f1", about("values", None), "numbers"),
    ({"name": "top_k", "k": 5}, about(), "k = 5"), ({"name": "f1", "average": "binary"}, about(), "3 classes"),
    ("log_loss", about(outputs_are="scores"), "scores"),
    ("auc", about(rows=10 ** 9), "MiB"),
    ("auc", about(counts=np.array([[5, 0, 5]])), "no row of class 1"),
    ("auc", about("binary", None, (2,), counts=np.array([[5, 5], [0, 10]])), "in column 1 only one class, none of class 0")])
def test_a_metric_that_is_not_defined_is_refused(entry: Any, outputs: About, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        refuse_metrics(find_metrics([entry]), outputs)
    assert words in str(error.value)


def test_which_values_are_better_is_said_by_the_metric() -> None:
    metrics = find_metrics(["f1", "mae", "confusion"])
    assert judged("stop.metric", "f1", metrics, "classes") == ("f1", True)
    assert judged("stop.metric", "mae", metrics, "values") == ("mae", False)
    assert judged("stop.metric", "mae", metrics, "values", mode="max") == ("mae", True)
    for wrong in ("confusion", "r2", "accuracy"):
        with pytest.raises(ConfigError, match="is no metric of an evaluation"):
            judged("stop.metric", wrong, metrics, "values")
