"""Text that others wrote, made safe to print: nothing in it can control a terminal or reorder a line."""

from __future__ import annotations

import re

# Controls (C0 with ESC, DEL, C1), the separators that some programs take for line breaks, embeddings, overrides and
# isolates of the bidirectional algorithm, and halves of surrogate pairs, which cannot be printed at all.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, *, keep: str = "") -> str:
    r"""A text with its unsafe characters written as `\uXXXX`, as JSON does; JSON stays the same JSON.

    Examples:
        >>> print(printable("red \x1b[31m and\nnew"))
        red \u001b[31m and\u000anew

    Args:
        text: the text, or an object such as a path or an error, which is shown as a text.
        keep: characters to leave as they are, such as line breaks.
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else f"\\u{ord(match[0]):04x}", str(text))
