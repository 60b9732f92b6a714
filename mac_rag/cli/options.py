"""Options that several commands of `mac-rag` share, and the retrievers and banks that they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag.cli.terminal import say
from mac_rag.errors import ConfigError
from mac_rag.shipped_models import DEFAULT_MODEL, FINGERPRINTS

if TYPE_CHECKING:
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.bank.interface import Bank
    from mac_rag.retrieval.base import Retriever

_MODEL_HELP = (
    f"A shipped model ({', '.join(FINGERPRINTS)}), a checkpoint folder, or a repository on the Hugging Face Hub."
)
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL_HELP)]
BankModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=_MODEL_HELP,
        show_default=f"the model that wrote the bank; {DEFAULT_MODEL} for a new one",
    ),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="auto: for an LM larger than one GPU; spreads its layers over all GPUs, main memory and disk.",
        show_default="one device",
    ),
]


def _in_a_file(bank: Path) -> Path:
    """Refuses a URL."""
    from mac_rag.bank.database import local_path

    return local_path(bank)


BankOption = Annotated[
    Path, typer.Option("--bank", help="File of the memory bank.", dir_okay=False, callback=_in_a_file)
]
RowsOption = Annotated[
    Literal["bf16", "int8", "pq", "fp32"] | None,
    typer.Option(
        "--rows",
        help="How a new bank stores its memory tokens: int8 takes half the bytes of bf16, fp32 twice as many, pq "
        "(codes of the model's codebooks) a seventh.",
        show_default="bf16",
    ),
]
RetrieverOption = Annotated[
    str,
    typer.Option(
        "--retriever",
        help="Retriever for the texts: bm25, which is kept in the bank's file, minilm, hybrid, chroma:FOLDER, "
        "chroma:http://HOST:PORT, ...",
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--retriever-folder", help="Folder of the retriever; not for bm25 and Chroma.", file_okay=False),
]


def open_retriever(spec: str, folder: Path | None, bank: MemoryBank) -> Retriever | None:
    """The retriever that the options name; None for `none`.

    Raises:
        ConfigError: as `check_retriever` and `make_retriever`.
        DamageError: if the index in the bank is damaged.
    """
    from mac_rag.bank.bm25 import BankBM25Retriever
    from mac_rag.retrieval.registry import make_retriever

    check_retriever(spec, folder)
    return BankBM25Retriever(bank) if spec == "bm25" else make_retriever(spec, folder=folder, progress=True)


def check_retriever(spec: str, folder: Path | None) -> None:
    """Checks the name of a retriever, and that it gets a folder if it needs one. Loads no model.

    Raises:
        ConfigError: for an unknown name; if it needs a folder and gets none, or takes none and gets one.
    """
    from mac_rag.retrieval.registry import check_name, needs_folder

    check_name(spec)
    takes_folder = spec != "bm25" and needs_folder(spec)
    if folder is None and takes_folder:
        raise ConfigError(f"the retriever {spec} needs a folder to be stored in; give one with --retriever-folder")
    if folder is not None and not takes_folder:
        where = ", because the bank's file holds it" if spec == "bm25" else ""
        raise ConfigError(f"the retriever {spec} takes no folder{where}; leave out --retriever-folder {folder}")


def with_index(spec: str, bank: MemoryBank) -> str:
    """The retriever that changes together with a bank: `bm25` instead of `none`, if there is an index in the bank."""
    from mac_rag.bank.bm25 import index_size

    return "bm25" if spec == "none" and index_size(bank) is not None else spec


def open_to_fill(path: Path) -> MemoryBank | None:
    """The bank in a file, opened for writing; None if there is no such file yet.

    Raises:
        BankError: for a file that is not a bank, or a bank that cannot be opened.
    """
    from mac_rag.bank.bank import MemoryBank

    return MemoryBank.open(path, write=True) if MemoryBank.exists(path) else None


def warn_of_disagreement(bank: Bank, retriever: Retriever | None, spec: str, folder: Path | None) -> None:
    """If a bank and its retriever disagree, prints one line with the remedy on standard error."""
    from mac_rag.sync import disagreement

    problem = None if retriever is None else disagreement(bank, retriever)
    if retriever is None or problem is None:
        return
    place = "" if folder is None else f" --retriever-folder {folder}"
    arguments = f"--bank {bank.path} --retriever {spec}{place}"
    if not len(retriever):
        remedy = f"adapt the documents again: mac-rag adapt ... {arguments}"
    else:
        remedy = f"repair the bank: mac-rag reconcile {arguments}"
    say(f"warning: {bank.path} and {spec} do not agree ({problem}); {remedy}", err=True, fg="yellow")
