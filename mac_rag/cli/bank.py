"""`mac-rag bank`: inspect a memory bank on disk, delete from it, check and copy it. Only `rebuild` loads a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mac_rag.cli.models import known_name
from mac_rag.cli.options import BankOption, FolderOption, RetrieverOption, open_retriever, with_index
from mac_rag.cli.terminal import say
from mac_rag.errors import ConfigError
from mac_rag.untrusted_files import printable

if TYPE_CHECKING:
    from mac_rag.bank.bank import BankEntry, MemoryBank
    from mac_rag.data.provenance import Member

UrlArgument = Annotated[str, typer.Argument(help="URL of a folder, such as s3://BUCKET/PREFIX.", metavar="URL")]

app = typer.Typer(no_args_is_help=True, help="Inspect a memory bank, delete from it, check, back up and export it.")


@app.command()
def info(bank: BankOption) -> None:
    """Show the size of a bank, and which model wrote it."""
    from mac_rag.bank.bm25 import index_size

    with _open(bank) as opened:
        say(f"documents      {len(opened):,}")
        if opened.row_shape is not None:
            rows, (tokens, width) = len(opened.row_keys), opened.row_shape
            say(f"memory tokens  {rows * tokens:,} of width {width} ({tokens} for each of {rows:,} rows)")
            codes = f", {size} bytes a token" if (size := opened.layout.code_bytes) else ""
            say(f"rows           {opened.layout.name}{codes}")
        elif len(opened):
            counts = opened.token_counts(opened.row_keys.tolist())
            each = f"{opened.layout.token_bytes:,} bytes a token"
            say(f"codes          {sum(counts):,} tokens in {len(counts):,} rows, {each}")
        size = sum(file.stat().st_size for file in bank.parent.glob(f"{bank.name}*") if file.is_file())
        each = f", {size / len(opened) / 2**10:,.1f} KiB a document" if len(opened) else ""
        say(f"on disk        {size / 2**20:,.1f} MiB{each}")
        say(f"texts          {'kept' if opened.keep_texts else 'not kept'}")
        indexed = index_size(opened)
        say(f"bm25           {'no index' if indexed is None else f'an index of {indexed:,} documents'}")
        name = known_name(opened)
        say(f"model          {f'{name}, ' if name else ''}{opened.fingerprint}")


@app.command("list")
def list_documents(
    bank: BankOption,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            help="Only documents with this id; * stands for any characters: 'notes/*'. Repeat it for several ids.",
            show_default="all",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only documents with this in their metadata, such as year=2005. If repeated, all must match.",
            show_default="all",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most entries to list.", show_default="no limit")] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Begin after the entry of this document.", show_default="the oldest"),
    ] = None,
) -> None:
    """List the entries of a bank, oldest first: one JSON object per line.

    With --limit, standard error tells how to go on if there are more. Documents that a bounded bank has merged are one
    entry, which is listed as a whole if one of them matches.
    """
    import json
    from itertools import islice

    is_shown = selection(ids or (), where or ())
    with _open(bank) as opened:
        begin = -1 if after is None else opened[after].sequence
        entries = (entry for entry in opened if entry.sequence > begin and is_shown(entry))
        last = None
        for entry in islice(entries, limit):
            last = entry
            say(json.dumps(_record(entry), ensure_ascii=False))
        if last is not None and next(entries, None) is not None:
            say(f"there are more; go on with --after {quote(last.members[-1].document_id)}", err=True)


@app.command()
def delete(
    document_ids: Annotated[list[str], typer.Argument(help="Ids of the documents to delete.")],
    bank: BankOption,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
) -> None:
    """Delete documents from a bank with its index of BM25, and with --retriever also from the retriever.

    Their bytes are overwritten in the bank's file; `compact` also gives the room back. The retriever changes first. If
    the command is interrupted, run it again.

    A bounded bank may have merged a deleted document with others. These share its memory and are deleted with it. The
    command lists them, so that you can adapt to them again. The retriever keeps them.
    """
    from mac_rag.sync import SyncedBank

    with _open(bank, write=True) as opened:
        retriever = with_index(retriever, opened)
        text_retriever = open_retriever(retriever, retriever_folder, opened)
        if text_retriever is not None and not len(text_retriever):
            place = "" if retriever_folder is None else f" in {retriever_folder}"
            raise ConfigError(
                f"{retriever}{place} holds no documents; give the retriever that holds them, or leave --retriever out"
            )

        def persist() -> None:
            if text_retriever is not None and retriever_folder is not None:
                text_retriever.save(retriever_folder)

        deletion = SyncedBank(opened, text_retriever).delete(document_ids, persist=persist)
        remaining = len(opened)
    merged = [document_id for document_id in deletion.from_bank if document_id not in document_ids]
    say(f"{len(deletion.from_bank)} deleted; {bank} holds {remaining} documents")
    if merged:
        say(f"also deleted, because they were merged with these: {', '.join(merged)}")
    if text_retriever is not None:
        say(f"{len(deletion.from_retriever)} deleted from {retriever}, which holds {len(text_retriever)}")


@app.command()
def compact(bank: BankOption) -> None:
    """Make the file of a bank as small as its contents, and its log empty, with no byte of what was deleted."""
    with _open(bank, write=True) as opened:
        opened.compact()
        say(f"{bank} holds {len(opened)} documents and nothing else")


@app.command()
def verify(bank: BankOption) -> None:
    """Check every byte of a bank. If anything is damaged, list it and exit with code 1."""
    from mac_rag.bank.verify import verify as check

    report = check(bank)
    say(report, lines=True)
    if not report.clean:
        raise typer.Exit(1)


@app.command()
def backup(
    bank: BankOption,
    output: Annotated[Path, typer.Option(help="A new file.", dir_okay=False)],
) -> None:
    """Copy the last commit of a bank, even while another process writes to it. The copy is a bank like any other."""
    from mac_rag.bank.copies import backup as copy

    say(f"{copy(bank, output):,} documents copied to {output}")


@app.command()
def pull(
    url: UrlArgument,
    bank: Annotated[Path, typer.Argument(help="A new file, or one that holds an earlier state of the bank.")],
) -> None:
    """Fetch a bank from an object store into a file.

    Readers of an earlier state go on to the new one. If the command is interrupted, run it again.
    """
    from mac_rag.bank.remote import pull as fetch

    say(f"{fetch(url, bank):,} documents are in {bank}")


@app.command()
def push(bank: Annotated[Path, typer.Argument(help="File of the memory bank.")], url: UrlArgument) -> None:
    """Upload the last commit of a bank to an object store, in place of an earlier one.

    If the command is interrupted, run it again. `pull` fetches the bank on another machine.
    """
    from mac_rag.bank.remote import push as put

    say(f"{put(bank, url):,} documents are at {url}")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="File of the backup.", metavar="BACKUP")],
    bank: BankOption,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the documents of an existing bank, in one commit.")
    ] = False,
) -> None:
    """Restore a backup to a new file or, with --replace, in place of the present documents of a bank."""
    from mac_rag.bank.copies import restore as put_back

    say(f"{put_back(source, bank, replace=replace):,} documents restored to {bank}")


@app.command()
def export(
    bank: BankOption,
    output: Annotated[Path, typer.Option(help="A new or empty folder.", file_okay=False)],
) -> None:
    """Export a bank to open formats: `entries.jsonl`, and all rows in that order in `memory.safetensors` (`phi`).

    If the bank keeps texts, `documents.jsonl` holds its documents, which `mac-rag adapt` reads. Of a bank of codes,
    `memory.safetensors` holds the `codes` of all rows, one after the other, and the `tokens` of each row.
    """
    import json

    import torch
    from safetensors.torch import save as tensor_bytes

    from mac_rag.atomic_files import make_folder, write_file, write_text

    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; choose a new folder for --output")
    with _open(bank) as opened:
        if opened.layout.token_bytes:
            codes = opened.codes(opened.row_keys.tolist())
            memory = {"codes": torch.cat(codes), "tokens": torch.tensor([len(row) for row in codes])}
        else:
            memory = {"phi": opened.phi.contiguous()}
        make_folder(output)
        write_file(output / "memory.safetensors", [tensor_bytes(memory)])
        entries = list(opened)

        def write(name: str, records: Iterable[dict[str, Any]]) -> None:
            lines = [printable(json.dumps(record, ensure_ascii=False)) + "\n" for record in records]
            write_text(output / name, "".join(lines))

        write("entries.jsonl", map(_record, entries))
        if opened.keep_texts:
            members = ((member, text) for entry in entries for member, text in zip(entry.members, entry.texts))
            write(
                "documents.jsonl",
                ({"id": one.document_id, "text": text, "metadata": dict(one.metadata)} for one, text in members),
            )
        texts = "with their texts" if opened.keep_texts else "without texts, which this bank does not keep"
        say(f"{len(entries)} entries written to {output}, {texts}")


def _open(bank: Path, *, write: bool = False) -> MemoryBank:
    from mac_rag.bank.bank import MemoryBank

    return MemoryBank.open(bank, write=write)


def _record(entry: BankEntry) -> dict[str, object]:
    """An entry for JSON: its number of rows, and its document, or the documents that were merged into it."""
    from mac_rag.data.dates import ALWAYS, written

    return {
        "rows": entry.rows,
        "documents": [
            {
                "id": member.document_id,
                "content_hash": member.content_hash,
                "added": member.added,
                "date": written(member.moment) if member.moment != ALWAYS else None,
                "metadata": dict(member.metadata),
            }
            for member in entry.members
        ],
    }


def selection(ids: Sequence[str], where: Sequence[str]) -> Callable[[BankEntry], bool]:
    """Returns a test that is true for entries to show: one of their documents must match an id and all conditions.

    Args:
        ids: ids, where `*` stands for any characters; none for all ids.
        where: conditions `KEY=VALUE` on metadata. A value is compared as a text, and as JSON writes it. Of a list, one
            item must match.

    Raises:
        typer.BadParameter: for a condition without `=`.
    """
    patterns = [re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL) for text in ids]
    wanted = [_condition(text) for text in where]

    def is_shown(member: Member) -> bool:
        return (not patterns or any(pattern.fullmatch(member.document_id) for pattern in patterns)) and all(
            _is(member.metadata, key, value) for key, value in wanted
        )

    return lambda entry: any(map(is_shown, entry.members))


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{text!r} has no key and =; write KEY=VALUE", param_hint="--where")
    return key, value


def _is(metadata: Mapping[str, Any], key: str, value: str) -> bool:
    if key not in metadata:
        return False
    items = metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
    return any(item == value or json.dumps(item) == value for item in items)
