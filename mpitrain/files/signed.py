"""JSON objects that carry their own SHA-256, in files that anyone may have written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MOST_SIGNS, BYTES_A_SIGN = 1 << 20, 24         # so many commas and brackets, and one more for so many bytes, are parsed


def body_sha256(body: Mapping[str, Any]) -> str:
    """The hash of an object without its "sha256"."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def signed_text(body: Mapping[str, Any]) -> str:
    return json.dumps({**body, "sha256": body_sha256(body)}, indent=1)


def parse(text: bytes) -> Any:
    """What `json.loads` makes of it; ValueError for a text whose values would take far more memory than it does itself."""
    signs, most = sum(map(text.count, (b",", b"[", b"{"))), MOST_SIGNS + len(text) // BYTES_A_SIGN
    if signs > most:
        raise ValueError(f"{signs:,} commas and brackets in {len(text):,} bytes; at most {most:,} are read")
    return json.loads(text)
