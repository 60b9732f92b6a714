"""The report of a self-study: how many questions were written and kept, and why the others were dropped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mac_rag.errors import DataError
from mac_rag.untrusted_files import MalformedError, read_json
from pipelines.synthesis.candidates import KINDS
from pipelines.synthesis.checks import CHECKS

if TYPE_CHECKING:
    from rich.table import Table

_LARGEST = 1 << 16  # bytes


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
    """What came of a self-study.

    Attributes:
        documents: number of documents.
        kept_standing: number of kept questions whose answer stands in the document.
        total: counts of all questions.
        kinds: counts of each kind of question.
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
        """What was kept of each kind of question and of all, and what each check dropped."""
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
    """The report of a finished self-study; None if there is none.

    Raises:
        DataError: when it is damaged; names the file.
    """
    try:
        values = read_json(path, _LARGEST)
        counts = {name: Counts(**values["kinds"][name]) for name in KINDS}
        return Report(values["documents"], values["kept_standing"], Counts(**values["total"]), counts)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (MalformedError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it, and the same command writes it again") from None
