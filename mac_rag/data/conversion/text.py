"""What all converters share: the form of a text, raised and lowered characters, and the notices of what is left out."""

from __future__ import annotations

import re
import unicodedata

from mac_rag.untrusted_files import DOCUMENT, printable

_LONGEST_TITLE = 1_000  # characters
_MOST_NOTICES = 20
# Controls show nothing, and halves of surrogate pairs and noncharacters are no characters.
_NO_CHARACTER = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_SPACES = re.compile(r"[ \u00a0]+")
_AROUND_BREAK = re.compile(r"[ \t]*\n[ \t]*")
_AROUND_TAB = re.compile(r" ?\t ?")
_BLANK_LINES = re.compile(r"\n{3,}")
_BREAKS = str.maketrans({0x0B: "\n", 0x0C: "\n", 0x0D: "\n", 0x85: "\n", 0xAD: None})
_RAISED = str.maketrans("0123456789+-−=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_LOWERED = str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
_NUMBER = re.compile(r"[\d+\-−,]+")
_MARKS = {"TM": "™", "SM": "℠"}
# What is raised after a number for its looks alone: 1st, 2e, 3º.
_ENDING = re.compile(r"st|nd|rd|th|er|re|ère|e|es|ème|eme|os?|as?|bis|ter", re.IGNORECASE)


class UnreadableError(ValueError):
    """A file whose text cannot be read; the message continues the file's name."""


class Notices:
    """What a converter leaves out or changes: a line for each kind, with the first places.

    Examples:
        >>> notices = Notices()
        >>> notices.add("pictures without a description are left out", "plan.png")
        >>> notices.lines()
        ['pictures without a description are left out: plan.png']
    """

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, what: str, where: str = "") -> None:
        """Notes one more. `what`: the kind, in the plural; `where`: its place or content."""
        where = " ".join(where.split())
        self._places.setdefault(what, []).append(printable(where[:80] + "..." * (len(where) > 80)))

    def lines(self) -> list[str]:
        """A line for each kind. Names five places of a kind, and says how many more there are."""
        lines = []
        for what, places in self._places.items():
            shown = ", ".join(filter(None, places[:5])) + f" and {len(places) - 5:,} more" * (len(places) > 5)
            lines.append(f"{what}: {shown}" if shown else what)
        return lines[:_MOST_NOTICES] + ["and more of other kinds"] * (len(lines) > _MOST_NOTICES)


def cleaned(text: str) -> str:
    r"""A text without superfluous spaces, blank lines and soft hyphens, and with U+FFFD for what is no character.

    Examples:
        >>> cleaned("  Harbours \r\n\n\n\n of   Lund\x00 ")
        'Harbours\n\nof Lund�'
    """
    text = _NO_CHARACTER.sub("�", text.replace("\r\n", "\n").translate(_BREAKS))
    text = _AROUND_BREAK.sub("\n", _AROUND_TAB.sub("\t", _SPACES.sub(" ", text)))
    return _BLANK_LINES.sub("\n\n", text).strip()


def one_line(text: str) -> str:
    """A title as one line of bounded length."""
    return " ".join(_NO_CHARACTER.sub("�", text).split())[:_LONGEST_TITLE]


def check_size(size: int) -> None:
    """Refuses a text of more characters than a document may have bytes.

    Raises:
        UnreadableError: names the bound.
    """
    if size > DOCUMENT:
        raise UnreadableError(f"has a text of more than {DOCUMENT:,} bytes, the most of one document; split it")


def raised(text: str, before: str) -> str:
    """A superscript in characters that do not run into what is before it.

    Args:
        text: the superscript.
        before: the character before it; an empty text if there is none.

    Examples:
        >>> [raised("12", "."), raised("-6", "0"), raised("2k", "x"), raised("st", "1"), raised("[3]", "a")]
        ['¹²', '⁻⁶', '^(2k)', 'st', '[3]']
    """
    start = text.lstrip("+-−(")[:1]
    if not start.isalnum() or unicodedata.decomposition(start).startswith("<super>"):
        return text
    if not before.isalnum() and not _NUMBER.fullmatch(text):
        return text
    if text.isalpha() and (_ENDING.fullmatch(text) if before.isdigit() else len(text) > 1):
        return _MARKS.get(text, text)
    return _shifted(text, _RAISED, "^")


def lowered(text: str, before: str) -> str:
    """A subscript. After a letter it stays as people type it, CO2; elsewhere it is set apart, 1010₂."""
    return text if before.isalpha() or not any(map(str.isalnum, text)) else _shifted(text, _LOWERED, "_")


def _shifted(text: str, table: dict[int, int], mark: str) -> str:
    letters = text.translate(table)
    return f"{mark}({text})" if any(old == new and old.isalnum() for old, new in zip(text, letters)) else letters
