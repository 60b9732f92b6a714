"""Griffe extension: a docstring's line `heads, head_width: ...` names two things, and the reference shows both names.

Griffe takes what follows the first space for a type. A no-break space keeps the names together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_GROUPED = re.compile(r"^( +[a-z_]\w*(?:, [a-z_]\w*)+):(?= )", re.MULTILINE)


class GroupedNames(griffe.Extension):
    """Joins the names of such lines in all docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _GROUPED.sub(_joined, obj.docstring.value)


def _joined(found: re.Match[str]) -> str:
    return found[1].replace(", ", ",\N{NO-BREAK SPACE}") + ":"
