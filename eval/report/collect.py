"""Which results a report shows: the newest of each experiment on each data set, and what was tried without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.harness.bootstrap import Interval, paired_interval
from eval.harness.paper_steps import StepRecord, read_records
from eval.harness.results import Result, Row, Sample
from mac_rag.errors import DataError


@dataclass(frozen=True)
class Found:
    """A result and the file it was read from."""

    path: Path
    result: Result

    @property
    def where(self) -> str:
        """The data it is about, as a reader calls it."""
        if self.result.data is not None:
            return self.result.data.name
        return " and ".join(
            dict.fromkeys(str(row.settings["dataset"]) for row in self.result.rows if "dataset" in row.settings)
        )

    def by_dataset(self) -> list[Found]:
        """The same, apart for each data set that its rows name; rows without one belong to none of them."""
        named = dict.fromkeys(row.settings.get("dataset") for row in self.result.rows)
        if len(named) < 2:
            return [self]
        parts = []
        for name in named:
            rows = tuple(row for row in self.result.rows if row.settings.get("dataset") == name)
            data = self.result.data if name is None else None
            parts.append(Found(self.path, self.result.model_copy(update={"rows": rows, "data": data})))
        return parts

    def samples(self) -> tuple[Sample, ...]:
        return self.result.read_samples(self.path)

    def difference(self, ours: Row, theirs: Row) -> Interval | None:
        """F1 of one row less that of another, question by question; None where they were not asked the same."""
        pairs = [
            (sample.rows[ours.name].f1, sample.rows[theirs.name].f1)
            for sample in self.samples()
            if ours.name in sample.rows and theirs.name in sample.rows
        ]
        if not pairs:
            return None
        return paired_interval([mine for mine, _ in pairs], [yours for _, yours in pairs], seed=self.result.seed)


@dataclass(frozen=True)
class Collection:
    """All that a report is about.

    Attributes:
        found: results, the newest of each experiment, scale and data set, in the order of the files' names.
        refused: files that are no results of this version, and why.
        records: what became of the steps of `eval.paper`, where it ran.
    """

    found: tuple[Found, ...]
    refused: dict[Path, str]
    records: tuple[StepRecord, ...]

    def of(self, experiment: str) -> list[Found]:
        return [found for found in self.found if found.result.experiment == experiment]


def collect(folders: Sequence[Path]) -> Collection:
    """Reads every result in some folders; later files replace earlier ones of the same kind.

    Raises:
        DataError: for what is no folder, and when there is no result in any.
    """
    newest: dict[tuple[str | None, ...], Found] = {}
    refused: dict[Path, str] = {}
    records: list[StepRecord] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder of results")
        records += read_records(folder)
        for path in _result_files(folder):
            try:
                found = Found(path, Result.read(path))
            except DataError as error:
                refused[path] = str(error)
                continue
            before = newest.get(_kind(found.result))
            if before is None or before.result.created <= found.result.created:
                newest[_kind(found.result)] = found
    if not newest:
        reasons = "".join(f"\n  {reason}" for reason in refused.values())
        raise DataError(f"no result in {', '.join(map(str, folders))}; python -m eval.paper makes them{reasons}")
    return Collection(tuple(sorted(newest.values(), key=lambda found: found.path.name)), refused, tuple(records))


def _result_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.glob("*.json")):
        if path.name != "steps.json":
            yield path


def _kind(result: Result) -> tuple[str | None, ...]:
    data = result.data
    model = result.model.name if result.model else None
    where = (data.name, data.split) if data else (str(result.config.get("data")),)
    return (result.experiment, result.scale, model, *where)
