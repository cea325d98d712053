"""The secure sum against the plain sum of integers, with clients that go at any time; what a single vector tells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpitrain.errors import ConfigError, NumericsError, PrivacyError
from mpitrain.privacy import key_agreement
from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.secret_sharing import PRIME, join, split
from mpitrain.privacy.secure_round import SecureRound
from mpitrain.privacy.secure_sum import Client, Opened, least, left_masks, secrets_of, take_off


class Alone:
    """The channel of one rank."""

    rank, size = 0, 1

    def allreduce(self, array: object, *, name: str) -> None:
        pass


def shared(numbers: list[int], threshold: int) -> dict[int, Client]:
    """Clients after step 1."""
    clients = {n: Client(n) for n in numbers}
    everyone = {n: client.public for n, client in clients.items()}
    for sender, texts in {n: client.share(everyone, threshold) for n, client in clients.items()}.items():
        for to, sealed in texts.items():
            clients[to].receive(sender, sealed)
    return clients


def summed(clients: dict[int, Client], values: dict[int, np.ndarray], came: list[int], there: list[int], threshold: int
           ) -> np.ndarray:
    """Steps 2 and 3."""
    total = sum((clients[n].masked(values[n]) for n in came), np.zeros(len(values[came[0]]) if came else 0, np.uint32))
    seeds, secrets = secrets_of({n: clients[n].open(came) for n in there}, threshold)
    gone = {n: secrets[n] for n in clients if n not in came}
    take_off(total, left_masks(seeds, gone, {n: client.public for n, client in clients.items()}, came))
    return total


def words(count: int, length: int = 7, seed: int = 0) -> dict[int, np.ndarray]:
    return {n: np.random.default_rng((seed, n)).integers(0, 2 ** 32, length, dtype=np.uint32) for n in range(count)}


def test_eight_clients_two_gone_before_and_two_after_their_vectors() -> None:
    values, threshold = words(8, 1000), 4
    clients = shared([0, 1, 3, 4, 6, 7], threshold)           # 2 and 5 never shared keys
    found = summed(clients, values, [0, 1, 3, 4, 6, 7], [0, 3, 6, 7], threshold)
    assert (found == sum(values[n] for n in clients)).all()


def test_all_ways_in_which_five_clients_can_go() -> None:
    """Each sends nothing, sends and goes, or stays: the plain sum of what came, or a refusal in which nobody opens a share."""
    values, threshold, clients = words(5), 3, shared([0, 1, 2, 3, 4], 3)
    refusals = 0
    for fates in itertools.product(("gone", "sent", "there"), repeat=5):
        came = [n for n, fate in enumerate(fates) if fate != "gone"]
        there = [n for n, fate in enumerate(fates) if fate == "there"]
        if len(there) >= threshold:
            assert (summed(clients, values, came, there, threshold) == sum(values[n] for n in came)).all(), fates
            continue
        refusals += 1
        with pytest.raises(PrivacyError, match=r"privacy.threshold asks for 3: the sum stays masked"):
            summed(clients, values, came, there, threshold)
        if len(came) < threshold:
            for client in clients.values():
                with pytest.raises(PrivacyError, match="send a vector"):
                    client.open(came)
    assert refusals == 3 ** 5 - sum(1 for fates in itertools.product(range(3), repeat=5) if fates.count(2) >= 3)


def test_fewer_shares_than_the_threshold_tell_nothing() -> None:
    """Two shares of three: for any secret there is a third share that goes with them."""
    secret = 1 << 255
    shares = split(secret, [1, 2, 3, 4], 3)
    assert join(shares) == join({x: shares[x] for x in (1, 2, 4)}) == secret
    assert join({x: shares[x] for x in (1, 2)}) != secret
    other = 12345                                             # the polynomial through (0, other) and the two shares exists
    third = (3 * shares[2] - 3 * shares[1] + other) % PRIME   # its third difference, f(3) - 3 f(2) + 3 f(1) - f(0), is zero
    assert join({1: shares[1], 2: shares[2], 3: third}) == other


def test_one_uploaded_vector_is_uniform_bits() -> None:
    """Zeros under masks: each bit position, and bytes by chi-square, at 4.5 standard errors."""
    clients = shared([0, 1, 2], 2)
    sent = clients[1].masked(np.zeros(1 << 16, np.uint32))
    bits = np.unpackbits(sent.view(np.uint8)).reshape(-1, 32)
    assert np.abs(bits.mean(0) - 0.5).max() < 4.5 * 0.5 / 2 ** 8
    assert abs(correlation(bits)) < 4.5 / np.sqrt(bits.size)
    seen = np.bincount(sent.view(np.uint8), minlength=256)
    assert abs(((seen - seen.mean()) ** 2 / seen.mean()).sum() - 255) < 4.5 * np.sqrt(2 * 255)
    plain = FixedPoint(1.0, 3).encode(np.random.default_rng(0).normal(0, 0.01, 1 << 16)).view(np.uint8)
    assert correlation(np.unpackbits(plain).reshape(-1, 32)) > 0.1      # so the test can fail


def correlation(bits: np.ndarray) -> float:
    """Of a bit with the next one of its word."""
    return float(np.corrcoef(bits[:, :-1].ravel(), bits[:, 1:].ravel())[0, 1])


def test_masks_differ_in_each_round() -> None:
    first, second = shared([0, 1, 2], 2), shared([0, 1, 2], 2)
    zeros = np.zeros(100, np.uint32)
    assert (first[0].masked(zeros) != second[0].masked(zeros)).any()
    assert len({client.public.mask for client in (*first.values(), *second.values())}) == 6


def test_nobody_tells_both_secrets_of_one_client() -> None:
    clients = shared([0, 1, 2, 3], 3)
    opened = {n: clients[n].open([0, 1, 2]) for n in (0, 1, 2)}
    assert all(one.own_mask == (one.of != 3) for found in opened.values() for one in found)
    opened[2] = clients[2].open([0, 1, 2, 3])                 # somebody was told that the vector of 3 had come
    with pytest.raises(PrivacyError, match="both secrets of client 3"):
        secrets_of(opened, 3)


def test_a_changed_message_or_share_is_found() -> None:
    clients = {n: Client(n) for n in range(3)}
    everyone = {n: client.public for n, client in clients.items()}
    sealed = {n: client.share(everyone, 2) for n, client in clients.items()}
    for wrong in (sealed[0][1][:-1] + bytes([sealed[0][1][-1] ^ 1]), sealed[0][2], bytes(len(sealed[0][1]))):
        with pytest.raises(PrivacyError, match="client 1 got no shares of client 0"):
            clients[1].receive(0, wrong)
    with pytest.raises(PrivacyError, match="another secret than its own"):
        left_masks({0: 1}, {2: 5}, everyone, [0])
    with pytest.raises(PrivacyError, match="told by too few"):
        left_masks({}, {}, everyone, [0])


@pytest.mark.parametrize("number", [0, 1, key_agreement.PRIME - 1, key_agreement.PRIME])
def test_a_public_number_that_fixes_the_key_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="lies between 1"):
        key_agreement.agree(5, number, "mask")


def test_the_group_is_that_of_the_rfc() -> None:
    """2^2048 - 2^1984 - 1 + 2^64 (floor(2^1918 pi) + 124476), with pi by Machin's formula; and both keys are one."""
    one = 1 << 1984

    def arctan(x: int) -> int:
        term = total = one // x
        k = 1
        while term:
            term //= -x * x
            k += 2
            total += term // k
        return total
    pi = 4 * (4 * arctan(5) - arctan(239))
    assert 2 ** 2048 - 2 ** 1984 - 1 + 2 ** 64 * ((pi >> (1984 - 1918)) + 124476) == key_agreement.PRIME
    a, b = key_agreement.new_key_pair(), key_agreement.new_key_pair()
    assert key_agreement.agree(a.secret, b.public, "x") == key_agreement.agree(b.secret, a.public, "x") \
        != key_agreement.agree(a.secret, b.public, "y")


@pytest.mark.parametrize("threshold, count, wanted", [(0.6, 6, 4), (0.6, 5, 3), (0.51, 8, 5), (1.0, 8, 8), (2 / 3, 9, 6)])
def test_how_many_must_answer(threshold: float, count: int, wanted: int) -> None:
    assert least(threshold, count) == wanted


@pytest.mark.parametrize("threshold", [0.5, 0.0, -1.0, 1.1, float("nan")])
def test_half_of_the_clients_is_too_few(threshold: float) -> None:
    with pytest.raises(ConfigError, match="privacy.threshold must be more than 0.5, at most 1, found"):
        least(threshold, 8)


def test_fixed_point_rounds_once_and_sums_exactly() -> None:
    numbers = FixedPoint(1.0, 10)
    assert np.log2(numbers.scale) == int(np.log2(numbers.scale)) == 27 and 10 * numbers.scale < 2 ** 31
    values = np.random.default_rng(0).uniform(-1, 1, (10, 999)).astype(np.float32)
    values[:, 0], values[:, 1] = 1.0, -1.0
    total = sum((numbers.encode(row) for row in values), np.zeros(999, np.uint32))
    rounded = np.rint(values.astype(np.float64) * numbers.scale) / numbers.scale
    assert (numbers.decode(total) == rounded.sum(0)).all()
    assert numbers.decode(total)[0] == 10 and numbers.decode(total)[1] == -10


@pytest.mark.parametrize("arguments", [(1.0, 10, 2.0 ** 28), (1.0, 1 << 24), (1e-300, 1 << 31)])
def test_sums_that_would_not_fit_are_refused(arguments: tuple) -> None:
    with pytest.raises(ConfigError, match=r"integers below 2\^31, and clients \* privacy.clip \* scale = .* does not fit"):
        FixedPoint(*arguments)


@pytest.mark.parametrize("value", [1.001, -1.001, float("nan"), float("inf")])
def test_a_value_beyond_the_clip_is_refused(value: float) -> None:
    with pytest.raises(NumericsError, match="beyond privacy.clip = 1"):
        FixedPoint(1.0, 10).encode([0.0, value])


def test_a_round_on_one_rank() -> None:
    values = np.random.default_rng(0).normal(0, 0.1, (6, 50)).clip(-1, 1)
    numbers = FixedPoint(1.0, 6)
    secure = SecureRound(Alone(), range(6), range(6), numbers, 50, 0.6)
    assert secure.threshold == 4 and "secret" not in repr(secure.own[0])
    for n in (0, 1, 2, 4, 5):
        secure.add(n, values[n])
    found = secure.finish(lambda n: n != 2)
    assert (found == np.rint(values[[0, 1, 2, 4, 5]] * numbers.scale).sum(0) / numbers.scale).all() and not secure.own


def test_a_round_of_too_few_tells_nothing() -> None:
    secure = SecureRound(Alone(), range(6), range(6), FixedPoint(1.0, 6), 5, 0.6)
    for n in range(4):
        secure.add(n, np.zeros(5))
    with pytest.raises(PrivacyError, match="3 clients answer at the end, and privacy.threshold asks for 4"):
        secure.finish(lambda n: n != 2)
    assert secure.total.any()                                 # still masked
    with pytest.raises(PrivacyError, match="1 clients share keys, and privacy.threshold asks for 2"):
        SecureRound(Alone(), [3], [3], FixedPoint(1.0, 6), 5, 0.6)


def test_opened_is_plain_data() -> None:
    assert Opened(1, True, 5) == (1, True, 5)
