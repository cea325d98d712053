"""The update rules. Letters: w values, g gradients, m and v running means of g and g squared, t the step from 1.

Formulas and defaults are PyTorch's where PyTorch has the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.kernels import optimizer as kernels
from mpitrain.optim.layout import Allocate
from mpitrain.optim.norm import sum_of_squares
from mpitrain.optim.optimizer import OPTIMIZERS, Optimizer, Run, require


@OPTIMIZERS.register("sgd")
class SGD(Optimizer):
    """b = momentum b + (1 - dampening) g, at first g;  w -= lr b, or with `nesterov` w -= lr (g + momentum b)."""

    def __init__(self, model: Any, lr: float = 0.001, *, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False,
                 weight_decay: float = 0.0, decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        require(0.0 <= momentum < 1.0, "momentum", momentum, "in [0, 1)")
        require(momentum > 0.0 or not nesterov, "momentum", momentum, "more than 0 with nesterov")
        require(not (nesterov and dampening), "dampening", dampening, "0 with nesterov")
        super().__init__(model, lr, state=("momentum",) if momentum else (), weight_decay=weight_decay, decay=decay,
                         maximize=maximize, allocate=allocate)
        self.momentum, self.dampening = momentum, dampening
        self.weights = (1.0, momentum) if nesterov else (0.0, 1.0)      # The weights of g and of b in the step.
        self.by_step = ((2, kernels.FIRST, 1.0 - dampening),) if momentum and dampening else ()
        self.kernel = kernels.sgd if not momentum else kernels.sgd_dampened if dampening else kernels.sgd_momentum

    def scalars(self, decay: float, lr: float, step: int, scale: float) -> tuple[float, ...]:
        new = (1.0 - self.dampening if step > 1 else 1.0,) if self.dampening else ()
        return (lr, self.momentum, *new, *self.weights, decay, scale) if self.momentum else (lr, decay, scale)


@OPTIMIZERS.register("adam")
class Adam(Optimizer):
    """Kingma and Ba 2015; weight decay is added to the gradient (L2). `amsgrad` divides by the largest v so far."""

    decoupled = False

    def __init__(self, model: Any, lr: float = 1e-3, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, decay: str = "all", amsgrad: bool = False, maximize: bool = False,
                 allocate: Allocate | None = None):
        fine = len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)
        require(fine, "betas", list(betas), "two numbers in [0, 1)")
        require(eps > 0.0, "eps", eps, "more than 0")
        super().__init__(model, lr, state=("m", "v", "largest")[:2 + amsgrad], weight_decay=weight_decay, decay=decay,
                         maximize=maximize, allocate=allocate)
        self.betas, self.eps = (betas[0], betas[1]), eps
        self.by_step = (0, kernels.RATE, self.betas[0]), (6, kernels.ROOT, self.betas[1])
        self.kernel = kernels.amsgrad if amsgrad else kernels.adam

    def scalars(self, decay: float, lr: float, step: int, scale: float) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        keep, penalty = (1.0 - lr * decay, 0.0) if self.decoupled else (1.0, decay)
        return (lr / (1.0 - beta1 ** step), keep, penalty, 1.0 - beta1, beta2, 1.0 - beta2,
                1.0 / math.sqrt(1.0 - beta2 ** step), self.eps, scale)


@OPTIMIZERS.register("adamw")
class AdamW(Adam):
    """Loshchilov and Hutter 2019: Adam whose weight decay shrinks the weights themselves, by lr x weight_decay."""

    decoupled = True

    def __init__(self, model: Any, lr: float = 1e-3, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, decay: str = "all", amsgrad: bool = False, maximize: bool = False,
                 allocate: Allocate | None = None):
        super().__init__(model, lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=decay, amsgrad=amsgrad,
                         maximize=maximize, allocate=allocate)


@OPTIMIZERS.register("rmsprop")
class RMSprop(Optimizer):
    """s = alpha s + (1 - alpha) g^2;  b = momentum b + g / (sqrt(s) + eps);  w -= lr b (Hinton, lecture 6e).

    `centered` takes the square of the running mean of g off s.
    """

    def __init__(self, model: Any, lr: float = 0.01, *, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0,
                 weight_decay: float = 0.0, centered: bool = False, decay: str = "all", maximize: bool = False,
                 allocate: Allocate | None = None):
        require(0.0 <= alpha < 1.0, "alpha", alpha, "in [0, 1)")
        require(0.0 <= momentum < 1.0, "momentum", momentum, "in [0, 1)")
        require(eps > 0.0, "eps", eps, "more than 0")
        super().__init__(model, lr, state=("square", "momentum", "mean")[:2 + centered], weight_decay=weight_decay, decay=decay,
                         maximize=maximize, allocate=allocate)
        self.alpha, self.momentum, self.eps = alpha, momentum, eps
        self.kernel = kernels.rmsprop_centered if centered else kernels.rmsprop

    def scalars(self, decay: float, lr: float, step: int, scale: float) -> tuple[float, ...]:
        return lr, self.momentum, self.alpha, 1.0 - self.alpha, self.eps, decay, scale


@OPTIMIZERS.register("lars")
class LARS(Optimizer):
    """You, Gitman, Ginsburg 2017, for convolutional nets with large batches.

    b = momentum b + lr c (g + decay w);  w -= b, where c = trust |w| / (|g| + decay |w|) for each matrix. Biases and gains
    have c = 1, as do parameters whose norm or gradient is zero.
    """

    whole_parameters = True

    def __init__(self, model: Any, lr: float = 0.1, *, momentum: float = 0.9, trust: float = 0.001,
                 weight_decay: float = 0.0, decay: str = "matrices", allocate: Allocate | None = None):
        require(0.0 <= momentum < 1.0, "momentum", momentum, "in [0, 1)")
        require(trust > 0.0, "trust", trust, "more than 0")
        super().__init__(model, lr, state=("momentum",), weight_decay=weight_decay, decay=decay, allocate=allocate)
        self.momentum, self.trust = momentum, trust

    def change(self, run: Run, gradients: Array, lr: float, step: int, scale: float) -> None:
        w, buffer = self.parts(run)
        rate = lr
        if run.matrix:
            weight, gradient = math.sqrt(sum_of_squares(w)), abs(scale) * math.sqrt(sum_of_squares(gradients))
            if weight > 0.0 and gradient > 0.0:
                rate = lr * self.trust * weight / (gradient + run.decay * weight)
        kernels.sgd_momentum(w, gradients, buffer, 1.0, self.momentum, 0.0, 1.0, run.decay * rate, scale * rate)


@OPTIMIZERS.register("lamb")
class LAMB(Adam):
    """You et al. 2020, for transformers with large batches: Adam's direction, scaled to the size of the weights.

    r = m^ / (sqrt(v^) + eps) + decay w;  w -= lr |w|/|r| r for each matrix. Biases and gains, and parameters whose norm is
    zero, take w -= lr r.
    """

    whole_parameters = True

    def __init__(self, model: Any, lr: float = 1e-3, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-6,
                 weight_decay: float = 0.0, decay: str = "matrices", allocate: Allocate | None = None):
        super().__init__(model, lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=decay, allocate=allocate)
        longest = max((s.stop - s.start for s in self.storage.segments), default=0)
        moments = self.state["m"]
        self._direction = array_module(moments).empty(longest, moments.dtype)

    def change(self, run: Run, gradients: Array, lr: float, step: int, scale: float) -> None:
        w, m, v = self.parts(run)
        beta1, beta2 = self.betas
        direction = self._direction[:run.stop - run.start]
        kernels.lamb(w, gradients, direction, m, v, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 / (1.0 - beta1 ** step),
                     1.0 / math.sqrt(1.0 - beta2 ** step), self.eps, run.decay, scale)
        rate = lr
        if run.matrix:
            weight, length = math.sqrt(sum_of_squares(w)), math.sqrt(sum_of_squares(direction))
            if weight > 0.0 and length > 0.0:
                rate = lr * weight / length
                self.took(run, weight / length)
        direction *= rate
        w -= direction

    def took(self, run: Run, ratio: float) -> None:
        """Called with the ratio of norms by which the rate of a matrix was multiplied."""
