"""Multiply-adds counted from shapes are those that PyTorch's counter sees, and those of formulas where it has none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mpitrain import models, nn, ops
from mpitrain.autograd import Tensor
from mpitrain.nn.by_name import ByName
from mpitrain.placement.tensor_plan import narrow, read_plan
from mpitrain.plan.flops import count

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch==2.13.0")


def counted_by_torch(module: Any, *x: Any) -> int:
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        module(*x)
    return int(counter.get_total_flops() // 2)


LAYERS = {
    "linear": (lambda n: n.Linear(7, 5, bias=False), (3, 4, 7)),
    "convolution": (lambda n: n.Conv2d(4, 6, (3, 2), stride=2, padding=1), (1, 4, 9, 8)),
    "dilated, no bias": (lambda n: n.Conv2d(4, 6, 3, dilation=2, bias=False), (1, 4, 9, 8)),
    "grouped": (lambda n: n.Conv2d(4, 6, 3, groups=2), (1, 4, 9, 8)),
    "depthwise": (lambda n: n.Conv2d(4, 8, 5, groups=4, padding=2), (1, 4, 9, 8)),
    "of series": (lambda n: n.Conv1d(4, 6, 3, stride=2), (1, 4, 11)),
    "of volumes": (lambda n: n.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), groups=2), (1, 2, 5, 6, 4)),
    "transposed": (lambda n: n.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (1, 4, 5, 6)),
    "transposed series": (lambda n: n.ConvTranspose1d(4, 6, 4, stride=2), (1, 4, 5)),
    "transposed volumes": (lambda n: n.ConvTranspose3d(2, 3, (3, 2, 2), stride=2), (1, 2, 3, 3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_count_of_pytorch_s(name: str) -> None:
    make, shape = LAYERS[name]
    found = count(make(nn), np.zeros(shape, np.float32)).forward
    assert found == counted_by_torch(make(torch.nn), torch.zeros(shape)) > 0


@pytest.mark.parametrize(("x", "y"), [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 1, 3, 4), (5, 4, 6)), ((4,), (4,)),
                                      ((2, 3, 4), (4, 5))])
def test_matrix_products_have_a_multiply_add_for_each_term(x: Any, y: Any) -> None:
    class Product(nn.Module):
        def forward(self, a: Any) -> Any:
            made = ops.matmul(a, np.ones(y, np.float32))
            assert tuple(made.shape) == np.matmul(np.ones(x), np.ones(y)).shape
            return made
    assert count(Product(), np.zeros(x, np.float32)).forward == np.matmul(np.ones(x), np.ones(y)).sum()


def test_contractions_count_terms_and_products_without_a_sum_do_not() -> None:
    class Sums(nn.Module):
        def __init__(self, equation: str):
            self.equation = equation

        def forward(self, a: Any) -> Any:
            return ops.einsum(self.equation, a, np.ones((2, 4, 5), np.float32))
    assert count(Sums("bik,bkj->bij"), np.zeros((2, 3, 4), np.float32)).forward == 2 * 3 * 4 * 5
    assert count(Sums("bki,bkj->bkij"), np.zeros((2, 4, 3), np.float32)).forward == 0


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_count_both_products_of_each_step(kind: str, gates: int) -> None:
    layer = getattr(nn, kind)(5, 7, num_layers=2, bidirectional=True)
    first, second = gates * 7 * (5 + 7), gates * 7 * (14 + 7)
    assert count(layer, np.zeros((1, 6, 5), np.float32)).forward == 6 * 2 * (first + second)


def test_a_projection_of_an_lstm_counts() -> None:
    layer = nn.LSTM(5, 7, proj_size=3)
    assert count(layer, np.zeros((1, 6, 5), np.float32)).forward == 6 * (28 * (5 + 3) + 3 * 7)


def test_attention_counts_scores_and_mixtures_of_all_pairs() -> None:
    layer = nn.MultiHeadAttention(8, 2)
    shape = (1, 5, 8)
    assert count(layer, np.zeros(shape, np.float32)).forward == 4 * 5 * 8 * 8 + 2 * 5 * 5 * 8

    class Masked(nn.Module):
        def forward(self, x: Any) -> Any:
            return ops.scaled_dot_product_attention(x, x[..., :3, :], x[..., :3, :4], np.ones((5, 3), bool))
    assert count(Masked(), np.zeros((1, 2, 5, 8), np.float32)).forward == 2 * 5 * 3 * (8 + 4)


def test_experts_count_what_their_places_take() -> None:
    plain = count(models.gpt(1, 2, 8, 6, 11), np.zeros((1, 6), np.int64))
    mixed = count(models.gpt(1, 2, 8, 6, 11, experts=2, top_k=1, capacity=1.0), np.zeros((1, 6), np.int64))
    assert mixed.by_function["ExpertLinear"] == 6 * 2 * 8 * 32
    assert mixed.forward - plain.forward == 6 * 8 * 2                     # the router


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    class Product(nn.Module):
        def forward(self, x: Any) -> Any:
            made = ops.matmul(ops.complex(x, x), np.ones((4, 5), "complex64"))
            assert made.dtype == np.complex64
            return made
    assert count(Product(), np.zeros((3, 4), np.float32)).forward == 4 * 3 * 4 * 5


def test_fourier_transforms_are_noted_and_not_counted() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Any) -> Any:
            return ops.irfft(ops.rfft(x))
    work = count(Spectrum(), np.zeros((1, 8), np.float32))
    assert (work.forward, work.transforms) == (0, 2)


def test_other_threads_compute_while_one_counts() -> None:
    found = []

    class Product(nn.Module):
        def forward(self, x: Any) -> Any:
            with ThreadPoolExecutor(1) as beside:
                found.append(beside.submit(ops.matmul, np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)).result())
            return ops.matmul(x, np.ones((3, 2), np.float32))
    assert count(Product(), np.ones((1, 3), np.float32)).forward == 6
    np.testing.assert_array_equal(found[0].array, np.full((2, 2), 3.0))


def test_inputs_by_name_are_counted() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            self.table, self.line = nn.Embedding(9, 4), nn.Linear(3, 4)

        def forward(self, tokens: Any, values: Any) -> Any:
            return self.table(tokens).mean(1) + self.line(values)
    model = nn.Sequential(("embed", Both()), ("head", nn.Linear(4, 2)))
    given = ByName({"tokens": Tensor(np.zeros((1, 7), np.int64)), "values": Tensor(np.zeros((1, 3), np.float32))})
    assert count(model, given).forward == 3 * 4 + 4 * 2


def test_a_model_whose_products_were_counted_can_be_cut_over_ranks() -> None:
    """Running statistics have no memory afterwards, either: `inspect` counts first, and places then."""
    model = models.resnet20()
    count(model, np.zeros((1, 3, 8, 8), np.float32))
    narrow(read_plan(model, model.plan), 0, 2)
    assert dict(model.named_buffers())["stage1_block0.norm1.running_mean"].shape == (8,)


def test_counting_leaves_model_and_operations_as_they_were() -> None:
    model = models.lenet(size=12)
    assert count(model, np.zeros((1, 1, 12, 12), np.float32)).training == 3 * count(model, np.zeros((1, 1, 12, 12))).forward
    assert model.training and all(module.training for module in model.modules())
    with pytest.raises(Exception, match="lenet expects input"):
        count(model, np.zeros((1, 1, 10, 10), np.float32))
    assert not any(p.allocated for p in model.parameters())
    model.initialize(0)
    y = model(np.ones((2, 1, 12, 12), np.float32))
    assert np.abs(y.array).max() > 0                                      # products are products again
