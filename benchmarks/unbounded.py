"""A bank read as a whole for each question: what the bounds of a document prior are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.nn.bank_view import BankView


@dataclass(frozen=True)
class UnboundedBank:
    """The rows of a view without what tells, before they are read, that some of them cannot matter.

    Attributes:
        view: the view.
    """

    view: ProjectedBank

    @property
    def documents(self) -> int:
        return self.view.documents

    @property
    def prior_keys(self) -> Tensor | None:
        return self.view.prior_keys

    @property
    def dates(self) -> Tensor | None:
        return self.view.dates

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self.view.chunks(block)

    def select(self, index: Tensor) -> BankView:
        return self.view.select(index)
