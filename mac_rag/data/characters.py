"""Decides which texts the library takes, and how texts are compared.

Any Unicode text with a visible character is taken, unchanged. Two characters are refused: half of a surrogate pair,
which is not a character and which UTF-8 cannot encode, and NUL, which ends a text for command lines and for many
databases. Everything else is kept exactly.

Texts are compared by their `normal_form`, and shown as they were written: `words` and `spans_of` say where the words of
a comparison stand in the text itself.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import MutableSequence, Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

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


# A hyphen at the end of a line that divides a word, which is no part of the word: the next line goes on in lower case.
_DIVIDED = regex.compile(r"(?<=[\p{L}\p{M}])[-\u2010][^\S\n]*+\n\s*+(?=\p{Ll})")
# What separates digits from other digits that are not of the same number, as 10\u2076 and 1\u00bd, is kept by a space.
# U+FFFE is how PDFium marks a hyphen at the end of a line.
_JOINTS = regex.compile(_DIVIDED.pattern + r"|\ufffe\s*|(?<=\p{Nd})(?=\p{No})|(?<=\p{No})(?=\p{Nd})")
_LINE_END = re.compile(r"[-\u2010][^\S\n]*+\n")
_NUMBER = regex.compile(r"[\p{No}\ufffe]")
# A run of other characters, with the letter before it, on which they may be accents.
_BEYOND_ASCII = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]+")
_IGNORED = regex.compile(r"\p{Default_Ignorable_Code_Point}+")  # soft hyphens, joiners, variation selectors
# Accents of letters, of Hebrew and of Arabic. Marks that make another letter are kept: those of kana and of Indic
# scripts, and of Cyrillic all but the diaeresis of \u0451 and the stress.
_ACCENTS = regex.compile(
    r"(?<!\p{Cyrillic}\p{M}{0,8})[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
    r"|(?<=[\u0435\u0415])\u0308|(?<=[аеиоуыэюяАЕИОУЫЭЮЯ]\p{M}{0,8})[\u0300\u0301]"
    r"|[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u065f\u0670]"
)
# Letters with a stroke or a hook that Unicode does not decompose, ligatures that are letters, quotes and dashes.
_LETTERS = str.maketrans(
    dict(zip("łøđðħŧıɓɗƙʼ‘’‛“”„‟‐‑‒–—−", "loddhtibdk''''\"\"\"\"------", strict=True))
    | {"æ": "ae", "œ": "oe", "þ": "th"}
)
# A word: letters, digits and their marks; in scripts without spaces each character is one.
_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(rf"[{_WITHOUT_SPACES}--[\p{{M}}\p{{Nd}}]]\p{{M}}*|[\w--[{_WITHOUT_SPACES}]]+", regex.V1)
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_SHORT = 16  # characters whose normal form is kept
_CHARACTER = regex.compile(r"\X")
_MARKS = regex.compile(r"\p{Mn}+")


def normal_form(text: str, *, accents: bool = False) -> str:
    """A text as it is compared with others: equal for texts that readers take for the same.

    Compatibility forms (ligatures, full width) are resolved, case and the accents of letters are folded, and soft
    hyphens, invisible characters and hyphens that divide a word at the end of a line are left out. A superscript or a
    fraction after a digit stays apart from it. Only for comparisons: what is shown is the text itself.

    Args:
        text: the text.
        accents: True keeps accents, for what needs them, such as a stemmer of French; fold the result once more.

    Examples:
        >>> normal_form("Jos\u00e9 \u0141ukasz\u2019s O\ufb03ce")
        "jose lukasz's office"
        >>> normal_form("The foun-\\ndation of 10\u2076 people")
        'the foundation of 10 6 people'
    """
    if _has_joints(text):
        text = _JOINTS.sub(lambda match: "" if match[0] else " ", text)
    if text.isascii():
        return text.lower()
    return _BEYOND_ASCII.sub(lambda match: _folded(match[0], accents), text).casefold()


def _has_joints(text: str) -> bool:
    """False if `_JOINTS` finds nothing in a text, which is seen faster than by looking for it."""
    return bool(_LINE_END.search(text)) or (not text.isascii() and bool(_NUMBER.search(text)))


def _folded(text: str, accents: bool) -> str:
    """The normal form of characters without regard to lines and numbers: each character by itself."""
    # Few characters of most texts are beyond ASCII, and the same ones come again and again.
    return _folded_again(text, accents) if len(text) <= _SHORT else _folded_anew(text, accents)


def _folded_anew(text: str, accents: bool) -> str:
    text = unicodedata.normalize("NFKD", _IGNORED.sub("", text))
    text = _IGNORED.sub("", unicodedata.normalize("NFKD", text.casefold()))
    return unicodedata.normalize("NFKC", text if accents else _ACCENTS.sub("", text).translate(_LETTERS))


_folded_again = lru_cache(1 << 12)(_folded_anew)


class Word(NamedTuple):
    """A word of a text.

    Attributes:
        form: its normal form.
        start, end: where it stands in the text.
    """

    form: str
    start: int
    end: int


def words(text: str) -> list[Word]:
    """The words of a text, in its order.

    Examples:
        >>> words("The O\ufb03ce")
        [Word(form='the', start=0, end=3), Word(form='office', start=4, end=8)]
    """
    if text.isascii() and not _has_joints(text):
        return [Word(match[0], *match.span()) for match in _ASCII_WORD.finditer(text.lower())]
    mapped = _Mapped(text)
    return [Word(match[0], *mapped.span(*match.span())) for match in _WORD.finditer(mapped.form)]


def word_forms(text: str) -> list[str]:
    """The normal forms of the words of a text, in its order."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(normal_form(text))


def as_written(text: str, wanted: str) -> str | None:
    """The first place of a text that is `wanted` but for case, accents, marks and spaces, as the text has it.

    If there is none: the first place with the same words, whatever signs are between them. None if there is neither.

    Examples:
        >>> as_written("It was run by Mr. Jos\u00e9 O\u2019Brien of AT&T.", "jose o ' brien")
        'Jos\u00e9 O\u2019Brien'
    """
    sought = _solid(normal_form(wanted))
    if not sought:
        return None
    if sought in _solid(normal_form(text)):  # a map of a long text takes time
        mapped = _Mapped(text)
        letters = [(letter, place) for place, character in enumerate(mapped.form) for letter in _solid(character)]
        solid, places = "".join([letter for letter, _ in letters]), [place for _, place in letters]
        found = solid.find(sought)
        while found >= 0:
            first, last = places[found], places[found + len(sought) - 1]
            if not (_within_word(mapped.form, first) or _within_word(mapped.form, last + 1)):
                start, end = mapped.span(first, last + 1)
                return text[start:end]
            found = solid.find(sought, found + 1)
    span = find_words(words(text), word_forms(wanted))
    return None if span is None else text[slice(*span)]


def find_words(found: Sequence[Word], sought: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the first place of a text, of whose words some are these, in sequence; None if there is none."""
    forms, count = [word.form for word in found], len(sought)
    for first in range(len(forms) - count + 1) if sought else ():
        if forms[first : first + count] == list(sought):
            return found[first].start, found[first + count - 1].end
    return None


def _solid(form: str) -> str:
    """A normal form without spaces, and without the marks that some tokenizers drop from letters of all scripts."""
    if not form.isascii():
        form = _MARKS.sub("", unicodedata.normalize("NFD", form))
    return "".join(form.split())


def _within_word(form: str, place: int) -> bool:
    """True if a word goes on across a place."""
    return bool(0 < place < len(form) and _WORD.fullmatch(form, place - 1, place + 1))


class _Mapped:
    """The normal form of a text, and where each of its characters stands in the text."""

    def __init__(self, text: str) -> None:
        self._starts: MutableSequence[int] = []
        self._ends: MutableSequence[int] = []
        if text.isascii() and not _has_joints(text):
            self.form = text.lower()
            self._starts, self._ends = array("q", range(len(text))), array("q", range(1, len(text) + 1))
            return
        pieces: list[str] = []
        begin = 0
        for joint in [*_JOINTS.finditer(text), None]:
            end = len(text) if joint is None else joint.start()
            for character in _CHARACTER.finditer(text, begin, end):
                self._add(pieces, _folded(character[0], False), *character.span())
            if joint is not None:
                self._add(pieces, "" if joint[0] else " ", *joint.span())
                begin = joint.end()
        self.form = "".join(pieces)

    def _add(self, pieces: list[str], form: str, start: int, end: int) -> None:
        pieces.append(form)
        self._starts.extend([start] * len(form))
        self._ends.extend([end] * len(form))

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where characters of the normal form stand in the text."""
        return self._starts[start], self._ends[end - 1]
