"""A reader of pickles that knows tensors in plain containers, and runs nothing: a machine of our own with the few instructions
that `torch.save` writes for a state_dict.

Python's `pickle` is not used: whatever it allows, a hostile file may make it allocate without end (a memo of 2^32 places) or
crash it (a key that is nested a million deep). Here each instruction makes at most one object, and keys are words and numbers.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpitrain.interchange.tensors import shown

STORAGES = {"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
            "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
            "BoolStorage": "bool"}
KNOWN = ("collections.OrderedDict", "torch.Size", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
         *(f"torch.{name}" for name in STORAGES))
KEYS = (str, int, bool, float, bytes, type(None))
LONGEST_NUMBER = 16                               # bytes of a whole number; PyTorch writes places and sizes, of 8 at most


class PickleError(ValueError):
    """The pickle is damaged, or wants something that a table of tensors does not need."""


class Global(NamedTuple):
    """The name of one of KNOWN; it is never imported."""

    name: str


class StorageOf(NamedTuple):
    """The numbers of tensors: the file `key` of the archive."""

    dtype: str
    key: str
    size: int


class Described(NamedTuple):
    """A tensor: places `offset` + i . strides of a storage."""

    storage: StorageOf
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class _Machine:
    data: bytes
    place: int = 0

    def __post_init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def take(self, n: int) -> bytes:
        found = self.data[self.place:self.place + n]
        if len(found) < n or n < 0:
            raise PickleError(f"it ends {n - len(found)} bytes early")
        self.place += n
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.place)
        if end < 0:
            raise PickleError("a name does not end")
        return self.take(end + 1 - self.place)[:-1].decode()

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise PickleError("an instruction takes what is not there")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise PickleError(f"an instruction wants a {kind.__name__}")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise PickleError("an instruction wants a mark, and there is none")
        found = self.stack[(mark := self.marks.pop()):]
        del self.stack[mark:]
        return found


def load(data: bytes) -> Any:
    """What the pickle describes: dicts, lists and tuples of plain values and `Described` tensors. PickleError, which says what is
    wrong or which name it asks for, for everything else."""
    machine = _Machine(data)
    try:
        while (code := machine.take(1)) != b".":
            act = ACTS.get(code)
            if act is None:
                raise PickleError(f"it has the instruction {_called(code)}, which no table of tensors needs")
            act(machine)
        return machine.pop()
    except (UnicodeDecodeError, struct.error) as error:
        raise PickleError(f"it cannot be read: {shown(str(error))}") from None


def _called(code: bytes) -> str:
    return next((op.name for op in pickletools.opcodes if op.code.encode("latin-1") == code), f"{code[0]}")


def _global(m: _Machine, module: Any, name: Any) -> Global:
    full = f"{module}.{name}"
    if full not in KNOWN:
        raise PickleError(f"it asks for {shown(full)[1:-1]}, which is no tensor and no plain container: nothing of it is run; "
                          "save the state_dict alone, torch.save(model.state_dict(), FILE)")
    return Global(full)


def _stack_global(m: _Machine) -> Global:
    name = m.pop()
    return _global(m, m.pop(), name)


def _persistent(m: _Machine) -> StorageOf:
    match m.pop():
        case ("storage", Global(name), str(key), str(), int(size)) if name.startswith("torch.") and name[6:] in STORAGES:
            return StorageOf(STORAGES[name[6:]], key, size)
    raise PickleError("a storage is not described as torch.save does it")


def _reduce(m: _Machine) -> Any:
    arguments, function = m.pop(), m.pop()
    match function, arguments:
        case Global("collections.OrderedDict"), ():
            return {}
        case Global("torch.Size"), (tuple() | list() as sizes,):
            return tuple(sizes)
        case Global("torch._utils._rebuild_parameter"), (Described() as tensor, bool(), *_):
            return tensor
        case Global("torch._utils._rebuild_tensor_v2"), (StorageOf() as storage, int(start), tuple(shape), tuple(strides), *more):
            if any(more[2:]):                     # requires_grad and hooks come before
                raise PickleError("a tensor is kept as the negative or the conjugate of what lies there; save it as it is "
                                  "(tensor.resolve_neg())")
            if len(shape) == len(strides) and all(type(n) is int for n in (*shape, *strides)):
                return Described(storage, start, shape, strides)
    called = function.name if isinstance(function, Global) else "what is no function"
    raise PickleError(f"it calls {called} with what a state_dict does not")


def _set(m: _Machine, pairs: list[Any]) -> None:
    if len(pairs) % 2:
        raise PickleError("a key has no value")
    table = m.top(dict)
    for key, value in zip(pairs[::2], pairs[1::2]):
        if type(key) not in KEYS:
            raise PickleError(f"a key is a {type(key).__name__}, expected a word or a number")
        table[key] = value


def _extend(m: _Machine, values: list[Any]) -> None:
    m.top(list).extend(values)


def _build(m: _Machine) -> None:
    """A state for the object on top: of a state_dict its `_metadata`, which is no tensor; it is passed over."""
    m.pop()
    m.top(dict)


def _get(m: _Machine, place: int) -> Any:
    if place not in m.memo:
        raise PickleError("it asks for an object that it has not made")
    return m.memo[place]


def _put(m: _Machine, place: int) -> None:
    m.memo[place] = m.top(object)


def _long(m: _Machine, form: str) -> int:
    length = m.number(form)
    if not 0 <= length <= LONGEST_NUMBER:
        raise PickleError(f"a whole number of {length} bytes")
    return int.from_bytes(m.take(length), "little", signed=True)


def _tuple(m: _Machine, n: int) -> tuple[Any, ...]:
    return tuple([m.pop() for _ in range(n)][::-1])


def _frame(m: _Machine) -> None:
    m.take(8)                                     # its length says nothing that the instructions do not


def _protocol(m: _Machine) -> None:
    if m.take(1)[0] > 5:
        raise PickleError("its protocol is newer than 5")


def _values() -> Iterator[tuple[bytes, Callable[[_Machine], Any]]]:
    """Instructions that put a value on the stack."""
    yield b"}", lambda m: {}
    yield b"]", lambda m: []
    yield b")", lambda m: ()
    yield b"N", lambda m: None
    yield b"\x88", lambda m: True
    yield b"\x89", lambda m: False
    yield from ((code, lambda m, form=form: m.number(form)) for code, form in (
        (b"K", "<B"), (b"M", "<H"), (b"J", "<i"), (b"G", ">d")))
    yield b"\x8a", lambda m: _long(m, "<B")
    yield b"\x8b", lambda m: _long(m, "<i")
    yield from ((code, lambda m, form=form: m.take(m.number(form)).decode("utf-8", "surrogatepass"))
                for code, form in ((b"X", "<I"), (b"\x8c", "<B"), (b"\x8d", "<Q")))
    yield from ((code, lambda m, form=form: m.take(m.number(form))) for code, form in (
        (b"B", "<I"), (b"C", "<B"), (b"\x8e", "<Q")))
    yield from ((code, lambda m, n=n: _tuple(m, n)) for code, n in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)))
    yield b"t", lambda m: tuple(m.since_mark())
    yield b"h", lambda m: _get(m, m.number("<B"))
    yield b"j", lambda m: _get(m, m.number("<I"))
    yield b"c", lambda m: _global(m, m.line(), m.line())
    yield b"\x93", _stack_global
    yield b"Q", _persistent
    yield b"R", _reduce


def _pushing(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make(m))


ACTS: dict[bytes, Callable[[_Machine], Any]] = {code: _pushing(make) for code, make in _values()} | {
    b"\x80": _protocol, b"\x95": _frame, b"(": lambda m: m.marks.append(len(m.stack)),
    b"q": lambda m: _put(m, m.number("<B")), b"r": lambda m: _put(m, m.number("<I")), b"\x94": lambda m: _put(m, len(m.memo)),
    b"s": lambda m: _set(m, list(_tuple(m, 2))), b"u": lambda m: _set(m, m.since_mark()),
    b"a": lambda m: _extend(m, [m.pop()]), b"e": lambda m: _extend(m, m.since_mark()),
    b"b": _build}
