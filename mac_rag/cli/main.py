"""The command `mac-rag`: remembers documents and answers questions about them, through `mac_rag.engine`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag import DEFAULT_MODEL
from mac_rag.cli import bank, fetch, rebuild, try_out
from mac_rag.cli.options import (
    BankOption,
    DeviceMapOption,
    FolderOption,
    ModelOption,
    ReadBankOption,
    RetrieverOption,
    RowsOption,
    open_retriever,
    open_to_fill,
    warn_of_disagreement,
)
from mac_rag.cli.run import run_app
from mac_rag.cli.terminal import cell, say, show_table
from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from mac_rag.engine import MACEngine

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bank.app.command()(rebuild.rebuild)
bank.app.command()(rebuild.migrate)
app.add_typer(bank.app, name="bank")
app.command("try")(try_out.try_out)
app.command()(fetch.fetch)


def main() -> None:
    """Runs the command. Bad input ends it with one message and exit code 1, wrong usage with exit code 2."""
    run_app(app)


def _show_version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        say(f"mac-rag {version('mac-rag')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A frozen language model with a memory: remember documents without training, then ask about them."""


@app.command()
def adapt(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Text or Markdown, one document each; .jsonl; .csv; .parquet; folders of such files; hub:OWNER/NAME "
            "for a data set of the Hub; or - for standard input."
        ),
    ],
    bank: BankOption,
    model: ModelOption = DEFAULT_MODEL,
    on_long: Annotated[
        Literal["chunk", "error"],
        typer.Option(help="Split a document beyond the model's limit into chunks, or stop with an error."),
    ] = "chunk",
    max_entries: Annotated[
        int | None, typer.Option(min=1, help="Largest number of entries in the bank.", show_default="no limit")
    ] = None,
    reduction: Annotated[
        Literal["random-pruning", "random-averaging", "nearest-averaging"],
        typer.Option(help="How a full bank makes room: drop a random entry, or average two."),
    ] = "nearest-averaging",
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
    keep_texts: Annotated[
        bool,
        typer.Option(
            "--keep-texts",
            help="Make a bank that keeps the texts too, so that `bank rebuild` can make one for another model.",
        ),
    ] = False,
    secure_delete: Annotated[
        bool,
        typer.Option(
            "--secure-delete",
            help="Make a bank that overwrites its files before it removes them. It is read into memory as a whole.",
        ),
    ] = False,
    rows: RowsOption = None,
    device_map: DeviceMapOption = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Amortize in many processes: on the Ray cluster at RAY_ADDRESS, or else on this machine."
        ),
    ] = False,
    actors: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: the most processes.", show_default="one for each GPU, or for each CPU"),
    ] = None,
) -> None:
    """Remember documents in a bank. With --retriever, store their texts in the retriever as well.

    The bank is created if it does not exist. Each line of a .jsonl file is a document {"id": ..., "text": ...}, and so
    is each row of a .csv or .parquet file with the columns id and text; other keys and columns become metadata. Any
    other file is one document, and its path is the id. Standard input is read as JSON Lines if it starts with {,
    otherwise as one document with the id -.

    A document with a known id replaces the older version; an unchanged document costs nothing. The bank is saved every
    few hundred documents. If the command is interrupted, run it again.

    Whether a bank keeps texts, whether it overwrites what it deletes, and in which numbers it keeps memory tokens, is
    decided when it is created; later calls need not repeat --keep-texts, --secure-delete and --rows.
    """
    from mac_rag.config import BoundConfig
    from mac_rag.data.readers import find_files, read_documents
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel

    if actors is not None and not ray:
        raise ConfigError(f"--actors {actors} is for --ray; add --ray, or leave it out")
    if device_map is not None and ray:
        raise ConfigError(f"--device-map {device_map} is for one process; leave it out, or --ray")
    found = find_files(files)
    documents = [] if ray else read_documents(found)
    text_retriever = open_retriever(retriever, retriever_folder)
    # An existing bank is opened before the model is loaded, so that its errors come at once. The folder of a new bank
    # is created by its first commit, so that refused documents leave no empty folder behind.
    opened = open_to_fill(bank, "--bank")
    if opened is not None and keep_texts and not opened.keep_texts:
        raise ConfigError(
            f"{bank} was created without --keep-texts and holds no texts of its documents; leave the option out, or "
            "make a new bank with it: by adapting to all documents again, or by mac-rag bank rebuild --keep-texts"
        )
    if opened is not None and secure_delete and not opened.secure_delete:
        raise ConfigError(
            f"{bank} was created without --secure-delete; leave the option out, or make a new bank with it: by "
            "adapting to all documents again, or by mac-rag bank rebuild --secure-delete"
        )
    if opened is not None and rows is not None and rows != (kept := opened.layout.dtype or "fp32"):
        raise ConfigError(
            f"{bank} keeps its rows as {kept}; leave --rows out, or make a new bank: mac-rag bank migrate --rows {rows}"
        )
    # With --ray, a GPU is for the actors.
    loaded = MACModel.from_pretrained(model, device="cpu" if ray else None, device_map=device_map)
    if opened is None:  # an empty bank is false, too
        opened = MemoryBank.create_on_commit(
            bank, loaded.fingerprint, keep_texts=keep_texts, secure_delete=secure_delete, rows=rows
        )
    bound = None if max_entries is None else BoundConfig(maximum=max_entries, method=reduction)
    with opened:
        try:
            if ray:
                from mac_rag.distributed.adapting import BulkAdapter

                bulk = BulkAdapter(loaded, model, opened, bank, text_retriever, bound=bound, actors=actors)
                report = bulk.adapt(found, on_long=on_long, progress=True)
            else:
                engine = MACEngine(loaded, opened, text_retriever, bound=bound)
                report = engine.adapt(documents, on_long=on_long, progress=True)
        finally:
            if text_retriever is not None and retriever_folder is not None:
                text_retriever.save(retriever_folder)
        say(
            f"{report.added} added, {report.updated} updated, {report.unchanged} unchanged; "
            f"{bank} holds {len(opened)} documents"
        )
        if report.forgotten:
            say(f"{len(report.forgotten)} forgotten to make room")
        if text_retriever is not None:
            say(f"{report.filed} documents written to {retriever}, which holds {len(text_retriever)}")
        warn_of_disagreement(opened, text_retriever, retriever, retriever_folder)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    bank: ReadBankOption,
    model: ModelOption = DEFAULT_MODEL,
    explain: Annotated[bool, typer.Option("--explain", help="Show the documents with the most attention.")] = False,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
    k: Annotated[int, typer.Option(min=1, help="Number of retrieved documents in front of the question.")] = 5,
    as_of: Annotated[
        str | None,
        typer.Option(
            help="A date, such as 2004-05-31: answer as if nothing later had been remembered.", show_default="all dates"
        ),
    ] = None,
    device_map: DeviceMapOption = None,
) -> None:
    """Answer a question from a bank. With --retriever, answer from the bank and retrieved documents."""
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel

    opened, text_retriever = MemoryBank.open(bank), open_retriever(retriever, retriever_folder)
    engine = MACEngine(MACModel.from_pretrained(model, device_map=device_map), opened, text_retriever, k=k)
    warn_of_disagreement(engine.bank, engine.retriever, retriever, retriever_folder)
    say(engine.answer([question], overflow="truncate", as_of=as_of)[0].text, lines=True)
    if explain:
        _explain(engine, question, as_of)


@app.command()
def reconcile(
    bank: BankOption,
    retriever: RetrieverOption,
    model: ModelOption = DEFAULT_MODEL,
    retriever_folder: FolderOption = None,
    allow_emptying: Annotated[
        bool,
        typer.Option("--allow-emptying", help="Run even if the retriever holds none of the bank's documents."),
    ] = False,
    device_map: DeviceMapOption = None,
) -> None:
    """Repair a bank that disagrees with its retriever, such as after a crash.

    Documents that only the retriever holds are added to the bank, and documents that only the bank holds are deleted
    from it.
    """
    from mac_rag.engine import MACEngine
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel

    with MemoryBank.open(bank, write=True) as opened:
        text_retriever = open_retriever(retriever, retriever_folder)
        engine = MACEngine(MACModel.from_pretrained(model, device_map=device_map), opened, text_retriever)
        changes = engine.reconcile(allow_emptying=allow_emptying)
        say(
            f"{len(changes.added)} added, {len(changes.updated)} updated, {len(changes.deleted)} deleted; "
            f"bank and {retriever} hold {len(opened)} documents"
        )


def _explain(engine: MACEngine, question: str, as_of: str | None, shown: int = 5) -> None:
    """Prints a table of the documents with the most attention."""
    from rich.table import Table

    ids, mass = engine.document_attention([question], as_of=as_of)
    table = Table("attention", "document")
    for i in mass[0].argsort(descending=True)[:shown].tolist():
        table.add_row(f"{float(mass[0, i]):.1%}", cell(ids[i]))
    show_table(table)
