"""`mac-rag bank rebuild`: makes a new bank from an old one, for another model or with another dtype of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mac_rag.cli.models import keep_model_name
from mac_rag.cli.options import (
    BankOption,
    DeviceMapOption,
    FolderOption,
    ModelOption,
    RetrieverOption,
    RowsOption,
    open_retriever,
    open_to_fill,
)
from mac_rag.cli.terminal import say
from mac_rag.errors import ConfigError
from mac_rag.shipped_models import DEFAULT_MODEL


def rebuild(
    bank: BankOption,
    into: Annotated[Path, typer.Option(help="File of the new bank.", dir_okay=False)],
    model: ModelOption = DEFAULT_MODEL,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out documents whose texts are not found, and list them.")
    ] = False,
    keep_texts: Annotated[
        bool,
        typer.Option("--keep-texts", help="Keep the texts in the new bank, even if the old one does not."),
    ] = False,
    rows: RowsOption = None,
    device_map: DeviceMapOption = None,
) -> None:
    """Make a bank for another model, or with other --rows, from texts that the old bank or a retriever holds.

    The new bank gets the same documents in the same order, with their metadata. The old bank does not change, and can
    be used meanwhile. Texts come from the old bank if it was created with --keep-texts, or from --retriever. With
    --retriever bm25, the index of the old bank has them, and the new bank gets one, too. If the
    text of a document is not found in the version that the bank remembers, the command lists the document and ends
    with an error before it writes anything. Documents that a bounded bank had averaged become separate entries again.

    The new bank is saved every few hundred documents. If the command is interrupted, run it again. Until it is
    complete, the new bank holds only the first documents, and can answer questions about these.

    A LlamaIndex docstore or vector store cannot serve as --retriever. In Python, MemoryWriter.from_index adapts a new
    bank to it.
    """
    from mac_rag.adapting import keep_rows_for_model
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.bank.bm25 import BankBM25Retriever
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.rebuilding import rebuild as make_anew

    if bank.resolve() == into.resolve():
        raise ConfigError(f"{into} is the old bank; choose a new file for --into")
    old = MemoryBank.open(bank)
    begun = open_to_fill(into)
    keep_texts = keep_texts or old.keep_texts
    if begun is not None and begun.keep_texts != keep_texts:
        was = "with" if begun.keep_texts else "without"
        raise ConfigError(f"{into} was begun {was} kept texts; repeat its command, or choose a new file for --into")
    if begun is not None and rows is not None and begun.layout.dtype != rows:
        raise ConfigError(
            f"{into} was begun with rows as {begun.layout.name}; repeat its command, or choose a new file for --into"
        )
    text_retriever = open_retriever(retriever, retriever_folder, old)
    if text_retriever is None and not old.keep_texts and len(old):
        raise ConfigError(
            f"{bank} keeps no texts; give the retriever that holds them (--retriever), or adapt to the documents again "
            "into a new bank (mac-rag adapt --keep-texts)"
        )
    loaded = MACModel.from_pretrained(model, device_map=device_map)
    if begun is None:
        begun = MemoryBank.create_on_commit(into, loaded.fingerprint, keep_texts=keep_texts, rows=rows)
        if rows == "pq":  # refuses a model without codebooks before it encodes anything
            keep_rows_for_model(begun, loaded)
    engine = MACEngine(loaded, begun, BankBM25Retriever(begun) if retriever == "bm25" else None)
    with engine.bank:
        try:
            report = make_anew(old, engine, text_retriever, skip_missing=skip_missing, progress=True)
        finally:
            keep_model_name(begun, model)
    for document_id in report.skipped:
        say(f"skipped: {document_id}", err=True)
    say(
        f"{report.adapted} adapted, {report.documents - report.adapted} already there, {len(report.skipped)} skipped; "
        f"{into} is complete and holds {report.documents} documents"
    )
