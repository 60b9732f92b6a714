"""The results that a report shows: the newest of each experiment on each data set, and the steps without a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.harness.bootstrap import Interval, paired_interval
from eval.harness.paper_plan import RECORDS, StepRecord, read_records
from eval.harness.results import Data, Result, Row
from mac_rag.errors import DataError


@dataclass(frozen=True)
class ResultFile:
    """A result and its file."""

    path: Path
    result: Result

    @property
    def where(self) -> str:
        """The name of its data set, the path of one of the user's own, or the names of several."""
        if self.result.data is not None:
            return _name(self.result.data)
        return " and ".join(
            dict.fromkeys(str(row.settings["dataset"]) for row in self.result.rows if "dataset" in row.settings)
        )

    def by_dataset(self) -> list[ResultFile]:
        """Splits the result: a part for each data set that its rows name, and one for the rows that name none."""
        named = dict.fromkeys(row.settings.get("dataset") for row in self.result.rows)
        if len(named) < 2:
            return [self]
        parts = []
        for name in named:
            rows = tuple(row for row in self.result.rows if row.settings.get("dataset") == name)
            data = self.result.data if name is None else None
            parts.append(ResultFile(self.path, self.result.model_copy(update={"rows": rows, "data": data})))
        return parts

    def difference(self, ours: Row, theirs: Row) -> Interval | None:
        """F1 of one row less that of another, over their common questions; None if they have none.

        Raises:
            DataError: if the file of samples is missing or changed.
        """
        pairs = [
            (sample.rows[ours.name].f1, sample.rows[theirs.name].f1)
            for sample in self.result.read_samples(self.path)
            if ours.name in sample.rows and theirs.name in sample.rows
        ]
        if not pairs:
            return None
        return paired_interval([mine for mine, _ in pairs], [yours for _, yours in pairs], seed=self.result.seed)


@dataclass(frozen=True)
class Collection:
    """The newest result of each experiment, scale, protocol, model and data set; refused files; outcomes of steps."""

    files: tuple[ResultFile, ...]
    refused: dict[Path, str]
    records: tuple[StepRecord, ...]

    def of(self, experiment: str) -> list[ResultFile]:
        """The results of one experiment."""
        return [file for file in self.files if file.result.experiment == experiment]


def collect(folders: Sequence[Path]) -> Collection:
    """Reads all results in some folders; of results of the same kind, the newest counts."""
    newest: dict[tuple[str | None, ...], ResultFile] = {}
    refused: dict[Path, str] = {}
    records: list[StepRecord] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder of results")
        records += read_records(folder)
        for path in sorted(set(folder.glob("*.json")) - {folder / RECORDS}):
            try:
                file = ResultFile(path, Result.read(path))
            except DataError as error:
                refused[path] = str(error)
                continue
            before = newest.get(_kind(file.result))
            if before is None or before.result.created <= file.result.created:
                newest[_kind(file.result)] = file
    if not newest:
        reasons = "".join(f"\n  {reason}" for reason in refused.values())
        raise DataError(f"no result in {', '.join(map(str, folders))}; python -m eval.paper makes them{reasons}")
    return Collection(tuple(sorted(newest.values(), key=lambda file: file.path.name)), refused, tuple(records))


def _name(data: Data) -> str:
    return data.source if data.name == "own" else data.name  # all of a user's own data sets have this name


def _kind(result: Result) -> tuple[str | None, ...]:
    data = result.data
    model = result.model.name if result.model else None
    where = (_name(data), data.split) if data else (str(result.config.get("data")),)
    return (result.experiment, result.scale, result.protocol, model, *where)
