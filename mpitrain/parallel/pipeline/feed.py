"""Host batches -> a rank's part of them, as arrays on the device, in the number format of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, Device
from mpitrain.data import MicroBatch
from mpitrain.data.columns import Columns
from mpitrain.data.stored import StoredRows
from mpitrain.nn.by_name import ByName


class Feed:
    """`inputs` become the model's dtype unless they are tokens; float `targets` too, labels stay integers. Where `compute`, the
    dtype of activations, has 16 bits, float inputs are rounded to it once they are on the device.

    `part` gives this rank's part of the samples of a host batch (default: all). `StoredRows`, whole samples, go up as they are,
    and the device makes of them what the host would have; so do tokens, which a device makes int64.
    """

    def __init__(self, device: Device, dtype: Any, *, tokens: bool = False, part: Callable[[Any], Any] | None = None,
                 compute: Any = None):
        self.device, self.dtype, self.tokens = device, np.dtype(dtype), tokens
        self.part = part or (lambda x: x)
        self.compute = self.dtype if compute is None else compute
        self._tables: dict[int, tuple[Any, Array]] = {}        # those of StoredRows, by identity: on the host, and on the device

    def tensors(self, x: Any) -> Any:
        """What the model is called with: a tensor of `inputs`, or a `ByName` of `Columns`, whose integers are int64."""
        if isinstance(x, Columns):
            return ByName({name: Tensor(self.rounded(self.device.put(self._by_kind(array)))) for name, array in x.items()})
        return self.here(self.put(self.host_inputs(x)))

    def tensors_of(self, micro: MicroBatch) -> Any:
        """`tensors` of a micro-batch's x, which may have been sent ahead."""
        return self.tensors(micro.x) if micro.there is None else self.here(micro.there[0])

    def here(self, x: Any) -> Tensor:
        """The model's input of inputs that have come to the device as `host_inputs` has them."""
        if isinstance(x, StoredRows):
            return Tensor(self.fill(self.room(x), x))
        return Tensor(self._whole(x) if self.tokens else self.rounded(x))

    def room(self, values: Any) -> Array:
        """Memory of the device for what `fill` makes of a batch like this one."""
        return self.device.xp.empty(values.shape, self.compute if isinstance(values, StoredRows) else values.dtype)

    def fill(self, out: Array, values: Any) -> Array:
        """Writes inputs or targets, on the host yet or on the device, into `out` of `room`; of `StoredRows` what the model is
        given."""
        if isinstance(values, StoredRows):
            from mpitrain.kernels.feed import stored_rows  # few runs have a device
            x = self.put(values)
            images = x.shape if len(x.shape) == 4 else (x.shape[0], math.prod(x.shape[1:]), 1, 1)
            stored_rows(out.reshape(images), x.values.reshape(images), self._table(x), x.moves)
        elif isinstance(values, np.ndarray):
            out.set(np.ascontiguousarray(values, out.dtype))
        else:
            out[...] = values
        return out

    def _table(self, x: StoredRows) -> Array | None:
        """The table of `x` on the device, in the format of activations; it goes up once."""
        if x.table is None:
            return None
        found = self._tables.get(id(x.table))
        if found is None:
            found = self._tables[id(x.table)] = x.table, self.rounded(self.device.put(self._cast(x.table)))
        return found[1]

    def put(self, x: Any) -> Any:
        """On the device, what `host_inputs` and `host_targets` give."""
        return x.through(lambda array, name: self.device.put(array)) if isinstance(x, StoredRows) else self.device.put(x)

    def targets_of(self, micro: MicroBatch) -> Array:
        return self.targets(micro.y) if micro.there is None else self.targets_here(micro.there[1])

    def targets_here(self, y: Array) -> Array:
        """The targets that a loss gets, of those that have come to the device as `host_targets` has them."""
        return self._whole(y) if self.tokens else y

    def _whole(self, tokens: Array) -> Array:
        """Tokens on a device as int64, which losses and users' models may count on; on the host they are."""
        narrow = self.device.xp is not np and tokens.dtype.kind in "iu" and tokens.dtype.itemsize < 8
        return tokens.astype("int64") if narrow else tokens

    def _by_kind(self, values: Any) -> Any:
        if values.dtype.kind == "b":
            return values
        return self._cast(values) if values.dtype.kind == "f" else values.astype(np.int64, copy=False)

    def inputs(self, x: Any) -> Array:
        return self.here(self.put(self.host_inputs(x))).array

    def host_inputs(self, x: Any) -> Any:
        """The inputs of a host batch before they go to the device."""
        if isinstance(x, StoredRows):
            return x if x.table is not None else replace(x, values=self._cast(x.values))
        x = self.part(x)
        return x if self.tokens else self._cast(x)

    def targets(self, y: Any) -> Array:
        return self.targets_here(self.device.put(self.host_targets(y)))

    def host_targets(self, y: Any) -> Any:
        """`targets` before they go to the device."""
        y = self.part(y)
        return self._cast(y) if y.dtype.kind == "f" else y

    def rounded(self, values: Array) -> Array:
        """Values of the device in the format of activations; integers as they are."""
        return values.astype(self.compute) if self.compute != self.dtype and values.dtype == self.dtype else values

    def _cast(self, values: Any) -> Any:
        return values if values.dtype == self.dtype else values.astype(self.dtype)
