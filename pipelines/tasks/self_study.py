"""Self-study: an LM writes questions and answers about documents, and pairs that fail the checks are dropped.

The documents are cut into passages, and these go to the LM in groups. The rows of a group are one file in `groups/`,
which depends on nothing but the group; so a run that was stopped continues with the next group, and ends with the same
files as one that was not. Duplicates are found at the end, over all groups.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mac_rag.atomic_files import make_folder, sealed, sync_folder, unsealed, write_file, write_text
from mac_rag.cli.terminal import say
from mac_rag.data.characters import check_text, shown_id
from mac_rag.data.provenance import check_document, content_hash
from mac_rag.data.readers import find_files, read_documents
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DataError, DocumentError
from mac_rag.progress import progress_bar
from mac_rag.untrusted_files import ROW, MalformedError, read_file, read_json
from pipelines.recipe import keep_recipe
from pipelines.synthesis import candidates, checks, prompts
from pipelines.synthesis.candidates import KINDS, Candidate, choose_candidates
from pipelines.synthesis.checks import CHECKS, Duplicates, agrees, fault_of_answer, fault_of_question, stands_in
from pipelines.synthesis.prompts import Written, asking, most_tokens, read_answer, read_question, reading
from pipelines.synthesis.writers import Passage, Writer, make_writer

if TYPE_CHECKING:
    from rich.table import Table

_GROUP = 128  # questions
_SEED = 0  # of the drawn subjects: equal documents are asked about the same
_LARGEST_GROUP, _LARGEST_REPORT = 64 << 20, 1 << 16  # bytes
Row = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """Numbers of questions.

    Attributes:
        asked: questions that the LM was asked to write.
        written: questions with an answer that it wrote.
        standing: those of them whose answer stands in the document, as SQuAD compares texts.
        kept: questions that passed all checks.
        dropped: the others, by the first check that each failed.
    """

    asked: int
    written: int
    standing: int
    kept: int
    dropped: Mapping[str, int]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Counts:
        """Counts rows with `dropped`, None or a check, and `stands`, which a row without an answer has not."""
        rows = list(rows)
        reasons = [row["dropped"] for row in rows]
        return cls(
            asked=len(rows),
            written=sum("stands" in row for row in rows),
            standing=sum(row.get("stands", False) for row in rows),
            kept=reasons.count(None),
            dropped={check: reasons.count(check) for check in CHECKS},
        )


@dataclass(frozen=True)
class Report:
    """Results of a self-study: its counts, in all and of each kind of question.

    `kept_standing` counts the kept questions whose answer stands in the document.
    """

    documents: int
    kept_standing: int
    total: Counts
    kinds: Mapping[str, Counts]

    @classmethod
    def of(cls, documents: int, rows: Iterable[Mapping[str, Any]]) -> Report:
        """Counts rows as `Counts.of`, which also have a `kind`."""
        rows = list(rows)
        by_kind = {kind: Counts.of(row for row in rows if row["kind"] == kind) for kind in KINDS}
        standing = sum(row["stands"] for row in rows if row["dropped"] is None)
        return cls(documents, standing, Counts.of(rows), by_kind)

    def json(self) -> str:
        """The report as JSON, which `read_report` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def tables(self) -> tuple[Table, Table]:
        """Kept questions of each kind and of all, and questions that each check dropped."""
        from rich.table import Table

        kinds = Table("kind of question", "asked for", "kept", "share", "answers in the document")
        for name, counts in (*self.kinds.items(), ("all", self.total)):
            shares = _share(counts.kept, counts.asked), _share(counts.standing, counts.written)
            kinds.add_row(name, f"{counts.asked:,}", f"{counts.kept:,}", *shares)
        checks = Table("check", "dropped", "share", "because")
        for check, reason in CHECKS.items():
            dropped = self.total.dropped[check]
            checks.add_row(check, f"{dropped:,}", _share(dropped, self.total.asked), reason)
        for column in (*kinds.columns[1:], *checks.columns[1:3]):
            column.justify = "right"
        return kinds, checks


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def read_report(path: Path) -> Report | None:
    """The report of a finished self-study; None if there is none."""
    try:
        values = read_json(path, _LARGEST_REPORT)
        counts = {name: Counts(**values["kinds"][name]) for name in KINDS}
        return Report(values["documents"], values["kept_standing"], Counts(**values["total"]), counts)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (MalformedError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it, and the same command writes it again") from None


@dataclass(frozen=True)
class _Asked:
    """A question to be written about a passage of a document."""

    id: str
    document_id: str
    passage: Passage
    candidate: Candidate


def study(
    paths: Sequence[Path],
    lm: str,
    output: Path,
    *,
    per_passage: int = 6,
    limit: int | None = None,
    own_answers: bool = False,
) -> Report:
    """Writes questions and answers about documents into a folder, as files that `data.name: own` reads.

    Args:
        paths: files and folders of documents, as `mac-rag adapt` takes them.
        lm: name of the LM that writes; see `pipelines.synthesis.writers.make_writer`.
        output: the folder. An interrupted run in it continues; a finished one is left as it is.
        per_passage: questions to write about each passage of a document.
        limit: largest number of documents, the first ones; None for all.
        own_answers: True to keep the questions with the answers that the LM gives after the passage, unchecked.

    Raises:
        ConfigError: if the folder holds a run of another configuration; for an LM without room for a passage.
        DataError, DocumentError, BankError: for documents that cannot be read or that `mac-rag adapt` refuses.
        ModelLoadError, WorkerError: if the LM cannot be loaded, or fails.
    """
    documents = _checked(read_documents(find_files(paths))[:limit])
    determining = {
        "documents_sha256": _digest(content_hash(document) + document.id for document in documents),
        "lm": lm,
        "per_passage": per_passage,
        "own_answers": own_answers,
        "prompts_sha256": _digest(Path(str(module.__file__)).read_text() for module in (candidates, prompts, checks)),
    }
    make_folder(output)
    keep_recipe(determining, output)
    finished = read_report(output / "study.json")
    if finished is None:
        writer = make_writer(lm)
        asked = list(_plan(documents, per_passage, writer))
        rows = _all_rows(documents, asked, output / "groups", writer, own_answers=own_answers)
        finished = _finish(documents, rows, output)
    shutil.rmtree(output / "groups", ignore_errors=True)
    return finished


def _checked(documents: list[Document]) -> list[Document]:
    """Checks that `mac-rag adapt` takes the documents, and that each fits into a row; returns them.

    Raises:
        DataError, DocumentError, BankError: for one that does not; names it.
    """
    seen: set[str] = set()
    for document in documents:
        check_document(document)
        try:
            check_text(document.text)
        except DocumentError as error:
            raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
        if document.id in seen:
            raise BankError(f"document id {shown_id(document.id)} occurs twice; ids must be unique")
        if len(_line(_document_row(document))) > ROW:
            raise DataError(
                f"document {shown_id(document.id)} takes more than {ROW:,} bytes, the most of a row; divide it"
            )
        seen.add(document.id)
    if not documents:
        raise DataError("there are no documents; give files with at least one")
    return documents


def _all_rows(
    documents: Sequence[Document], asked: Sequence[_Asked], folder: Path, writer: Writer, *, own_answers: bool
) -> list[Row]:
    """The rows of all groups, those of an earlier run included; first shows the costs."""
    groups = [asked[first : first + _GROUP] for first in range(0, len(asked), _GROUP)]
    cost = sum(writer.tokens(each.passage, each.candidate.kind) for each in asked)
    say(
        f"{len(documents):,} documents: {len(asked):,} questions to write, and at most as many to answer; that makes "
        f"up to {2 * len(asked):,} prompts and {cost:,} tokens",
        err=True,
    )
    make_folder(folder)
    rows: list[Row] = []
    with progress_bar("self-study", len(asked)) as bar:
        for number, group in enumerate(groups):
            path = folder / f"{number:06}.json"
            known = _read_group(path, group)
            if known is None:
                known = _written(group, writer, own_answers=own_answers)
                write_text(path, sealed({"rows": known}).decode())
            rows += known
            bar.advance(len(group))
            bar.note(f"{sum(row['dropped'] is None for row in rows):,} kept")
    return rows


def _plan(documents: Sequence[Document], per_passage: int, writer: Writer) -> Iterator[_Asked]:
    """All questions to write, document by document."""
    for document in documents:
        for number, passage in enumerate(writer.passages(document.text), 1):
            rng = random.Random(f"{_SEED}/{document.id}/{number}")
            for place, candidate in enumerate(choose_candidates(passage.text, per_passage, rng), 1):
                yield _Asked(f"{document.id}/{number}.{place}", document.id, passage, candidate)


def _written(group: Sequence[_Asked], writer: Writer, *, own_answers: bool) -> list[Row]:
    """Lets the LM write the questions of a group: a row for each, with the first check that it fails, if any."""
    texts = writer.write(
        [asking(each.passage.text, each.candidate) for each in group],
        [most_tokens(each.candidate.kind, answer=False) for each in group],
    )
    rows = []
    waiting: list[tuple[_Asked, Written, Row]] = []
    for each, text in zip(group, texts, strict=True):
        kind, passage = each.candidate.kind, each.passage.text
        row: Row = {"id": each.id, "document_id": each.document_id, "kind": kind, "dropped": "malformed"}
        rows.append(row)
        pair = read_question(each.candidate, text)
        if pair is None:
            row["question"] = text
            continue
        row |= {"question": pair.question, "answer": pair.answer, "stands": stands_in(pair.answer, passage)}
        row["dropped"] = fault_of_question(pair.question, passage)
        if row["dropped"] is None and not own_answers:
            row["dropped"] = fault_of_answer(kind, pair, passage)
        if row["dropped"] is None:
            waiting.append((each, pair, row))
    answers = writer.write(
        [reading(each.passage.text, each.candidate.kind, pair.question) for each, pair, _ in waiting],
        [most_tokens(each.candidate.kind, answer=True) for each, _, _ in waiting],
    )
    for (each, pair, row), text in zip(waiting, answers, strict=True):
        own = read_answer(text)
        row["own_answer"] = text if own is None else own
        if not own_answers:
            row["dropped"] = None if agrees(own, pair.answer) else "round trip"
        elif own is None:
            row["dropped"] = "malformed"
        else:
            row |= {"answer": own, "stands": stands_in(own, each.passage.text)}
    return rows


def _read_group(path: Path, group: Sequence[_Asked]) -> list[Row] | None:
    """The rows of a group that an earlier run has written; None if they have to be written again."""
    try:
        rows = unsealed(read_file(path, _LARGEST_GROUP)).get("rows")
    except (OSError, MalformedError):
        return None
    if not isinstance(rows, list) or [isinstance(row, dict) and row.get("id") for row in rows] != [
        each.id for each in group
    ]:
        return None
    return rows


def _finish(documents: Sequence[Document], rows: Sequence[Row], output: Path) -> Report:
    """Drops duplicates, and writes the files: last the report, by which a run is known to be finished."""
    known = Duplicates()
    for row in rows:
        if row["dropped"] is None and known.add(row["document_id"], row["question"], row["answer"]):
            row["dropped"] = "duplicate"
    kept = [row for row in rows if row["dropped"] is None]
    report = Report.of(len(documents), rows)
    write_file(output / "documents.jsonl", (_line(_document_row(document)) for document in documents))
    write_file(output / "questions.jsonl", (_line(_question_row(row)) for row in kept))
    write_file(output / "dropped.jsonl", (_line(row) for row in rows if row["dropped"] is not None))
    sync_folder(output)
    write_text(output / "study.json", report.json())
    return report


def _document_row(document: Document) -> Row:
    return {"id": document.id, "text": document.text, **document.metadata}


def _question_row(row: Row) -> Row:
    return {
        "id": row["id"],
        "document_id": row["document_id"],
        "question": row["question"],
        "answers": [row["answer"]],
        "metadata": {"kind": row["kind"]},
    }


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
