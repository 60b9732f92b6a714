"""What the readers of all formats have in common: their error, and the form of a text."""

from __future__ import annotations

import re

_TITLE = 1_000  # characters
_NO_CHARACTER = re.compile(r"[\x00\ud800-\udfff]")
_SPACES = re.compile(r"[ \u00a0]+")
_AROUND_BREAK = re.compile(r"[ \t]*\n[ \t]*")
_BLANK_LINES = re.compile(r"\n{3,}")


class UnreadableError(ValueError):
    """A file that has no text for us; the message goes on behind the file's name."""


def cleaned(text: str) -> str:
    r"""A text without the spaces and empty lines of a layout, and with U+FFFD for what is no character.

    Examples:
        >>> cleaned("  Harbours \r\n\n\n\n of   Lund\x00 ")
        'Harbours\n\nof Lund�'
    """
    text = _NO_CHARACTER.sub("�", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _BLANK_LINES.sub("\n\n", _AROUND_BREAK.sub("\n", _SPACES.sub(" ", text))).strip()


def one_line(text: str) -> str:
    """A title, in one line of bounded length."""
    return " ".join(_NO_CHARACTER.sub("�", text).split())[:_TITLE]
