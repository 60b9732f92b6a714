"""Which entries of a bank `mac-rag bank list` shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from mac_rag.data.provenance import Member
    from mac_rag.memory.bank import BankEntry


def selection(ids: Sequence[str], where: Sequence[str]) -> Callable[[BankEntry], bool]:
    """What tells whether an entry is shown: one of its documents must match an id and all conditions.

    Args:
        ids: ids, in which `*` stands for any characters; none for all ids.
        where: conditions `KEY=VALUE` on metadata; a value is compared as a text, or as JSON writes it. In a list, one
            item has to match.

    Raises:
        typer.BadParameter: for a condition without `=`.
    """
    patterns = [re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL) for text in ids]
    wanted = [_condition(text) for text in where]

    def is_shown(member: Member) -> bool:
        return (not patterns or any(pattern.fullmatch(member.document_id) for pattern in patterns)) and all(
            _is(member.metadata, key, value) for key, value in wanted
        )

    return lambda entry: any(map(is_shown, entry.members))


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{text!r} is not of the form KEY=VALUE", param_hint="--where")
    return key, value


def _is(metadata: Mapping[str, Any], key: str, value: str) -> bool:
    if key not in metadata:
        return False
    found = metadata[key]
    return any(item == value or json.dumps(item) == value for item in (found if isinstance(found, list) else [found]))
