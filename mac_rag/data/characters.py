"""Decides which texts the library takes: any Unicode text with a visible character, unchanged.

Two characters are refused: half of a surrogate pair, which is not a character and which UTF-8 cannot encode, and NUL,
which ends a text for command lines and for many databases. Everything else is kept exactly.
"""

from __future__ import annotations

import unicodedata

from mac_rag.errors import DocumentError

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp"}  # controls, format characters, spaces and separators


def fault_of(text: str) -> str | None:
    """Describes the first invalid character of a text, its index, and the remedy; None if all are valid."""
    place = text.find("\0")
    if place >= 0:
        return f"the character at index {place} is NUL, which marks binary data; convert it to text, or remove it"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return (
            f"the character at index {error.start} is U+{code:04X}, half of a surrogate pair, which is no character; "
            "decode the text again from its bytes, or remove it"
        )
    return None


def is_blank(text: str) -> bool:
    """True for a text without a visible character: only spaces, controls and format characters."""
    return all(unicodedata.category(character) in _INVISIBLE for character in text)


def check_characters(text: str) -> None:
    """Refuses a text with half of a surrogate pair or NUL.

    Raises:
        DocumentError: names the character, its index, and how the text begins.
    """
    fault = fault_of(text)
    if fault is not None:
        raise DocumentError(f"{fault} (the text begins {shown(text)})")


def check_text(text: object) -> None:
    """Refuses a value that is not a text with at least one visible character.

    Examples:
        >>> check_text("Der Dom zu Köln")
        >>> check_text(chr(0))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        mac_rag.errors.DocumentError: the character at index 0 is NUL, which marks binary data; ...

    Raises:
        DocumentError: for any other value.
    """
    if not isinstance(text, str):
        raise DocumentError(f"expected a text, got {type(text).__name__}: {text!r:.80}")
    check_characters(text)
    if is_blank(text):
        raise DocumentError(f"a text must not be empty, got {shown(text)}; give one with a visible character")


def shown(text: str, most: int = 60) -> str:
    """A text for an error message: quoted, escaped, and cut after `most` characters."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def shown_id(document_id: str) -> str:
    """A document's id for an error message, cut after 500 characters, the length of a long path."""
    return shown(document_id, 500)
