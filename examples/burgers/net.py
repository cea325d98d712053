"""A physics-informed network for Burgers' equation u_t + u u_x = v u_xx (Raissi, Perdikaris and Karniadakis 2019)."""

import math

from mpitrain import Tensor, nn, ops
from mpitrain.autograd import enable_grad, grad


class Burgers(nn.Module):
    """Points (N, 2), columns x and t, to (N, 2): u there, and what the equation leaves of it, u_t + u u_x - v u_xx.

    u = (1 - t) u_0 + t (1 - x^2) n(x, t), of a network n: so it is u_0(x) = -sin(pi x) at t = 0 and 0 at x = -1 and x = 1,
    whatever n is, and the equation alone is left to be learned.
    """

    def __init__(self, width, layers, viscosity):
        first = nn.init.xavier_normal()
        self.viscosity = viscosity
        self.inner = [nn.Linear(width if i else 2, width, activation="tanh", weight_init=first, bias_init=nn.init.zeros)
                      for i in range(layers)]
        self.head = nn.Linear(width, 1, weight_init=first, bias_init=nn.init.zeros)

    def forward(self, points):
        with enable_grad():                           # also where a run only evaluates
            points = Tensor(points.array, requires_grad=True)
            u = self.u(points)
            slopes, = grad(u.sum(), points, create_graph=True)
            u_x, u_t = slopes[:, :1], slopes[:, 1:]
            bent, = grad(u_x.sum(), points, create_graph=True)
            left = u_t + u * u_x - self.viscosity * bent[:, :1]
        return ops.concatenate([u, left], 1)

    def u(self, points):
        x, t = points[:, :1], points[:, 1:]
        h = points
        for layer in self.inner:
            h = layer(h)
        return (t - 1) * ops.sin(math.pi * x) + t * (1 - x * x) * self.head(h)


def net(width=32, layers=4, viscosity=0.01 / math.pi):
    return nn.Sequential(("u", Burgers(width, layers, viscosity)))


class Residual(nn.Loss):
    """The mean square of what the equation leaves; of rows that know u, the square of its error over the mean square of u.

    Targets (N, 2): u, and 1 / the mean square of u over the rows that know it; (0, 0) elsewhere. So the loss of a run's training
    rows is the equation's, and that of its validation rows the square of the relative L2 error.
    """

    kind = "rows"

    def __call__(self, output, target):
        known = target[:, 1]
        return ((known == 0) * output[:, 1] ** 2 + known * (output[:, 0] - target[:, 0]) ** 2).sum()

    def count(self, target):
        return len(target)
