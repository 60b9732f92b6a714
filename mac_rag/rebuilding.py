"""A bank for another model: a new one, adapted to the texts of an old one's documents."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from mac_rag.bank.bank import Contents
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError
from mac_rag.progress import progress_bar
from mac_rag.retrieval.base import Retriever
from mac_rag.sync import held_documents, is_held
from mac_rag.untrusted_files import printable

# Documents adapted and committed at a time. An interrupted rebuild goes on at a multiple of it, with the same batches.
_GROUP = 512


@dataclass(frozen=True)
class RebuildReport:
    """What `rebuild` did.

    Attributes:
        documents: number of documents that the new bank holds.
        adapted: number of those that this call has adapted; an interrupted call had adapted the others.
        skipped: ids of the documents whose texts were not found.
    """

    documents: int
    adapted: int
    skipped: tuple[str, ...]


def rebuild(
    old: Contents,
    engine: MACEngine,
    retriever: Retriever | None = None,
    *,
    skip_missing: bool = False,
    progress: bool = False,
) -> RebuildReport:
    """Adapts the bank of an engine to the documents of another bank, in their order and with their metadata.

    A text is the one that the old bank keeps, or else the retriever's, if it is the version that the old bank
    remembers. Documents that the old bank had averaged into one entry become entries of their own again. A bank on disk
    is committed every few hundred documents; after an interruption, the same call goes on. The old bank does not
    change.

    Args:
        old: the bank to rebuild.
        engine: an engine with the new model and the new bank, which is empty or has been begun by such a call. Texts
            are written to its retriever as well, if it has one.
        retriever: holds texts that the old bank does not keep; None if it keeps all.
        skip_missing: leaves out documents whose texts are not found.
        progress: shows progress bars.

    Raises:
        BankError: when texts are not found, which it lists, before anything is written; when the new bank holds
            anything but the first documents of the old one.
        ConfigError: for a retriever that does not give its documents out.
        DamageError: when the texts of the old bank are damaged.

    Examples:
        >>> from mac_rag import Document, MACEngine, MACModel, MemoryBank
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> old = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
        >>> old.adapt([Document("press", "The company Rainga Press employs 180 people.")]).added
        1
        >>> rebuild(old.bank, MACEngine("mac-tiny")).documents  # or any other model
        1
    """
    new = engine.bank
    members = [member for entry in old for member in entry.members]
    pending = {member.document_id for member in members if not is_held(new, member.document_id, member.content_hash)}
    missing: dict[str, None] = {}
    with progress_bar("look for texts", len(pending), disable=not progress) as bar:
        for member, document in _documents(old, retriever, pending):
            if document is None:
                missing[member.document_id] = None
            bar.advance()
    expected = [(member.document_id, member.content_hash) for member in members if member.document_id not in missing]
    begun = [(member.document_id, member.content_hash) for entry in new for member in entry.members]
    if begun != expected[: len(begun)]:
        raise BankError(
            f"{new.path or 'the new bank'} holds {len(begun):,} documents that are not the first ones of "
            f"{old.path or 'the old bank'}: it is another bank, or the old one has changed since; choose a new file"
        )
    if missing and not skip_missing:
        raise BankError(
            f"the texts of {len(missing):,} of {len(members):,} documents were not found in the version that "
            f"{old.path or 'the bank'} remembers; give the retriever that holds them, or leave them out "
            "(--skip-missing):\n" + "\n".join(f"  {printable(document_id)}" for document_id in missing)
        )
    pending.difference_update(missing)
    found = _documents(old, retriever, pending)
    with progress_bar("rebuild", len(expected), done=len(begun), disable=not progress) as bar:
        while group := [_present(*each) for each in islice(found, _GROUP)]:
            engine.adapt(group)
            bar.advance(len(group))
    new.commit()  # so that the rebuild of an empty bank is a bank, too
    return RebuildReport(len(expected), len(pending), tuple(missing))


def _documents(
    old: Contents, retriever: Retriever | None, wanted: Container[str]
) -> Iterator[tuple[Member, Document | None]]:
    """The wanted documents of a bank in their order, read in groups; None for one whose text is not found."""
    kept = (
        (member, text)
        for entry in old
        if any(member.document_id in wanted for member in entry.members)
        for member, text in zip(entry.members, entry.texts)
        if member.document_id in wanted
    )
    while group := list(islice(kept, _GROUP)):
        texts = {member.document_id: text for member, text in group if text is not None}
        if retriever is not None:
            texts |= _filed(retriever, [member.document_id for member, text in group if text is None])
        for member, _ in group:
            text = texts.get(member.document_id)
            is_found = text is not None and member.matches(text)
            yield member, Document(member.document_id, text or "", member.metadata) if is_found else None


def _filed(retriever: Retriever, document_ids: list[str]) -> dict[str, str]:
    """The texts of those of these documents that a retriever holds."""
    try:
        return {document.id: document.text for document in held_documents(retriever, document_ids)}
    except ConfigError as error:
        raise ConfigError(
            f"{error}; in Python, `MemoryWriter.from_index` of mac_rag.integrations.llama_index adapts a new bank to "
            "the documents of an index, a docstore or a vector store of LlamaIndex"
        ) from error


def _present(member: Member, document: Document | None) -> Document:
    if document is None:
        raise BankError(f"the text of document {member.document_id!r} has gone meanwhile; call rebuild again")
    return document
