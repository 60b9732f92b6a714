"""`mac-rag bank`: look at a memory bank on disk, delete from it, and keep it in order. None of it loads a MAC model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.options import BankOption, FolderOption, RetrieverOption, open_retriever
from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from mac_rag.memory.bank import MemoryBank

app = typer.Typer(no_args_is_help=True, help="Look at a memory bank, delete from it, and keep it in order.")


@app.command()
def info(bank: BankOption) -> None:
    """Describe a bank."""
    with _opened(bank) as found:
        typer.echo(f"documents      {len(found):,}")
        if found.row_shape is not None:
            rows, (tokens, width) = len(found.row_keys), found.row_shape
            typer.echo(f"memory tokens  {rows * tokens:,} of width {width} ({tokens} for each of {rows:,} rows)")
        if found.codebook is not None:
            typer.echo(f"codebook       {len(found.codebook):,} codes")
        size = sum(file.stat().st_size for file in bank.iterdir() if file.is_file())
        typer.echo(f"on disk        {size / 2**20:,.1f} MiB")
        typer.echo(f"model          {found.fingerprint}")


@app.command("list")
def list_documents(bank: BankOption) -> None:
    """List the documents in order of arrival, one JSON object a line."""
    import json

    with _opened(bank) as found:
        for record in _records(found):
            typer.echo(json.dumps(record, ensure_ascii=False))


@app.command()
def delete(
    document_ids: Annotated[list[str], typer.Argument(help="Ids of the documents to forget.")],
    bank: BankOption,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
) -> None:
    """Forget documents, and with --retriever delete their texts from it too.

    Their memory has no influence from here on; `compact` removes its bytes from the disk. The retriever loses them
    first: after an interruption, give the same command again.

    Documents that a bounded bank has merged with one of them go too, since their memory is one; they are named, so
    that you can adapt to them again. The retriever keeps those.
    """
    from mac_rag.sync import SyncedBank

    with _opened(bank, write=True) as found:
        filing = open_retriever(retriever, retriever_folder)
        if filing is not None and not len(filing):
            place = "" if retriever_folder is None else f" in {retriever_folder}"
            raise ConfigError(f"{retriever}{place} holds no documents; name the one that holds them, or none")

        def persist() -> None:
            if filing is not None and retriever_folder is not None:
                filing.save(retriever_folder)

        done = SyncedBank(found, filing).delete(document_ids, persist=persist)
        left = len(found)
    gone = done.forgotten
    others = [document_id for document_id in gone if document_id not in document_ids]
    typer.echo(f"{len(gone)} deleted; {bank} holds {left} documents")
    if others:
        typer.echo(f"merged with them and gone too: {', '.join(others)}")
    if filing is not None:
        typer.echo(f"{len(done.unfiled)} deleted from {retriever}, which holds {len(filing)}")


@app.command()
def compact(bank: BankOption) -> None:
    """Rewrite a bank without what was deleted, so that no byte of it remains."""
    with _opened(bank, write=True) as found:
        found.compact()
        typer.echo(f"{bank} holds {len(found)} documents and nothing else")


@app.command()
def verify(bank: BankOption) -> None:
    """Check every byte of a bank; exit code 1 and a list of what is damaged, if anything is."""
    from mac_rag.memory.storage.repair import verify as check

    report = check(bank)
    typer.echo(report)
    if not report.clean:
        raise typer.Exit(1)


@app.command()
def repair(bank: BankOption) -> None:
    """Drop what is damaged, and only that, and list the documents that were lost."""
    from mac_rag.memory.storage.repair import repair as mend

    typer.echo(mend(bank))


@app.command()
def export(
    bank: BankOption,
    output: Annotated[Path, typer.Option(help="New or empty folder.", file_okay=False)],
) -> None:
    """Write a bank in open formats: `documents.jsonl`, and `memory.safetensors` with `phi`, all rows in that order."""
    import json

    from safetensors.torch import save_file

    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; choose a new folder for --output")
    with _opened(bank) as found:
        phi = found.phi
        output.mkdir(parents=True, exist_ok=True)
        save_file({"phi": phi.contiguous()}, output / "memory.safetensors")
        lines = [json.dumps(record, ensure_ascii=False) for record in _records(found)]
        (output / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        typer.echo(f"{len(lines)} entries written to {output}")


def _opened(bank: Path, *, write: bool = False) -> MemoryBank:
    from mac_rag.memory.bank import MemoryBank

    return MemoryBank.open(bank, write=write)


def _records(bank: MemoryBank) -> list[dict[str, object]]:
    """One record for each entry: its rows, and the document in it, or the documents merged into it."""
    return [
        {
            "rows": len(entry.phi),
            "documents": [
                {
                    "id": member.document_id,
                    "content_hash": member.content_hash,
                    "added": member.added,
                    "metadata": dict(member.metadata),
                }
                for member in entry.members
            ],
        }
        for entry in bank
    ]
