"""A private run out of [privacy]: what is bounded, how much noise there is, and what the run may claim.

    unit = "client"    the deltas of a federation's workers       parallel.workers.private
    unit = "sample"    the gradients of rows, one by one          parallel.policies.private, pipeline.by_rows, data.poisson
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpitrain import nn
from mpitrain.arguments import call
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config, changed
from mpitrain.config.private import noise_of
from mpitrain.config.topology import ACCOUNTANTS
from mpitrain.config.values import check_values
from mpitrain.data import Index, Sampler
from mpitrain.data.poisson import PoissonSampler
from mpitrain.data.rounds import Rounds
from mpitrain.errors import ConfigError
from mpitrain.nn.statistics import Running
from mpitrain.optim import Optimizer
from mpitrain.parallel.pipeline.by_norms import ByNorms
from mpitrain.parallel.pipeline.by_rows import RowByRow
from mpitrain.parallel.policies.policy import Policy
from mpitrain.parallel.policies.private import Private
from mpitrain.parallel.workers.policy import Federated
from mpitrain.parallel.workers.private import PrivateDeltas, SecureDeltas
from mpitrain.privacy.accountant import Accountant, Spent, noise_for
from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.ghost import suits
from mpitrain.privacy.mechanism import Mechanism
from mpitrain.privacy.noise import Noise
from mpitrain.registry import named
from mpitrain.train.build.extension import Assembled, Extension, take
from mpitrain.train.observers.ledger import Ledger

MUCH_MORE = 2.0                # times the noise so far: with more, the last steps of a run undo the first ones
USER = "the ranks of one mpirun are one user's, who sees all: this shows the protocol, and deploys nothing"


class Privacy(Extension):
    """`rounds` are a federation's, `rows` the training rows. ConfigError, alike on all
    ranks and without MPI, for what cannot be had."""

    def __init__(self, config: Config, rows: Index, rounds: Rounds | None, model: nn.Module, loss: Any):
        check_values(config)
        p = self.keys = config.privacy
        self.written, self.rounds = config, rounds
        self.count = config.workers.count or len(rows)
        self.q: float | None                                  # None: drawn so that no epsilon holds
        if rounds is not None:
            draw = rounds.draw
            self.q, self.expected = (draw.each if draw.poisson else 1.0 if draw.each == draw.count else None), draw.expected
            self.sampler: Sampler = rounds
            self.config = config
        else:
            self.by_norms = by_norms(config, model, loss)
            self._of_rows(config, rows)
        if p.delta > 1 / self.count:
            raise config.wrong(f"privacy.delta = {p.delta:g} is more than 1 / {self.count}, the number of {p.unit}s: to show one "
                               f"of them whole would be private then; set it well below {1 / self.count:.1g}", ("privacy.delta",))
        self.numbers = FixedPoint(p.clip, self.count) if p.secure else None
        noise = noise_of(p)
        assert noise is not None
        self.sigma, self.seeded = noise
        if p.epsilon and self.q is None:
            raise config.wrong(f"privacy.epsilon = {p.epsilon:g} cannot be had: {self.why_not()}; give privacy.noise instead, or "
                               f"draw by a Poisson sampler", ("privacy.epsilon",))
        self.accountant = make_accountant(config)
        self.spent = None if self.q is None or self.seeded else Spent(self.accountant, p.delta)
        self.tell: Callable[[str], None] = lambda text: None  # shows a line to whoever follows the run
        self.mechanism: Mechanism | None = None               # from `open` on
        self.steps = self.left = 0                            # of the run; those still to come

    def _of_rows(self, config: Config, rows: Index) -> None:
        t = config.train
        if t.micro_batches and not self.by_norms:
            why = "privacy.by_row = true makes" if config.privacy.by_row else "norms of this model's rows need"
            raise config.wrong(f"train.micro_batches = {t.micro_batches}: {why} each row a micro-batch; leave it out",
                               ("train.micro_batches",))
        n, batch = len(rows), t.batch_size
        if config.privacy.sampling == "shuffle":
            self.q, self.expected = None, float(batch)
            self.sampler = Sampler(rows, batch, seed=config.run.seed)
            most = batch
        else:
            if batch > n:
                raise config.wrong(f"train.batch_size = {batch} is more than the {n} training rows: a Poisson sampler draws that "
                                   f"many on average; set it to {n} or less", ("train.batch_size",))
            self.q, self.expected = batch / n, float(batch)
            self.sampler = sampler = PoissonSampler(rows, batch / n, seed=config.run.seed)
            most = sampler.capacity
        self.config = config if self.by_norms else changed(config, train={"micro_batches": most, "batch_size": most})

    def configured(self, config: Config) -> Config:
        return self.config

    def drawn(self, rows: Any) -> Any:
        return self.sampler

    def described(self, steps: int) -> list[str]:
        self.plan(steps)
        return self.lines()

    def plan(self, steps: int, done: int = 0) -> None:
        """The noise, where it is found for an epsilon at the end of a run of so many steps, of which some are `done`. ConfigError
        where none is enough."""
        self.steps, self.left, p = steps, steps - done, self.keys
        if p.epsilon and self.q is not None and not self.total() <= p.epsilon:
            self.sigma = noise_for(self.accountant, p.epsilon, p.delta, self.q, self.left, self.history)

    @property
    def history(self) -> dict[tuple[float, float], int]:
        return {} if self.spent is None else self.spent.history

    def total(self) -> float:
        """Epsilon when the run is over."""
        key, history = (self.q or 0.0, self.sigma), self.history
        return self.accountant.epsilon({**history, key: history.get(key, 0) + self.left}, self.keys.delta)

    def join(self, run: Assembled) -> None:
        """Keeps what is spent beside what the run shows."""
        trainer = run.trainer
        self.tell = trainer.tell
        if self.spent is None:
            trainer.notes += self.lines()
        else:
            trainer.observers.insert(0, Ledger(self, trainer.channel, trainer.notes))

    def go_on_after(self, step: int) -> None:
        """The run goes on after a step: its noise is found anew where it must be. ConfigError where that is much more."""
        assert self.mechanism is not None and self.spent is not None
        before = self.sigma
        self.plan(self.steps, step)
        if self.left and self.sigma > MUCH_MORE * before:
            raise ConfigError(f"privacy.epsilon = {self.keys.epsilon:g} leaves too little for the {self.left} steps to come, "
                              f"with {self.spent.epsilon():.4g} spent: they would need noise of {self.sigma:.4g} times the clip "
                              f"instead of {before:.4g}; raise privacy.epsilon, or end with the checkpoint: train.steps={step}")
        self.mechanism.sigma = self.sigma

    def open(self, policy: Policy, mesh: Mesh, control: Channel, seats: range, steps: int) -> None:
        """Gives the policy, before it opens, what bounds and hides. It communicates."""
        self.plan(steps)
        p, channel = self.keys, mesh.channel(mesh.axes, "privacy")
        if not self.seeded:                                   # Who is drawn must not follow from a seed in run.json.
            seed = int(control.broadcast_object(secrets.randbits(62)))
            if self.rounds is not None:
                self.rounds.draw = replace(self.rounds.draw, seed=seed)
            else:
                self.sampler.seed = seed
        noise = Noise(channel, self.written.run.seed if self.seeded else None)
        self.mechanism = mechanism = Mechanism(p.clip, self.sigma, self.q or 0.0, self.expected, noise, self.spent)
        mechanism.segments = policy.layout.segments
        policy.private = self
        if self.rounds is None:
            assert isinstance(policy, Private)
            policy.mechanism, policy.by_row = mechanism, not self.by_norms
            return
        assert isinstance(policy, Federated)
        if self.numbers is None:
            policy.deltas = PrivateDeltas(self.rounds.seats, mechanism)
        else:
            policy.deltas = secure = SecureDeltas(self.rounds.seats, mechanism, channel=channel, rounds=self.rounds,
                                                  own_seats=seats, numbers=self.numbers, threshold=p.threshold,
                                                  tell=lambda text: self.tell(text))
            secure.length = policy.layout.size

    def pipeline(self, kind: Any) -> Any:
        if self.rounds is not None:
            return kind
        return self._norms if self.by_norms else RowByRow

    def _norms(self, *arguments: Any, **options: Any) -> ByNorms:
        assert self.mechanism is not None
        made = ByNorms(*arguments, **options)
        made.mechanism = self.mechanism
        return made

    def restored(self, found: Checkpoint, *, resumed: bool) -> None:
        """What the run has spent before goes on to be counted. ConfigError where it was not private."""
        if not resumed:
            return                                            # Steps that are done again are spent again.
        if "privacy" not in found.meta:
            raise ConfigError("the checkpoint is of a run without [privacy], whose steps have told of every row: no epsilon "
                              "would hold; start a run of its own")
        take("what it has spent of privacy", self.go_on_from, found.meta["privacy"], found)

    def told(self) -> dict[str, float]:
        """Further numbers of a step for metrics.jsonl."""
        return {} if self.spent is None else {"epsilon": self.spent.epsilon(), "delta": self.spent.delta}

    def lines(self) -> list[str]:
        """What is told when the run starts: the claim with what it assumes, or why there is none."""
        p = self.keys
        what = {"client": "client", "sample": "row"}[p.unit]
        masks = [] if self.numbers is None else [
            f"secure sums: clients' parts in steps of {1 / self.numbers.scale:.3g}, unmasked where a share of "
            f"{p.threshold:g} of a round's clients answers, two at least"]
        bound = f"each {what} adds a norm of {p.clip:g} at most, the sum gets noise of {self.sigma:.6g} times that"
        if self.seeded:
            return [f'privacy: NOT private: privacy.noise = "{p.noise}" draws noise from run.seed, for tests; {bound}', *masks]
        if self.spent is None:
            return [f"privacy: no epsilon is told: {self.why_not()}; {bound}", *masks]
        before = "" if not self.spent.history else f", of which {self.spent.epsilon():.4g} is spent,"
        left_out = "" if self.numbers is None else ", as if rounds with too few clients were left out whoever is there"
        return [f"privacy: epsilon {self.total():.4g}{before} at delta {p.delta:g} after {self.steps} steps; {bound}",
                f"that epsilon is for the presence of one {what} among {self.count}, each drawn by itself with probability "
                f"{self.q:.6g}, and for the parameters, not for losses and counts in metrics.jsonl{left_out}; {USER}", *masks]

    def why_not(self) -> str:
        """Why no epsilon holds."""
        if self.rounds is not None:
            return (f"workers.each_round = {int(self.rounds.draw.each)} draws that many clients, and accountants hold where each "
                    f'is drawn for itself: workers.each_round = "poisson:{self.expected / self.count:.3g}"')
        return ('privacy.sampling = "shuffle" cuts an order of all rows, and accountants hold where each is drawn for itself: '
                'privacy.sampling = "poisson"')

    def record(self) -> dict[str, Any]:
        """What checkpoints keep."""
        p = self.keys
        return {"unit": p.unit, "count": self.count, "delta": p.delta, "clip": p.clip, "noise": self.sigma,
                "history": None if self.spent is None else self.spent.record()}

    def go_on_from(self, kept: Any) -> None:
        """Goes on from what a checkpoint, or the run folder, has kept. ConfigError for another claim; ValueError, TypeError or
        KeyError for what is none."""
        mine = self.record()
        for name in ("unit", "count", "delta", "clip"):
            if kept[name] != mine[name]:
                raise ConfigError(f"the run's privacy.{name} was {kept[name]}, and is {mine[name]} now: its epsilon is of the "
                                  "former; leave it as it was, or start a run of its own")
        if self.spent is not None and kept["history"] is not None:
            self.spent.restore(kept["history"])
            if self.keys.epsilon:
                self.sigma = max(self.sigma, float(kept["noise"]))
        elif (self.spent is None) != (kept["history"] is None):
            raise ConfigError("steps that no epsilon holds for, and others, do not add up; draw and noise as before, or start a "
                              "run of its own")


def refuse_without() -> None:
    """ConfigError for a run without [privacy] that goes on from one with it."""
    raise ConfigError("the checkpoint is of a run with [privacy], whose epsilon would not hold for steps without; give privacy "
                      "as it was, or start a run of its own from it with model.init_from")


def make_accountant(config: Config) -> Accountant:
    """The accountant that privacy.accountant names. ConfigError for what is none."""
    name = config.privacy.accountant
    made: Accountant = call(ACCOUNTANTS.resolve(name, config.folder), f'privacy.accountant = "{name}"', {})
    found = made.epsilon({(0.5, 1.0): 1}, 1e-5) if callable(getattr(made, "epsilon", None)) else None
    if not (isinstance(found, float) and found >= 0):
        raise ConfigError(f'privacy.accountant = "{name}" must be a class whose epsilon(history, delta) is a number of 0 or '
                          f"more, found {named(made)}, which gives {found!r} for one step")
    return made


def by_norms(config: Config, model: nn.Module, loss: Any) -> bool:
    """Whether norms of rows are had from whole micro-batches: where model and loss are ours and keep rows apart."""
    t = config.train
    return (not config.privacy.by_row and not t.recompute and t.precision in ("float32", "float64") and not config.distil.teaches
            and type(loss).__module__.startswith("mpitrain.") and loss.kind in ("classes", "binary", "values") and suits(model))


def refuse_unbounded(config: Config, model: nn.Module, tried: Optimizer) -> None:
    """ConfigError for layers that tell of rows past the clip and the noise, and for optimizers that do."""
    if tried.needs_closure:
        raise ConfigError(f"{tried.title} computes the loss of a step several times, and each one tells of the rows; with "
                          '[privacy] set optimizer.name = "sgd" or "adamw"')
    if config.privacy.unit != "sample":
        return
    use = 'with privacy.unit = "sample" use'
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) or any(isinstance(value, Running) for value in vars(layer).values()):
            raise ConfigError(f'the layer "{name}" ({type(layer).__name__}) keeps statistics of all rows, which no noise hides; '
                              f"{use} group norm or layer norm")
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            raise ConfigError(f'the embedding "{name}" scales those of its rows that a batch has, which no noise hides; {use} '
                              "one without max_norm")
    if mixed := nn.mixtures(model):
        raise ConfigError(f'the layer "{mixed[0][0]}" sends rows to experts by what other rows do; {use} layers without experts')
