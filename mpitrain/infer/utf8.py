"""The bytes of a prompt."""

from __future__ import annotations

from mpitrain.errors import UsageError


def utf8(text: str, what: str) -> bytes:
    """UsageError for halves of characters, which JSON may have, and a command line where its bytes are no UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"character {error.start + 1} of {what} is no character of Unicode ({text[error.start]!r}); write "
                         "it in UTF-8") from None
