"""A sum of vectors of which nobody sees an addend (Bonawitz et al., 2017), as plain functions, without messages.

    each client                                               what others see
    0  makes two key pairs                                    two public numbers
    1  draws a seed of its own mask; sends each other client  sealed texts
       a share of it, and of the secret of its mask key
    2  sends  vector + own mask + sum over the others of      a vector that is uniform
         +- the mask that it has in common with each
    3  tells of each client one share: of the seed of its     of each client either the own mask or those in common,
       own mask if its vector has come, else of its secret    and never both

Masks in common cancel in the sum; those of a client that has gone after step 1 do not, and are found from its secret, which the
others' shares tell. A vector that comes late, when its masks in common are known, still has its own. With more than half of the
clients as threshold nobody can ask two halves of them for different shares of one. All of it is integers modulo 2^32.

Clients follow the protocol here: there are no signatures, and who lies about what came from others learns more (the paper's
section 6 has that protocol). Keys are of one round, and lie in memory alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError, PrivacyError, TooFewError
from mpitrain.privacy.key_agreement import PUBLIC_BYTES, KeyPair, agree, mask, new_key_pair, pair_of, seal, unseal
from mpitrain.privacy.secret_sharing import SHARE_BYTES, join, split

SEALED_BYTES = 2 * SHARE_BYTES + 16
Words = np.ndarray[Any, np.dtype[np.uint32]]


class Public(NamedTuple):
    """The numbers that a client shows: one to seal messages for it, one for masks."""

    seal: int
    mask: int

    def to_bytes(self) -> bytes:
        return b"".join(number.to_bytes(PUBLIC_BYTES, "little") for number in self)

    @classmethod
    def from_bytes(cls, text: bytes) -> Public:
        return cls(*(int.from_bytes(text[at:at + PUBLIC_BYTES], "little") for at in (0, PUBLIC_BYTES)))


class Opened(NamedTuple):
    """A client's share of one secret of another."""

    of: int                    # the other client
    own_mask: bool             # a share of its own mask's seed; else of the secret of its masks in common
    share: int


def least(threshold: float, count: int) -> int:
    """How many of `count` clients must answer. ConfigError for a share of them of half or less, or of more than all."""
    if not 0.5 < threshold <= 1:
        raise ConfigError(f"privacy.threshold must be more than 0.5, at most 1, found {threshold:g}: of two halves of the "
                          "clients, each could be asked for another mask of one client")
    return max(1, math.ceil(threshold * count - 1e-9))


@dataclass
class Client:
    """What one client knows in one round; its place among the shares is its number + 1."""

    number: int
    seals: KeyPair = field(default_factory=new_key_pair, repr=False)
    masks: KeyPair = field(default_factory=new_key_pair, repr=False)
    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(32), "little"), repr=False)
    others: dict[int, Public] = field(default_factory=dict, repr=False)
    threshold: int = 0
    shares: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)      # by client: of its seed, of its secret
    keys: dict[tuple[str, int], bytes] = field(default_factory=dict, repr=False)      # those it has agreed on, by purpose

    @property
    def public(self) -> Public:
        return Public(self.seals.public, self.masks.public)

    def share(self, everyone: Mapping[int, Public], threshold: int) -> dict[int, bytes]:
        """Step 1: a sealed text for each other client of the round, of which `threshold` together tell this one's secrets."""
        if len(everyone) < threshold:
            raise refused(len(everyone), threshold, "share keys")
        self.others, self.threshold = {n: public for n, public in everyone.items() if n != self.number}, threshold
        places = [number + 1 for number in everyone]
        seeds, keys = split(self.seed, places, threshold), split(self.masks.secret, places, threshold)
        self.shares[self.number] = seeds[self.number + 1], keys[self.number + 1]
        texts = {n: b"".join(share.to_bytes(SHARE_BYTES, "little") for share in (seeds[n + 1], keys[n + 1])) for n in self.others}
        return {n: seal(self._key("seal", n), text, f"{self.number} to {n}") for n, text in texts.items()}

    def receive(self, sender: int, sealed: bytes) -> None:
        """The end of step 1: a text of another client. PrivacyError where it was changed."""
        try:
            text = unseal(self._key("seal", sender), sealed, f"{sender} to {self.number}")
        except ValueError as error:
            raise PrivacyError(f"client {self.number} got no shares of client {sender}: {error}") from None
        seed, key = (int.from_bytes(text[at:at + SHARE_BYTES], "little") for at in (0, SHARE_BYTES))
        self.shares[sender] = seed, key

    def masked(self, values: Words) -> Words:
        """Step 2: `values` under this client's own mask and those in common with all whose shares have come."""
        if len(self.shares) < self.threshold:
            raise refused(len(self.shares), self.threshold, "share keys")
        total = values + mask(own_mask_key(self.seed), values.size)
        for other in self.shares:
            if other != self.number:
                add_common(total, self.number, other, self._key("mask", other))
        return total

    def open(self, came: Iterable[int]) -> list[Opened]:
        """Step 3: a share of one secret of each client, where the vectors of those that `came` are in the sum. PrivacyError, and
        no share, where they are too few."""
        there = set(came)
        if len(there) < self.threshold:
            raise refused(len(there), self.threshold, "send a vector")
        return [Opened(n, n in there, seed if n in there else key) for n, (seed, key) in sorted(self.shares.items())]

    def _key(self, purpose: str, other: int) -> bytes:
        if (purpose, other) not in self.keys:
            own = self.seals if purpose == "seal" else self.masks
            self.keys[purpose, other] = agree(own.secret, getattr(self.others[other], purpose), purpose)
        return self.keys[purpose, other]


def own_mask_key(seed: int) -> bytes:
    return seed.to_bytes(32, "little")


def add_common(total: Words, client: int, other: int, key: bytes) -> None:
    """Adds the mask that two clients have in common to what one of them sends: the lower adds it, the higher takes it off."""
    if client < other:
        total += mask(key, total.size)
    else:
        total -= mask(key, total.size)


def secrets_of(answers: Mapping[int, Iterable[Opened]], threshold: int) -> tuple[dict[int, int], dict[int, int]]:
    """The seeds of own masks of those whose vectors came, and the secrets of the masks in common of those that have gone, by what
    the clients in `answers` told. PrivacyError below the threshold, or where two told of different secrets of one client."""
    if len(answers) < threshold:
        raise refused(len(answers), threshold, "answer at the end")
    told: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]] = {}, {}        # of secrets, and of seeds
    for teller, opened in sorted(answers.items()):
        for one in opened:
            told[one.own_mask].setdefault(one.of, {})[teller + 1] = one.share
    both = sorted(told[False].keys() & told[True].keys())
    if both:
        raise PrivacyError(f"clients tell shares of both secrets of client {both[0]}: they heard differently of who has gone")
    secrets, seeds = ({of: join(shares) for of, shares in found.items() if len(shares) >= threshold} for found in told)
    return seeds, secrets


def left_masks(seeds: Mapping[int, int], gone: Mapping[int, int], everyone: Mapping[int, Public], came: Iterable[int]
               ) -> list[tuple[int, bytes]]:
    """The masks that are still in the sum of the vectors that `came`, as (sign, key): own ones, and those in common with clients
    that have `gone`, whose secrets are given. PrivacyError where a secret is missing, or is not that of the public number."""
    there = sorted(came)
    missing = [n for n in there if n not in seeds]
    if missing:
        raise PrivacyError(f"the own mask of client {missing[0]} was told by too few")
    masks = [(1, own_mask_key(seeds[n])) for n in there]
    for number, secret in sorted(gone.items()):
        if pair_of(secret).public != everyone[number].mask:
            raise PrivacyError(f"the shares of client {number} that has gone give another secret than its own")
        masks += [(1 if other < number else -1, agree(secret, everyone[other].mask, "mask")) for other in there]
    return masks


def take_off(total: Words, masks: Iterable[tuple[int, bytes]]) -> None:
    """Takes masks off a sum, in place."""
    for sign, key in masks:
        if sign > 0:
            total -= mask(key, total.size)
        else:
            total += mask(key, total.size)


def refused(found: int, threshold: int, did: str) -> TooFewError:
    return TooFewError(f"{found} clients {did}, and privacy.threshold asks for {threshold}: the sum stays masked, and nothing "
                       "was told; draw more clients for a round, or lower privacy.threshold or workers.drop")
