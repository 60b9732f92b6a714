"""Result files: what they hold, hashes of samples, and the commit that they name."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.harness import results
from eval.harness.results import (
    BY_DATES,
    Adaptation,
    Commit,
    Data,
    Model,
    Result,
    Row,
    Sample,
    Verdict,
    provenance,
    result_path,
)
from eval.harness.row_table import show
from mac_rag.data.types import Question
from mac_rag.errors import ConfigError, DataError
from tests.helpers import DEEP, DIGITS

QUESTION = Question("q1", "Who opened the harbour of Lünd?", ("Ada Voss", "Voss"), "d1")
VERDICT = Verdict(prediction="Ada", em=0.0, f1=2 / 3, em_prefix=0.0, retrieved=("d1", "d2"), truncated=False)
SAMPLE = Sample.of(QUESTION, {"MAC": VERDICT})
HASH = "d4493cf344f50bcb902f87fa03c53b9a3de649dba7c1031206f3de99b877d78b"  # of the sample of both, as row MAC
FIGURES = {"em": 1 / 3, "f1": 0.5, "em_prefix": 2 / 3}
ROW = Row(name="MAC", documents=7, questions=3, truncated=1, seconds=2.0, **FIGURES)


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        **provenance("squad"),
        "config": {"k": 5},
        "seed": 0,
        "model": Model(name="mac-tiny", fingerprint="ab", answer_digest="cd", device="cpu", config={"tokens": 3}),
        "data": Data(name="squad", split="test", source="folder", documents=7, questions=3),
        "adaptation": Adaptation(documents=7, rows=9, chunked=2, seconds=0.1),
        "rows": (ROW,),
    }
    return Result(**(values | changes))


class TestHash:
    @pytest.mark.parametrize("as_of", [None, "2004"])
    def test_is_the_sha256_of_all_other_fields_in_any_order(self, as_of: str | None) -> None:
        sample = Sample.of(replace(QUESTION, as_of=as_of), {"MAC": VERDICT}).model_dump(mode="json", exclude_none=True)
        claimed = sample.pop("hash")
        text = json.dumps(sample, sort_keys=True, separators=(",", ":"))
        assert claimed == hashlib.sha256(text.encode()).hexdigest()

    def test_stays_the_same_from_one_version_to_the_next(self) -> None:
        """Results of different days can be compared; if this must change, so must SCHEMA_VERSION."""
        assert Sample.of(QUESTION, {"MAC": VERDICT}).hash == HASH


class TestFile:
    def test_holds_everything_and_reads_back(self, tmp_path: Path) -> None:
        path = tmp_path / "result.json"
        written = result(notes=("rule-based spans",), not_run={"4 bit": "needs a GPU"}, scale="tiny").write(
            path, [SAMPLE]
        )
        values = json.loads(path.read_text())
        assert Result.read(path) == written
        assert written.read_samples(path) == (SAMPLE,)
        assert values["schema_version"] == results.SCHEMA_VERSION
        assert values["experiment"] == "squad"
        assert {"python", "torch", "transformers", "mac-rag", "rank-bm25"} <= values["versions"].keys()
        assert values["command"].startswith("python -m eval.squad")
        assert values["samples"]["count"] == 1
        lines = (tmp_path / values["samples"]["name"]).read_bytes()
        assert values["samples"]["sha256"] == hashlib.sha256(lines).hexdigest()
        assert json.loads(lines)["rows"]["MAC"]["prediction"] == "Ada"

    def test_an_experiment_needs_neither_questions_nor_a_model(self, tmp_path: Path) -> None:
        rows = (
            Row(name="p = 0.25", settings={"p": 0.25, "K": 4, "method": "MAC"}, measures={"peak_mb": 12.5}),
            Row(name="diverged", measures={"perplexity": float("inf")}),
        )
        path = tmp_path / "r.json"
        result(rows=rows, model=None, data=None, adaptation=None).write(path)
        read = Result.read(path)
        assert read.rows == rows
        assert [type(value) for value in read.rows[0].settings.values()] == [float, int, str]
        assert read.samples is None
        assert read.read_samples(path) == ()
        assert [file.name for file in tmp_path.iterdir()] == ["r.json"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "not JSON"),
            (DEEP, "nested more than 72 deep"),
            (f'{{"seed": {DIGITS}}}', "a number of 5,000 digits"),
            ("[]", "no result of an evaluation"),
            ('{"rows": []}', "no result of an evaluation"),
            ('{"schema_version": 2}', f"has schema version 2, but this version reads {results.SCHEMA_VERSION}"),
            (f'{{"schema_version": {results.SCHEMA_VERSION}, "bogus": 1}}', "bogus"),
        ],
    )
    def test_what_is_no_result_is_refused(self, tmp_path: Path, content: str, message: str) -> None:
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(DataError, match=message) as refusal:
            Result.read(tmp_path / "r.json")
        assert "r.json" in str(refusal.value)

    def test_samples_are_those_of_the_result(self, tmp_path: Path) -> None:
        path = tmp_path / "r.json"
        written = result().write(path, [SAMPLE])
        file = tmp_path / "r.samples.jsonl"
        file.write_text(file.read_text().replace("Ada", "Eve", 1))
        with pytest.raises(DataError, match="sha256 differs"):
            written.read_samples(path)
        file.unlink()
        with pytest.raises(DataError, match="cannot be read"):
            written.read_samples(path)


def test_the_path_of_a_result_has_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = result_path(None, "squad")
    assert path.parent == Path("results")
    assert path.name.startswith("squad-")
    for each in (path, result_path(tmp_path / "a" / "b" / "r.json", "squad")):
        assert each.parent.is_dir()
    with pytest.raises(ConfigError, match="is a folder"):
        result_path(tmp_path, "squad")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        result_path(tmp_path / "file" / "r.json", "squad")


class TestCommit:
    def git(self, folder: Path, *arguments: str) -> str:
        who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
        return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout

    def test_names_the_checkout_and_its_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "eval"
        package.mkdir()
        (package / "results.py").write_text("# version 1\n")
        monkeypatch.setattr(results, "__file__", str(package / "results.py"))
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert provenance("squad")["git"] is None
        self.git(tmp_path, "init")
        assert provenance("squad")["git"] is None  # inside a checkout, but not part of it
        self.git(tmp_path, "add", ".")
        self.git(tmp_path, "commit", "-m", "first")
        commit = self.git(tmp_path, "rev-parse", "HEAD").strip()
        assert provenance("squad")["git"] == Commit(commit=commit, dirty=False)
        (package / "results.py").write_text("# version 2\n")
        assert provenance("squad")["git"] == Commit(commit=commit, dirty=True)


def cells(shown: str) -> list[list[str]]:
    """The words of each line of a table, its header first."""
    lines = (re.sub("[│┃%]", " ", line).split() for line in shown.splitlines() if "┃" in line or "│" in line)
    return list(lines)


def test_a_table_shows_percentages_and_any_measures(capsys: pytest.CaptureFixture[str]) -> None:
    show([ROW], title="squad")
    assert "recall" not in capsys.readouterr().out
    show([ROW, ROW.model_copy(update={"name": "BM25", "k": 5, "recall_at_k": 0.875})], title="squad")
    _, mac, bm25 = cells(capsys.readouterr().out)
    assert mac == ["MAC", "33.3", "50.0", "66.7", "-", "1", "1.5"]
    assert bm25 == ["BM25", "33.3", "50.0", "66.7", "87.5", "1", "1.5"]
    rows = [Row(name="p0", measures={"peak_mb": 1234.5}), Row(name="p1", measures={"seconds": 0.25}, f1=0.5)]
    show(rows, title="dropout")
    expected = [["F1", "peak_mb", "seconds"], ["p0", "-", "1,234", "-"], ["p1", "50.0", "-", "0.25"]]
    assert cells(capsys.readouterr().out) == expected


def test_the_gain_by_dates_is_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    show([ROW.model_copy(update={"measures": dict(zip(BY_DATES, (0.051, 0.01, -0.02)))})], title="timeqa")
    shown = capsys.readouterr().out
    assert "+5.1 (+1.0, -2.0)" in shown
    assert "dates_f1" not in shown
