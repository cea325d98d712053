"""Rules that treat each element by itself, as array expressions over blocks that stay in the cache.

Letters as in `rules`: w values, g gradients, m and v running means of g and g squared, t the step from 1. Formulas and defaults
are PyTorch's where PyTorch has the optimizer. No expression looks at another element or calls a function that rounds by place,
so the bits of an element do not depend on how ranks cut the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.backend import Array, array_module
from mpitrain.errors import GraphError
from mpitrain.optim.layout import Allocate
from mpitrain.optim.optimizer import Optimizer, Run, require

BLOCK = 1 << 14            # elements: a block of each of the arrays of a rule, and of what it computes, lies in a cache of 1 MiB
DEVICE_BLOCK = 1 << 24     # on a device, where each operation is a launch: what is computed takes 64 MiB an array in float32


class Elementwise(Optimizer):
    """A subclass defines `rule`; `g` is memory of its own, with the sign and the scale of the gradients in it already."""

    first_values: Mapping[str, float] = {}

    def change(self, run: Run, gradients: Array, lr: float, step: int, scale: float) -> None:
        parts, n = self.parts(run), run.stop - run.start
        block = DEVICE_BLOCK if self._on_device else BLOCK
        for first in range(0, n, block):
            w, *state = [part[first:first + block] for part in parts]
            self.rule(w, gradients[first:first + block] * scale, *state, decay=run.decay, lr=lr, step=step)

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        """Changes a block of the values `w` and of the states in place."""
        raise GraphError(f"{type(self).__name__} defines no rule")

    def started_at(self, **values: float) -> None:
        """Gives states other first values than 0."""
        self.first_values = values
        for name, value in values.items():
            if value:
                self.state[name].fill(value)


    def restart(self) -> None:
        super().restart()
        self.started_at(**self.first_values)


class Adagrad(Elementwise):
    """s += g^2;  w -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps) (Duchi, Hazan, Singer, 2011)."""

    def __init__(self, model: Any, lr: float = 0.01, *, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, decay: str = "all", maximize: bool = False,
                 allocate: Allocate | None = None):
        require(lr_decay >= 0.0, "lr_decay", lr_decay, "0 or more")
        require(initial_accumulator_value >= 0.0, "initial_accumulator_value", initial_accumulator_value, "0 or more")
        require(eps >= 0.0, "eps", eps, "0 or more")
        super().__init__(model, lr, state=("sum",), weight_decay=weight_decay, decay=decay, maximize=maximize, allocate=allocate)
        self.lr_decay, self.eps = lr_decay, eps
        self.started_at(sum=initial_accumulator_value)

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        total, = state
        if decay:
            g += decay * w
        total += g * g
        root = array_module(w).sqrt(total)
        root += self.eps
        g /= root
        g *= lr / (1.0 + (step - 1) * self.lr_decay)
        w -= g


class Adadelta(Elementwise):
    """v = rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  u = rho u + (1 - rho) d^2;  w -= lr d (Zeiler, 2012)."""

    def __init__(self, model: Any, lr: float = 1.0, *, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0,
                 decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        require(0.0 <= rho <= 1.0, "rho", rho, "in [0, 1]")
        require(eps > 0.0, "eps", eps, "more than 0")
        super().__init__(model, lr, state=("v", "delta"), weight_decay=weight_decay, decay=decay, maximize=maximize,
                         allocate=allocate)
        self.rho, self.eps = rho, eps

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        v, u = state
        xp = array_module(w)
        if decay:
            g += decay * w
        v *= self.rho
        v += (1.0 - self.rho) * g * g
        d = xp.sqrt(u + self.eps)
        d /= xp.sqrt(v + self.eps)
        d *= g
        u *= self.rho
        u += (1.0 - self.rho) * d * d
        w -= lr * d


class Moments(Elementwise):
    """Rules of Adam's family: two running means, and weight decay added to the gradient, or to the weights (`decoupled`)."""

    def __init__(self, model: Any, lr: float, betas: Sequence[float], eps: float, *, second: str = "v", decoupled: bool = False,
                 **others: Any):
        require(len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), "betas", list(betas), "two numbers in [0, 1)")
        require(eps >= 0.0, "eps", eps, "0 or more")
        super().__init__(model, lr, state=("m", second), **others)
        self.betas, self.eps, self.decoupled = (betas[0], betas[1]), eps, decoupled

    def decayed(self, w: Array, g: Array, decay: float, lr: float) -> None:
        """Weight decay, in place: of `w` where it is decoupled, else in `g`."""
        if decay and self.decoupled:
            w *= 1.0 - lr * decay
        elif decay:
            g += decay * w

    def averaged(self, m: Array, v: Array, g: Array) -> None:
        """The running means of g and its square, in place."""
        beta1, beta2 = self.betas
        m += (1.0 - beta1) * (g - m)
        v *= beta2
        v += (1.0 - beta2) * g * g


class Adamax(Moments):
    """u = max(beta2 u, |g| + eps);  w -= lr / (1 - beta1^t) m / u (Kingma and Ba, 2015, section 7)."""

    def __init__(self, model: Any, lr: float = 2e-3, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        super().__init__(model, lr, betas, eps, second="u", weight_decay=weight_decay, decay=decay, maximize=maximize,
                         allocate=allocate)

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        m, u = state
        xp, (beta1, beta2) = array_module(w), self.betas
        self.decayed(w, g, decay, lr)
        m += (1.0 - beta1) * (g - m)
        u *= beta2
        xp.maximum(u, xp.abs(g) + self.eps, out=u)
        w -= lr / (1.0 - beta1 ** step) * (m / u)


class NAdam(Moments):
    """Adam with Nesterov's momentum (Dozat, 2016): mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)."""

    def __init__(self, model: Any, lr: float = 2e-3, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False,
                 decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        require(momentum_decay >= 0.0, "momentum_decay", momentum_decay, "0 or more")
        super().__init__(model, lr, betas, eps, decoupled=decoupled_weight_decay, weight_decay=weight_decay, decay=decay,
                         maximize=maximize, allocate=allocate)
        self.momentum_decay = momentum_decay
        self._product = (0, 1.0)                              # (t, mu_1 mu_2 ... mu_t), a function of t alone

    def _mu(self, step: int) -> float:
        return float(self.betas[0] * (1.0 - 0.5 * 0.96 ** (step * self.momentum_decay)))

    def product(self, step: int) -> float:
        """mu_1 mu_2 ... mu_t, multiplied in this order from wherever it is asked for."""
        done, product = self._product if self._product[0] <= step else (0, 1.0)
        while done < step:
            done += 1
            product *= self._mu(done)
        self._product = done, product
        return product

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        m, v = state
        self.decayed(w, g, decay, lr)
        self.averaged(m, v, g)
        mu, following, product = self._mu(step), self._mu(step + 1), self.product(step)
        root = array_module(w).sqrt(v / (1.0 - self.betas[1] ** step))
        root += self.eps
        g *= lr * (1.0 - mu) / (1.0 - product)
        g += lr * following / (1.0 - product * following) * m
        g /= root
        w -= g


class RAdam(Moments):
    """Adam with a rate rectified for the variance of a short mean; momentum alone while that is too short (Liu et al., 2020)."""

    def __init__(self, model: Any, lr: float = 1e-3, *, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, decoupled_weight_decay: bool = False, decay: str = "all", maximize: bool = False,
                 allocate: Allocate | None = None):
        super().__init__(model, lr, betas, eps, decoupled=decoupled_weight_decay, weight_decay=weight_decay, decay=decay,
                         maximize=maximize, allocate=allocate)

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        m, v = state
        self.decayed(w, g, decay, lr)
        self.averaged(m, v, g)
        beta1, beta2 = self.betas
        correct2, rate = 1.0 - beta2 ** step, lr / (1.0 - beta1 ** step)
        longest = 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * step * beta2 ** step / correct2
        if length <= 5.0:
            w -= rate * m
            return
        rectified = math.sqrt((length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length))
        root = array_module(w).sqrt(v)
        root += self.eps
        w -= rate * math.sqrt(correct2) * rectified * (m / root)


class Lion(Elementwise):
    """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w);  m = beta2 m + (1 - beta2) g (Chen et al., 2023)."""

    def __init__(self, model: Any, lr: float = 1e-4, *, betas: Sequence[float] = (0.9, 0.99), weight_decay: float = 0.0,
                 decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        require(len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), "betas", list(betas), "two numbers in [0, 1)")
        super().__init__(model, lr, state=("m",), weight_decay=weight_decay, decay=decay, maximize=maximize, allocate=allocate)
        self.betas = (betas[0], betas[1])

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        m, = state
        beta1, beta2 = self.betas
        direction = array_module(w).sign(beta1 * m + (1.0 - beta1) * g)
        if decay:
            w *= 1.0 - lr * decay
        w -= lr * direction
        m *= beta2
        m += (1.0 - beta2) * g


class ASGD(Elementwise):
    """SGD with a falling rate, and the mean of its weights in the state "average" (Polyak and Juditsky, 1992).

    w = w (1 - lambd eta) - eta g;  average += mu (w - average), with eta = lr / (1 + lambd lr (t - 1))^alpha and
    mu = 1 / (t - 1 - t0), at most 1. The weights themselves are those that train; the average is for whoever wants it.
    """

    averages = ("average",)

    def __init__(self, model: Any, lr: float = 0.01, *, lambd: float = 1e-4, alpha: float = 0.75, t0: float = 1e6,
                 weight_decay: float = 0.0, decay: str = "all", maximize: bool = False, allocate: Allocate | None = None):
        for name, value in (("lambd", lambd), ("alpha", alpha), ("t0", t0)):
            require(value >= 0.0, name, value, "0 or more")
        super().__init__(model, lr, state=("average",), weight_decay=weight_decay, decay=decay, maximize=maximize,
                         allocate=allocate)
        self.lambd, self.alpha, self.t0 = lambd, alpha, t0

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        average, = state
        if decay:
            g += decay * w
        eta = lr / (1.0 + self.lambd * lr * (step - 1)) ** self.alpha
        weight = 1.0 / max(1.0, step - 1 - self.t0)
        w *= 1.0 - self.lambd * eta
        w -= eta * g
        if weight == 1.0:
            average[...] = w
        else:
            average += weight * (w - average)


class Rprop(Elementwise):
    """Each element has a step of its own, which grows while the sign of its gradient stays (Riedmiller and Braun, 1993).

    The first steps are `lr`; then the rate has no part in the rule, and schedules no effect. For whole batches.
    """

    def __init__(self, model: Any, lr: float = 0.01, *, etas: Sequence[float] = (0.5, 1.2),
                 step_sizes: Sequence[float] = (1e-6, 50.0), maximize: bool = False, allocate: Allocate | None = None):
        require(len(etas) == 2 and 0.0 < etas[0] < 1.0 < etas[1], "etas", list(etas), "two numbers, one in (0, 1), one above 1")
        require(len(step_sizes) == 2 and 0.0 < step_sizes[0] <= step_sizes[1], "step_sizes", list(step_sizes),
                "two numbers, the least and the largest step")
        super().__init__(model, lr, state=("previous", "size"), maximize=maximize, allocate=allocate)
        self.etas, self.step_sizes = (etas[0], etas[1]), (step_sizes[0], step_sizes[1])
        self.started_at(size=lr)

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        previous, size = state
        xp = array_module(w)
        turn = g * previous
        turned = turn < 0
        size *= xp.where(turned, w.dtype.type(self.etas[0]), xp.where(turn > 0, w.dtype.type(self.etas[1]), w.dtype.type(1)))
        xp.clip(size, *self.step_sizes, out=size)
        g[turned] = 0
        w -= xp.sign(g) * size
        previous[...] = g


