"""The check that ranks run the same collective: a sequence number and a signature, sent ahead to the next rank.

Open MPI adds up whatever arrives: two ranks that reduce two buckets in swapped order get wrong sums and exit code 0. So each
collective sends one small header around the fixed ring rank -> rank + 1, whatever its algorithm, and each rank compares what
it gets with its own: when not all ranks agree, at least one pair of neighbours differs and raises. The tag of the data messages
is made of the sequence number and a checksum of the signature, so data of different collectives does not meet in the meantime.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

HEADER_BYTES = 128
_LAYOUT = struct.Struct(f"<QI{HEADER_BYTES - 12}s")


class Signature(NamedTuple):
    """Operation, dtype, count and name as text, and the checksum of the whole text (the header has room for its start)."""

    text: str
    checksum: int

    @classmethod
    def of(cls, operation: str, name: str, dtype: str, count: int) -> Signature:
        text = f"{operation} {dtype}[{count}] {name}"
        return cls(text, zlib.crc32(text.encode()))

    def header(self, sequence: int) -> bytes:
        """The HEADER_BYTES of collective `sequence`."""
        return _LAYOUT.pack(sequence, self.checksum, self.text.encode())


def unpack(header: Any) -> tuple[int, int, str]:
    """(sequence number, checksum, text as far as it fitted); data may follow."""
    sequence, checksum, text = _LAYOUT.unpack_from(header)
    return sequence, checksum, text.rstrip(b"\0").decode(errors="replace")


def data_tag(sequence: int, signature: Signature, upper_bound: int) -> int:
    """A tag in [1, upper_bound] for the messages of one collective; 0 is the headers'.

    The low bits of the sequence number keep collectives in flight apart (4,096 with Open MPI's 31-bit tags, 128 with the 15 bits
    that MPI guarantees); the checksum fills the rest.
    """
    bits = upper_bound.bit_length() - 1
    sequence_bits = min(12, bits // 2)
    checksum_bits = bits - sequence_bits
    return 1 + ((sequence % (1 << sequence_bits)) << checksum_bits | signature.checksum % (1 << checksum_bits))
