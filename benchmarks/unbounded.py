"""A bank read as a whole for each question: what the bounds of a document prior are compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.nn.bank_view import BankView

_NAMES = ("documents", "prior_keys", "log_counts", "chunks", "select")


def without_bounds(view: ProjectedBank) -> BankView:
    """The same rows without what tells, before they are read, that some of them cannot matter."""
    return cast(BankView, SimpleNamespace(**{name: getattr(view, name) for name in _NAMES}))
