"""Validation of [privacy]."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpitrain.config.messages import Refusal, toml, written
from mpitrain.config.sections import Config, keys_of
from mpitrain.config.topology import ACCOUNTANTS, PrivacyConfig
from mpitrain.errors import nearest

SEEDED = "seeded"


def noise_of(privacy: PrivacyConfig) -> tuple[float, bool] | None:
    """The noise over the clip (0: to be found for an epsilon), and whether it is of a known seed; None for what is neither."""
    if not isinstance(privacy.noise, str):
        return privacy.noise, False
    word, colon, text = privacy.noise.partition(":")
    try:
        return (float(text) if colon else 0.0, True) if word == SEEDED else None
    except ValueError:
        return None


def privacy(config: Config) -> Iterator[Refusal]:
    p = config.privacy
    if p.unit == "none":
        given = [key for key in keys_of("privacy") if getattr(p, key) != getattr(PrivacyConfig, key)]
        if given:
            yield (f"privacy.{given[0]} is there, and nobody is hidden; set privacy.unit to \"client\" or \"sample\", or leave "
                   f"privacy.{given[0]} out", (f"privacy.{given[0]}", "privacy.unit"))
        return
    if (p.unit == "client") != bool(config.workers.count):
        yield ('privacy.unit = "client" hides clients of a federation, and there is none; set workers.count, or privacy.unit = '
               '"sample"' if p.unit == "client" else
               'privacy.unit = "sample" bounds each row, and the workers of a federation send what many rows have changed; set '
               'privacy.unit = "client"', ("privacy.unit", "workers.count"))
    if not p.clip > 0:
        yield f"privacy.clip must be more than 0, found {written(p.clip)}", ("privacy.clip",)
    if not 0 < p.delta < 1:
        yield (f"privacy.delta must be more than 0 and below 1, found {written(p.delta)}; the chance that epsilon does not hold "
               "is chosen well below 1 / the number of clients or rows", ("privacy.delta",))
    if p.accountant not in ACCOUNTANTS and ":" not in p.accountant:
        yield f'privacy.accountant = "{p.accountant}" is not there{nearest(p.accountant, ACCOUNTANTS)}', ("privacy.accountant",)
    if config.train.on_nan != "stop":
        yield (f'train.on_nan = "{config.train.on_nan}" leaves out what all others have added to a step where a single part of '
               'it is not finite, which neither clip nor noise bounds; with [privacy] set train.on_nan = "stop"',
               ("train.on_nan", "privacy.unit"))
    yield from amount(config)
    yield from sums(config)


def amount(config: Config) -> Iterator[Refusal]:
    """Noise is given, or found for an epsilon."""
    p, keys = config.privacy, ("privacy.noise", "privacy.epsilon")
    found = noise_of(p)
    if found is None or not 0 <= found[0] < math.inf:
        yield (f'privacy.noise must be a number of 0 or more, or "seeded:1.1" for tests, found {toml(p.noise)}', keys)
    elif p.epsilon < 0:
        yield f"privacy.epsilon must be more than 0, found {written(p.epsilon)}", keys
    elif found[0] and p.epsilon:
        yield (f"privacy.noise = {toml(p.noise)} and privacy.epsilon = {written(p.epsilon)} are both given, and noise is found "
               "for an epsilon; leave one of them out", keys)
    elif not (found[0] or p.epsilon):
        but = ", though privacy.secure = true: masks hide each client's part, and the sum tells of them" if p.secure else ""
        yield (f"privacy.noise = {written(p.noise)} hides nobody{but}; set privacy.noise to 1.0, say, or privacy.epsilon to what "
               "it may cost", keys)


def sums(config: Config) -> Iterator[Refusal]:
    p = config.privacy
    for key in ("secure", "threshold") if p.unit == "sample" else ():
        if getattr(p, key) != getattr(PrivacyConfig, key):
            yield (f'privacy.{key} is for privacy.unit = "client": rows of a run have no keys of their own; leave it out',
                   (f"privacy.{key}", "privacy.unit"))
    if p.unit == "client" and p.sampling != PrivacyConfig.sampling:
        yield (f'privacy.sampling = "{p.sampling}" is for rows; how clients are drawn, workers.each_round says; leave it out',
               ("privacy.sampling", "privacy.unit"))
    if p.unit == "client" and p.by_row:
        yield ('privacy.by_row = true is for privacy.unit = "sample": of a client, the whole change is clipped; leave it out',
               ("privacy.by_row", "privacy.unit"))
    if p.unit == "client" and not p.secure and p.threshold != PrivacyConfig.threshold:
        yield (f"privacy.threshold = {written(p.threshold)} is for privacy.secure = true; leave it out",
               ("privacy.threshold", "privacy.secure"))
    if not 0.5 < p.threshold <= 1:
        yield (f"privacy.threshold must be more than 0.5, at most 1, found {written(p.threshold)}: with half of the clients, "
               "each half could be asked for another secret of one client", ("privacy.threshold",))
    if p.unit == "client" and config.workers.correct.partition(":")[0] not in ("", "prox"):
        yield (f'workers.correct = "{config.workers.correct}" makes clients send more than the change that privacy.clip bounds; '
               'leave it out, or set "prox:0.1"', ("workers.correct", "privacy.unit"))
