"""The stand-in finds streams that do not wait for each other; and what uses several streams is watched by its tests."""

from __future__ import annotations

from typing import Any

import fakecuda
import numpy as np
import pytest
from device_races import watched
from fakegpu import put, xp

from mpitrain.comm.messages.buffers import Pools, Staged


def there_and_back(array: Any) -> None:
    staged = Staged(array, Pools())
    staged.wait()
    staged.host += 1
    staged.close()
    array += 1


def test_streams_that_wait_for_each_other_race_for_nothing() -> None:
    with watched():
        array = put(np.zeros(8))
        array += 1
        there_and_back(array)
        there_and_back(array[2:5])
    np.testing.assert_array_equal(array.get(), [3, 3, 5, 5, 5, 3, 3, 3])


@pytest.mark.parametrize(("forgets", "said"), [(0, "a copy to the host and __iadd__ of another stream are in no order"),
                                               (1, "__iadd__ and a copy from the host of another stream are in no order")])
def test_a_wait_that_is_missing_is_found_on_the_way_down_and_up(monkeypatch: pytest.MonkeyPatch, forgets: int, said: str) -> None:
    waits, wait_event = [], fakecuda.Stream.wait_event

    def forgetful(stream: Any, event: Any) -> None:
        waits.append(event)
        if len(waits) - 1 != forgets:
            wait_event(stream, event)
    monkeypatch.setattr(fakecuda.Stream, "wait_event", forgetful)
    with watched(), pytest.raises(AssertionError, match=said):
        array = put(np.zeros(8))
        array += 1
        there_and_back(array)


def test_reading_together_is_no_race_and_writing_elsewhere_neither() -> None:
    other = fakecuda.Stream()
    with watched():
        array = put(np.zeros(8))
        array += 1
        other.wait_event(fakecuda.get_current_stream().record())
        with other:
            array[:4].sum()
            array[4:] += 1
        array[:4].sum()
        with pytest.raises(AssertionError, match="in no order"):
            xp.add(array, 1)


def test_what_the_host_has_waited_for_is_before_all_that_it_asks_for_then() -> None:
    other = fakecuda.Stream()
    with watched():
        array = put(np.zeros(8))
        with other:
            array += 1
        other.synchronize()
        array += 1


def test_a_late_copy_is_not_there_when_another_streams_event_is() -> None:
    other, here = fakecuda.Stream(), np.zeros(3)
    with fakecuda.lagging(1):
        put(np.ones(3)).get(stream=other, out=here, blocking=False)
        fakecuda.get_current_stream().record().synchronize()
        assert (here == 0).all()
        other.record().synchronize()
        assert (here == 1).all()
