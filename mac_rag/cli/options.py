"""Options that several commands of `mac-rag` take, and the retriever that they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.retrieval.base import Retriever

ModelOption = Annotated[
    str, typer.Option("--model", help="A shipped model, a checkpoint folder, or a repository on the Hub.")
]
BankOption = Annotated[Path, typer.Option("--bank", help="Folder of the memory bank.", file_okay=False)]
RetrieverOption = Annotated[
    str,
    typer.Option(
        "--retriever", help="For the texts: bm25, minilm, hybrid, chroma:FOLDER, chroma:http://HOST:PORT, ..."
    ),
]
FolderOption = Annotated[
    Path | None, typer.Option("--retriever-folder", help="Where it is kept; not for Chroma.", file_okay=False)
]


def open_retriever(spec: str, folder: Path | None) -> Retriever | None:
    """The retriever that the options name; None for `none`.

    Raises:
        ConfigError: for one that needs a folder and has none, or has one and needs none; and as `make_retriever`.
    """
    from mac_rag.retrieval.registry import make_retriever, needs_folder

    if folder is None and needs_folder(spec):
        raise ConfigError(f"{spec} needs a folder to last; name one with --retriever-folder")
    if folder is not None and not needs_folder(spec):
        raise ConfigError(f"{spec} has no use for --retriever-folder {folder}; leave it out")
    return make_retriever(spec, folder=folder, progress=True)


def warn_of_disagreement(bank: MemoryBank, retriever: Retriever | None, spec: str, folder: Path | None) -> None:
    """Says on standard error, in one line with the remedy, where a bank and its retriever do not agree."""
    from mac_rag.sync import disagreement

    if retriever is None or (found := disagreement(bank, retriever)) is None:
        return
    place = "" if folder is None else f" --retriever-folder {folder}"
    named = f"--bank {bank.folder} --retriever {spec}{place}"
    if not len(retriever):
        remedy = f"adapt the documents again: mac-rag adapt ... {named}"
    else:
        remedy = f"let the bank follow: mac-rag reconcile {named}"
    typer.secho(f"warning: {bank.folder} and {spec} do not agree ({found}); {remedy}", err=True, fg="yellow")
