"""Outer rules: what a round's mean change of parameters does to the parameters that the round began with.

A worker begins a round at theta and ends it elsewhere; d = theta - theta_worker, averaged over workers, is the outer gradient.
All rules are elementwise, so a slice of the arrays is as good as all, and every rank that has a slice computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mpitrain.backend import Array, array_module
from mpitrain.optim.optimizer import require


class OuterRule(Protocol):
    """An entry of `config.topology.OUTER`; a user's own is ``file.py:name``. Made with the level's lr and its further keys."""

    @property
    def states(self) -> Mapping[str, float]:
        """The names of the arrays that it keeps, each as long as theta, and their first value."""
    def change(self, theta: Array, gradient: Array, state: Sequence[Array], *, round: int, inner_lr: float) -> None:
        """Changes `theta` in place by the outer `gradient`, and the arrays of `state`, in the order of `states`. `round` counts
        from 1; `inner_lr` is the inner learning rate of the round's last step."""


class Rule:
    """The learning rate, and no state."""

    states: Mapping[str, float] = {}

    def __init__(self, lr: float = 1.0):
        require(lr > 0.0, "lr of [[sync]]", lr, "more than 0")
        self.lr = lr


class Average(Rule):
    """theta -= lr d: with lr = 1 the mean of the workers' parameters (FedAvg, McMahan et al. 2017; local SGD, Stich 2019)."""

    def change(self, theta: Array, gradient: Array, state: Sequence[Array], *, round: int, inner_lr: float) -> None:
        theta -= theta.dtype.type(self.lr) * gradient


class Momentum(Rule):
    """One buffer of past outer gradients."""

    states: Mapping[str, float] = {"momentum": 0.0}

    def __init__(self, lr: float = 1.0, *, momentum: float = 0.9):
        super().__init__(lr)
        require(0.0 <= momentum < 1.0, "momentum of [[sync]]", momentum, "in [0, 1)")
        self.momentum = momentum

    def _mixed(self, gradient: Array, buffer: Array, factor: float = 1.0) -> Array:
        """buffer = momentum buffer + factor d, in place."""
        kind = buffer.dtype.type
        buffer *= kind(self.momentum)
        buffer += gradient if factor == 1.0 else kind(factor) * gradient
        return buffer


class FedAvgM(Momentum):
    """b = momentum b + d; theta -= lr b (Hsu, Qi, Brown 2019)."""

    def change(self, theta: Array, gradient: Array, state: Sequence[Array], *, round: int, inner_lr: float) -> None:
        theta -= theta.dtype.type(self.lr) * self._mixed(gradient, state[0])


class Nesterov(Momentum):
    """b = momentum b + d; theta -= lr (d + momentum b), as PyTorch's SGD has it: DiLoCo (Douillard et al. 2023)."""

    def change(self, theta: Array, gradient: Array, state: Sequence[Array], *, round: int, inner_lr: float) -> None:
        kind = theta.dtype.type
        theta -= kind(self.lr) * (gradient + kind(self.momentum) * self._mixed(gradient, state[0]))


class SlowMo(Momentum):
    """b = momentum b + d / gamma; theta -= lr gamma b, with gamma the inner learning rate (Wang et al. 2020)."""

    def change(self, theta: Array, gradient: Array, state: Sequence[Array], *, round: int, inner_lr: float) -> None:
        if inner_lr > 0.0:                                    # At the rate 0 nobody has moved.
            buffer = self._mixed(gradient, state[0], 1.0 / inner_lr)
            theta -= theta.dtype.type(self.lr * inner_lr) * buffer


class Adaptive(Rule):
    """m = beta1 m + (1 - beta1) d; v as the class says; theta -= lr m / (sqrt(v) + tau) (Reddi et al. 2021, algorithm 2).

    v begins at tau^2. The mean change there is -d.
    """

    beta1: ClassVar[float] = 0.9

    def __init__(self, lr: float = 0.01, *, betas: Sequence[float] | None = None, tau: float = 1e-3):
        super().__init__(lr)
        self.betas = (self.beta1, 0.99) if betas is None else tuple(betas)
        require(len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas), "betas of [[sync]]", betas,
                "two numbers in [0, 1)")
        require(tau > 0.0, "tau of [[sync]]", tau, "more than 0")
        self.tau = tau
        self.states = {"m": 0.0, "v": tau * tau}

    def change(self, theta: Array, gradient: Array, state: Sequence[Array], *, round: int, inner_lr: float) -> None:
        m, v = state
        kind = theta.dtype.type
        m *= kind(self.betas[0])
        m += kind(1.0 - self.betas[0]) * gradient
        self.second(v, gradient * gradient)
        theta -= kind(self.lr) * m / (array_module(v).sqrt(v) + kind(self.tau))

    def second(self, v: Array, square: Array) -> None:
        """Changes v in place by the squares of d."""
        raise NotImplementedError


class FedAdagrad(Adaptive):
    """v += d^2. The paper's beta1 is 0 there."""

    beta1 = 0.0

    def second(self, v: Array, square: Array) -> None:
        v += square


class FedAdam(Adaptive):
    """v = beta2 v + (1 - beta2) d^2."""

    def second(self, v: Array, square: Array) -> None:
        kind = v.dtype.type
        v *= kind(self.betas[1])
        v += kind(1.0 - self.betas[1]) * square


class FedYogi(Adaptive):
    """v -= (1 - beta2) d^2 sign(v - d^2)."""

    def second(self, v: Array, square: Array) -> None:
        v -= v.dtype.type(1.0 - self.betas[1]) * square * array_module(v).sign(v - square)
