"""What adapting to documents will write, before anything is written. It needs no bank, and so no turn at one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DocumentError
from mac_rag.memory.parts import PART_BITS
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.progress import progress_bar

Plan: TypeAlias = dict[str, list[list[int]]]  # document id -> token ids of its rows


def check_documents(documents: Sequence[Document]) -> list[Member]:
    """Checks ids, texts and metadata of documents, and returns what a bank would know of each.

    Raises:
        BankError: for an id that occurs twice, and as `Member.of`.
        DocumentError: as `Member.of`.
    """
    members: dict[str, Member] = {}
    for document in documents:
        member = Member.of(document)
        if document.id in members:
            raise BankError(f"document id {shown_id(document.id)} occurs twice; ids must be unique")
        members[document.id] = member
    return list(members.values())


def plan_rows(
    encoder: TextEncoder, documents: Sequence[Document], *, whole: bool = False, progress: bool = False
) -> Plan:
    """Token ids of documents: one row for each, or one for each chunk of a document beyond the encoder's limit.

    It takes about a second for a million characters.

    Args:
        encoder: encodes the documents.
        documents: documents that passed `check_documents`.
        whole: raise an error for a document beyond the limit, instead of splitting it.
        progress: shows a progress bar, which also moves within a long document.

    Raises:
        DocumentError: for an empty document, one of more rows than a bank can hold, or with `whole` one beyond the
            limit; names the document.
    """
    plan: Plan = {}
    total = sum(len(document.text) for document in documents)
    with progress_bar("split", total, disable=not progress) as bar:
        for document in documents:
            try:
                rows = encoder.plan(document.text, whole=whole, advance=bar.advance)
                if len(rows) >> PART_BITS:
                    raise DocumentError(f"its {len(rows):,} rows are too many; split it below {1 << PART_BITS:,} rows")
            except DocumentError as error:
                raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
            plan[document.id] = rows
    return plan
