"""A case of each loss, for the tests on devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import ops

RNG = np.random.default_rng(8)
X, Y, Z = (RNG.standard_normal((4, 3)) for _ in range(3))
P, T = (RNG.uniform(0.1, 0.9, (4, 3)) for _ in range(2))
SIGNS, LABELS = np.array([1.0, -1.0, -1.0, 1.0]), np.array([0, 2, 1, 2])
WEIGHT = [0.5, 1.0, 2.0]

CASES: dict[str, list[Any]] = {
    **{name: [(getattr(ops, name), X, Y)] for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")},
    "kl_div": [(ops.kl_div, X, P)], "binary_cross_entropy": [(ops.binary_cross_entropy, P, T)],
    "binary_cross_entropy_with_logits_loss": [(lambda x, t: ops.binary_cross_entropy_with_logits_loss(x, t, pos_weight=WEIGHT),
                                               X, T)],
    "nll_loss": [(lambda x, t: ops.nll_loss(x, t, WEIGHT), X, LABELS)],
    "cross_entropy_loss": [(lambda x, t: ops.cross_entropy_loss(x, t, WEIGHT, 1, label_smoothing=0.1), X, LABELS),
                           (ops.cross_entropy_loss, X, P)],
    "focal_loss": [(ops.focal_loss, X, LABELS)], "dice_loss": [(ops.dice_loss, P, T)],
    "poisson_nll_loss": [(lambda x, t: ops.poisson_nll_loss(x, t * 3, full=True), X, T)],
    "gaussian_nll_loss": [(ops.gaussian_nll_loss, X, Y, P)],
    **{name: [(getattr(ops, name), Y[:, 0], SIGNS)] for name in ("soft_margin_loss", "hinge_embedding_loss")},
    "margin_ranking_loss": [(ops.margin_ranking_loss, X[:, 0], Y[:, 0], SIGNS)],
    "cosine_embedding_loss": [(ops.cosine_embedding_loss, X, Y, SIGNS)],
    **{name: [(getattr(ops, name), X, Y, Z)] for name in ("triplet_margin_loss", "triplet_margin_with_distance_loss")},
    "multi_margin_loss": [(ops.multi_margin_loss, X, LABELS)],
    "multilabel_margin_loss": [(ops.multilabel_margin_loss, X, np.array([[2, 0, -1], [1, -1, 0], [-1, 1, 2], [0, 1, 2]]))],
    "multilabel_soft_margin_loss": [(ops.multilabel_soft_margin_loss, X, T)],
    "ctc_loss": [(lambda x, t: ops.ctc_loss(ops.log_softmax(x.reshape(4, 1, 3)), t, [4], [2]), X, np.array([[1, 2]]))],
}
