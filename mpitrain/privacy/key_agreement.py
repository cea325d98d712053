"""Two that have never met agree on a key that nobody between them learns; and streams of bits that a key gives.

Diffie and Hellman (1976) in the group of 2048 bits of RFC 3526, number 14. The exponents have 256 bits, twice the strength of
the group. Python's `pow` takes a time that depends on the exponent: whoever can measure it on this machine learns of it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any, NamedTuple

import numpy as np

PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F"
    "14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8"
    "A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C3290"
    "5E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA051015728E5A8AACAA68"
    "FFFFFFFFFFFFFFFF", 16)    # a safe prime: half of it, rounded down, is prime too
GENERATOR = 2
SECRET_BYTES, PUBLIC_BYTES, TAG_BYTES = 32, 256, 16


class KeyPair(NamedTuple):
    """An exponent, which its owner keeps, and GENERATOR to its power, for all to see."""

    secret: int
    public: int


def new_key_pair() -> KeyPair:
    return pair_of(int.from_bytes(os.urandom(SECRET_BYTES), "little"))


def pair_of(secret: int) -> KeyPair:
    return KeyPair(secret, pow(GENERATOR, secret, PRIME))


def agree(secret: int, other: int, purpose: str) -> bytes:
    """The key of 256 bits that two share for one purpose, from one's secret and the other's public number.

    ValueError for a number that makes every key the same: 0, 1, or PRIME - 1.
    """
    if not 1 < other < PRIME - 1:
        raise ValueError("a public number of Diffie-Hellman lies between 1 and the prime less 1")
    common = pow(other, secret, PRIME).to_bytes(PUBLIC_BYTES, "little")
    return hashlib.sha256(purpose.encode() + b"\0" + common).digest()


def stream(key: bytes, nbytes: int, purpose: str) -> bytes:
    """`nbytes` bytes by SHAKE-128, which nobody without the key tells from random ones; of a purpose, always the same."""
    return hashlib.shake_128(len(key).to_bytes(2, "little") + key + purpose.encode()).digest(nbytes)


def mask(key: bytes, length: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`length` words, uniform over the integers modulo 2^32."""
    return np.frombuffer(stream(key, 4 * length, "mask"), "<u4").astype(np.uint32, copy=False)


def seal(key: bytes, text: bytes, place: str) -> bytes:
    """`text` encrypted and signed for one place; a key seals one text of a place."""
    hidden = bytes(a ^ b for a, b in zip(text, stream(key, len(text), f"seal {place}"), strict=True))
    return hidden + _tag(key, hidden, place)


def unseal(key: bytes, sealed: bytes, place: str) -> bytes:
    """The text again. ValueError where a bit of it, or its place, is another."""
    hidden, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, hidden, place)):
        raise ValueError("a sealed message was changed on its way, or is for somebody else")
    return bytes(a ^ b for a, b in zip(hidden, stream(key, len(hidden), f"seal {place}"), strict=True))


def _tag(key: bytes, hidden: bytes, place: str) -> bytes:
    return hmac.digest(stream(key, 32, "tag"), place.encode() + b"\0" + hidden, "sha256")[:TAG_BYTES]
