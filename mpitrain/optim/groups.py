"""Groups of parameters, each with a rule of its own: other rates, decay or keys of the optimizer, or frozen.

    AdamW([{"params": model.head.parameters(), "lr": 1e-3}, {"params": "body.*", "freeze_until": 100}], lr=1e-4)

A group is an optimizer over a `Subset` of the storage, which has state for its own parameters alone: those that are never trained
have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from mpitrain.arguments import misfit, parameters_of
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, GraphError, nearest
from mpitrain.optim.layout import ALIGN, Allocate, Segment
from mpitrain.optim.optimizer import Held, Optimizer

GIVEN = ("self", "model", "allocate", "lr")
OWN = ("params", "lr", "lr_factor", "frozen", "freeze_until")
Make = Callable[[Any, Mapping[str, Any]], Optimizer]          # (storage, further keys) -> an optimizer


@dataclass(frozen=True)
class Group:
    """Parameters by patterns over their names. Their rate is `factor` times the optimizer's; they are trained from step `start`
    on (infinity: never), counted from 0; `keys` are further arguments of the optimizer."""

    patterns: tuple[str, ...]
    factor: float = 1.0
    start: float = 0.0
    keys: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __str__(self) -> str:
        return f"optimizer.groups: the group of {', '.join(self.patterns)}"


def read_group(entry: Mapping[str, Any], kind: Callable[..., Any], lr: float) -> Group:
    """The group of a table with `params` (patterns, names or parameters), `lr` or `lr_factor`, `frozen` or `freeze_until`, and
    keys of the optimizer `kind`. ConfigError for anything else."""
    known = [*OWN, *(name for name in parameters_of(kind) if name not in GIVEN)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"optimizer.groups: a group has no key {key}{nearest(key, known)}")
    keys = {key: value for key, value in entry.items() if key not in OWN}
    group = Group(_patterns(entry.get("params", ())), keys=keys)
    wrong = misfit(_own_keys, {key: entry[key] for key in OWN[1:] if key in entry}, "") or misfit(kind, keys, "")
    if wrong:
        raise ConfigError(f"{group}: {wrong}")
    factor, start = _own_keys(group, lr, **{key: value for key, value in entry.items() if key in OWN[1:]})
    return replace(group, factor=factor, start=start)


def _patterns(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(p, str) or hasattr(p, "key") for p in listed):
        raise ConfigError(f"optimizer.groups: params is a pattern over names of parameters, or a list of them, not {given!r}")
    if not listed:
        raise ConfigError('optimizer.groups: a group needs params: a pattern over names of parameters such as "head.*", or a '
                          "list of them")
    return tuple(p if isinstance(p, str) else p.key for p in listed)


def _own_keys(group: Any, base: Any, *, lr: float | None = None, lr_factor: float | None = None, frozen: bool = False,
              freeze_until: int = 0) -> tuple[float, float]:
    """The factor of the rate `base`, and the first step, of a group with these keys."""
    rates = [f"{key} = {value}" for key, value in (("lr", lr), ("lr_factor", lr_factor)) if value is not None]
    if len(rates) > 1 or (lr is not None and not base):
        raise ConfigError(f"{group} has {' and '.join(rates)}{'' if base else ', and optimizer.lr = 0'}; give one rate")
    if rates and not 0.0 <= (lr if lr_factor is None else lr_factor) < math.inf:      # type: ignore[operator]
        raise ConfigError(f"{group} has {rates[0]}, which must be finite, 0 or more")
    if freeze_until < 0:
        raise ConfigError(f"{group}: freeze_until is a number of steps, 0 or more, found {freeze_until}")
    if frozen and (freeze_until or rates):
        raise ConfigError(f"{group} is frozen for the whole run, and has "
                          f"{rates[0] if rates else f'freeze_until = {freeze_until}'}; leave out one of them")
    factor = 1.0 if not rates else lr / base if lr is not None else lr_factor
    return factor, math.inf if frozen else float(freeze_until)        # type: ignore[return-value]


def apply(groups: Sequence[Group], parameters: Iterable[tuple[str, Any]]) -> None:
    """Freezes the parameters of groups that are not trained at first. ConfigError, by name, for a pattern without a parameter."""
    named = list(parameters)
    for group in groups:
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise ConfigError(f'optimizer.groups: params = "{pattern}" names no parameter of the model'
                                  f'{nearest(pattern, [name for name, _ in named])}')
    of_each = [group_of(groups, name) for name, _ in named]
    for group in groups:
        if not any(found is group for found in of_each):
            raise ConfigError(f"{group} has no parameter: all that its params match are in groups before it, and the first one "
                              "counts")
    if named and all(found is not None and found.start == math.inf for found in of_each):
        raise ConfigError("optimizer.groups freeze every parameter of the model, so that nothing is trained; leave one out")
    for (_, parameter), found in zip(named, of_each):
        if found is not None and found.start > 0:
            parameter.trained_from, parameter.requires_grad = found.start, False


def group_of(groups: Sequence[Group], name: str) -> Group | None:
    """The first group that has the parameter."""
    return next((group for group in groups if group.matches(name)), None)


class Subset:
    """Some segments of a storage, as one of its own: an `optimizer.Storage`. Whoever has the whole rounds its copies."""

    compute = None

    def __init__(self, storage: Any, segments: Sequence[Segment]):
        self.whole, self.allocate = storage, storage.allocate
        self.segments: list[Any] = []
        self.places: list[slice] = []                         # of the segments in the storage
        self.size = 0
        for s in segments:
            self.places.append(slice(s.start, s.stop))
            self.segments.append(replace(s, start=self.size, stop=self.size + s.stop - s.start))  # type: ignore[type-var]
            self.size = -(-(self.size + s.stop - s.start) // ALIGN) * ALIGN
        self.by_name = {s.name: (s, own) for s, own in zip(segments, self.segments)}
        self.values: Any = self.strips(storage.values) if storage.values is not None else None

    def strips(self, flat: Any) -> Strips:
        return Strips(flat, self)

    def own(self, segments: Sequence[Any]) -> list[Any]:
        """Those of the storage's segments, or parts of them, that are here, as they lie here."""
        found = []
        for part in segments:
            if part.name in self.by_name:
                whole, own = self.by_name[part.name]
                shift = own.start - whole.start
                found.append(replace(part, start=part.start + shift, stop=part.stop + shift))
        return found

    def memory(self, size: int, allocate: Allocate | None = None) -> Array:
        flat: Array = self.whole.memory(size, allocate or self.allocate)
        return flat

    def new_flat(self, allocate: Allocate | None = None) -> Array:
        flat = self.memory(self.size, allocate)
        flat.fill(0)
        return flat

    def views(self, flat: Array) -> list[Array]:
        return [flat[s.start:s.stop].reshape(s.shape) if hasattr(s, "shape") else flat[s.start:s.stop] for s in self.segments]

    def refresh(self, segments: Sequence[Any] | None = None) -> None:
        """Nothing: there is no `compute` here."""

    def attach_gradients(self) -> Array:
        raise GraphError("a group of parameters is updated by its optimizer")


class Strips:
    """A flat array of the whole storage, seen as one of a subset: ``strips[a:b]`` lies in one parameter."""

    def __init__(self, flat: Any, subset: Subset):
        self.flat, self.subset, self.shape = flat, subset, (subset.size,)
        self.starts = {own.start: place.start - own.start for own, place in zip(subset.segments, subset.places)}
        self.ordered = sorted(self.starts)

    def __getitem__(self, part: slice) -> Array:
        start = self.place(part.start)
        found: Array = self.flat[start:start + part.stop - part.start]
        return found

    def place(self, start: int) -> int:
        """Where the subset's element `start` lies in `flat`."""
        from bisect import bisect_right
        shift: int = self.starts[self.ordered[bisect_right(self.ordered, start) - 1]]
        return start + shift


class Grouped(Optimizer):
    """An optimizer whose parameters follow several rules; `make` makes each, with the rate and the keys of its group.

    Parameters in no group follow the plain rule, if there is one for `others`, else they are left alone.
    """

    def __init__(self, make: Make, storage: Any, groups: Sequence[Group], lr: float, *, others: bool = True):
        everyone = [*groups, *([Group(("*",))] if others else [])]
        self.rules: list[tuple[Group, Subset, Optimizer]] = []
        chosen: dict[int, list[Any]] = {}
        for s in storage.segments:
            found = group_of(everyone, s.parameter.key or s.name)
            if found is not None:
                chosen.setdefault(everyone.index(found), []).append(s)
        for i, group in enumerate(everyone):
            if group.start < math.inf:
                subset = Subset(storage, chosen.get(i, []))
                rule = self._rule(make, subset, group, lr, named=i < len(groups))
                if rule.needs_closure:
                    raise ConfigError(f"{type(rule).__name__} has one rule for all parameters; leave out optimizer.groups")
                rule._follows = {}
                self.rules.append((group, subset, rule))
        if not self.rules:
            raise ConfigError("optimizer.groups: every group is frozen, so that nothing is left to train")
        super().__init__(storage, lr)
        self.everyone = everyone
        self.whole_parameters = any(rule.whole_parameters for _, _, rule in self.rules)
        self.sends = any(rule.sends for _, _, rule in self.rules)
        self.state = {f"{kind} of group {i}": flat for i, (_, _, rule) in enumerate(self.rules)
                      for kind, flat in rule.state.items()}

    @staticmethod
    def _rule(make: Make, subset: Subset, group: Group, lr: float, *, named: bool) -> Optimizer:
        try:
            return make(subset, {"lr": lr * group.factor, **group.keys})
        except ConfigError as error:
            raise ConfigError(f"{group}: {error.message}") if named else error from None

    @property
    def title(self) -> str:
        return self.rules[0][2].title

    def state_size(self, parameter: Any) -> int:
        found = group_of(self.everyone, parameter.key)
        return next((rule.state_size(parameter) for group, _, rule in self.rules if group is found), 0)

    def held(self) -> list[Held]:
        def among(group: Group) -> Callable[[str], bool]:
            return lambda name: group_of(self.everyone, name) is group
        return [one._replace(among=among(group)) for group, _, rule in self.rules for one in rule.held()]

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        for group, subset, rule in self.rules:
            own = None if segments is None else subset.own(segments)
            if step > group.start and (own is None or own):
                rule.update(subset.strips(gradients), lr=lr * group.factor, step=step - int(group.start), scale=scale,
                            segments=own, numbers=numbers)
        self.steps = step

    def averaged_weights(self, segments: Sequence[Segment] | None = None) -> Iterator[tuple[Segment, Array]]:
        for _, subset, rule in self.rules:
            yield from rule.averaged_weights(None if segments is None else subset.own(segments))

    def restart(self) -> None:
        for _, _, rule in self.rules:
            rule.restart()
        self.steps = 0

    def step(self) -> Any:
        """One update from the parameters' own gradients; then groups are thawed whose next step is their first."""
        super().step()
        for s in self.storage.segments:
            if 0 < s.parameter.trained_from < math.inf:
                s.parameter.requires_grad = self.steps >= s.parameter.trained_from


def of_list(kind: Callable[..., Optimizer], entries: Iterable[Any], lr: float | None, keys: Mapping[str, Any]) -> Grouped:
    """The optimizer of a list of groups, or of parameters, of one model that has memory."""
    if hasattr(entries, "requires_grad"):
        raise ConfigError(f"an optimizer takes a model, or a list of parameters or groups, not one {type(entries).__name__}; put "
                          "it into a list")
    listed = list(entries)
    tables = [entry if isinstance(entry, Mapping) else {"params": [entry]} for entry in listed]
    tables = tables if any(isinstance(entry, Mapping) for entry in listed) else [{"params": listed}]
    tables = [{**table, "params": as_list(table.get("params", ()))} for table in tables]
    for p in (p for table in tables for p in table["params"] if not isinstance(p, str) and not hasattr(p, "home")):
        raise ConfigError(f"an optimizer trains the parameters of a model, not a {type(p).__name__}; keep what is trained as an "
                          "nn.Parameter of a Module")
    homes = {id(p.home): p.home for table in tables for p in table.get("params", ()) if not isinstance(p, str)}
    if not homes:
        found = ", ".join(repr(table["params"]) for table in tables if table["params"])
        raise ConfigError(f"the groups of an optimizer have {f'patterns alone ({found})' if found else 'no parameters'}, which "
                          "name no model; give at least one group its parameters: [p for name, p in model.named_parameters() "
                          "if ...]")
    storages = [home() for home in homes.values() if home is not None]
    if len({id(s) for s in storages}) != 1 or storages[0] is None:
        raise GraphError("an optimizer of a list of parameters needs parameters of one model with memory; call initialize() on "
                         "the model first, or give the model itself")
    rate = float(parameters_of(kind)["lr"].default) if lr is None else lr
    groups = [read_group(table, kind, rate) for table in tables]
    apply(groups, [(s.parameter.key, s.parameter) for s in storages[0].segments])
    return Grouped(lambda storage, more: kind(storage, **{**keys, **more}), storages[0], groups, rate, others=False)


def as_list(params: Any) -> Any:
    return params if isinstance(params, str) else [params] if hasattr(params, "requires_grad") else list(params)
