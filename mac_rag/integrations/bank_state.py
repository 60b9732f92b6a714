"""A name for what a bank holds, for caches of frameworks that outlive it."""

from __future__ import annotations

from uuid import uuid4
from weakref import WeakKeyDictionary

from mac_rag.memory.interface import Bank

# Names of banks that are unique beyond this process.
_names: WeakKeyDictionary[Bank, str] = WeakKeyDictionary()


def bank_state(bank: Bank) -> str:
    """Name and version of a bank: equal for equal contents of one object, and unique beyond this process."""
    return f"{_names.setdefault(bank, uuid4().hex)}/{bank.version}"
