"""The command `mac-rag`: remember documents and ask about them. A thin face over `mac_rag.engine`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag import DEFAULT_MODEL
from mac_rag.cli import bank, try_out
from mac_rag.cli.options import (
    BankOption,
    FolderOption,
    ModelOption,
    RetrieverOption,
    open_retriever,
    warn_of_disagreement,
)
from mac_rag.cli.run import run_app
from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from mac_rag.engine import MACEngine

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bank.app, name="bank")
app.command("try")(try_out.try_out)


def main() -> None:
    """Runs the command; exit code 1 with one message for an error of the user's input, 2 for wrong usage."""
    run_app(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mac-rag {version('mac-rag')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A frozen language model with a memory: remember documents without training, then ask about them."""


@app.command()
def adapt(
    files: Annotated[
        list[Path], typer.Argument(help="Text or Markdown, one document each; JSON Lines; CSV; - for standard input.")
    ],
    bank: BankOption,
    model: ModelOption = DEFAULT_MODEL,
    on_long: Annotated[
        Literal["chunk", "error"],
        typer.Option(help="A document beyond the model's limit: remember it in parts (chunk), or refuse (error)."),
    ] = "chunk",
    max_entries: Annotated[
        int | None, typer.Option(min=1, help="Keep the bank at this size.", show_default="no limit")
    ] = None,
    reduction: Annotated[
        Literal["random-pruning", "random-averaging", "nearest-averaging"],
        typer.Option(help="How a full bank makes room: forget one entry, or average two."),
    ] = "nearest-averaging",
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
) -> None:
    """Remember documents in a bank, which is created if there is none, and with --retriever keep their texts too.

    A row of a .jsonl file is a document {"id": ..., "text": ...}, and so is a row of a .csv file with the columns id
    and text; further keys and columns are kept with it. Any other file is one document, and its path is its id.
    Standard input is JSON Lines if it starts with {, otherwise one document with the id -.

    A document of a known id replaces the older one, and an unchanged one costs nothing. What is remembered is on disk
    every few hundred documents: after an interruption, give the same command again.
    """
    from mac_rag.config import BoundConfig
    from mac_rag.data.readers import read_documents
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel

    documents = read_documents(files)
    filing = open_retriever(retriever, retriever_folder)
    # An old bank first: what is wrong with it should be heard before a model is loaded. A new one is written with its
    # first commit: not even an empty folder is left behind by documents that are refused.
    opened = MemoryBank.open(bank, write=True) if MemoryBank.exists(bank) else None
    if opened is None and bank.is_dir() and any(bank.iterdir()):
        raise ConfigError(f"{bank} holds other files and no memory bank; choose a folder of its own for --bank")
    loaded = MACModel.from_pretrained(model)
    engine = MACEngine(
        loaded,
        opened or MemoryBank.create_on_commit(bank, loaded.fingerprint),
        filing,
        bound=None if max_entries is None else BoundConfig(maximum=max_entries, method=reduction),
    )
    with engine.bank:
        try:
            report = engine.adapt(documents, on_long=on_long, progress=True)
        finally:
            if filing is not None and retriever_folder is not None:
                filing.save(retriever_folder)
        typer.echo(
            f"{report.added} added, {report.updated} updated, {report.unchanged} unchanged; "
            f"{bank} holds {len(engine.bank)} documents"
        )
        if report.forgotten:
            typer.echo(f"{len(report.forgotten)} forgotten to make room")
        if filing is not None:
            typer.echo(f"{report.filed} documents written to {retriever}, which holds {len(filing)}")
        warn_of_disagreement(engine.bank, filing, retriever, retriever_folder)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    bank: BankOption,
    model: ModelOption = DEFAULT_MODEL,
    explain: Annotated[bool, typer.Option("--explain", help="Show the documents with most attention.")] = False,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
    k: Annotated[int, typer.Option(min=1, help="How many documents of the retriever to read.")] = 5,
) -> None:
    """Answer a question from the bank alone, or with --retriever from the bank and the documents that it finds."""
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank

    engine = MACEngine(model, MemoryBank.open(bank), open_retriever(retriever, retriever_folder), k=k)
    warn_of_disagreement(engine.bank, engine.retriever, retriever, retriever_folder)
    typer.echo(engine.answer([question], overflow="truncate")[0].text)
    if explain:
        _explain(engine, question)


@app.command()
def reconcile(
    bank: BankOption,
    retriever: RetrieverOption,
    model: ModelOption = DEFAULT_MODEL,
    retriever_folder: FolderOption = None,
    allow_emptying: Annotated[
        bool, typer.Option("--allow-emptying", help="Even if the retriever holds none of the bank's documents.")
    ] = False,
) -> None:
    """Let a bank follow its retriever after a crash: adapt to what it lacks, forget what the other does not hold."""
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank

    with MemoryBank.open(bank, write=True) as opened:
        engine = MACEngine(model, opened, open_retriever(retriever, retriever_folder))
        done = engine.reconcile(allow_emptying=allow_emptying)
        typer.echo(
            f"{len(done.added)} added, {len(done.updated)} updated, {len(done.deleted)} deleted; "
            f"bank and {retriever} hold {len(opened)} documents"
        )


def _explain(engine: MACEngine, question: str, shown: int = 5) -> None:
    """A table of the documents with most attention in all."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    ids, mass = engine.document_attention([question])
    table = Table("attention", "document")
    for place in mass[0].argsort(descending=True)[:shown].tolist():
        table.add_row(f"{float(mass[0, place]):.1%}", Text(ids[place]))
    Console().print(table)
