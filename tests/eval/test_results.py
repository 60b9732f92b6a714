"""Result files: what they hold, hashes of samples, and the commit that they name."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval import results
from eval.results import Adaptation, Commit, Data, Model, Result, Row, Sample, Verdict, provenance, result_path, show
from mac_rag.data.types import Question
from mac_rag.errors import ConfigError

QUESTION = Question("q1", "Who opened the harbour of Lünd?", ("Ada Voss", "Voss"), "d1")
VERDICT = Verdict(prediction="Ada", em=0.0, f1=2 / 3, em_prefix=0.0, retrieved=("d1", "d2"), truncated=False)
HASH = "d4493cf344f50bcb902f87fa03c53b9a3de649dba7c1031206f3de99b877d78b"  # of the sample of both, as row MAC
ROW = Row(
    name="MAC",
    k=None,
    documents=7,
    questions=3,
    em=1 / 3,
    f1=0.5,
    em_prefix=2 / 3,
    recall_at_k=None,
    truncated=1,
    seconds=2.0,
)


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        **provenance("squad"),
        "config": {"k": 5},
        "seed": 0,
        "model": Model(name="mac-tiny", fingerprint="ab", device="cpu", config={"tokens": 3}),
        "data": Data(name="squad", split="test", source="folder", documents=7, questions=3),
        "adaptation": Adaptation(documents=7, rows=9, chunked=2, seconds=0.1),
        "rows": (ROW,),
        "samples": (Sample.of(QUESTION, {"MAC": VERDICT}),),
    }
    return Result(**(values | changes))


class TestHash:
    def test_is_the_sha256_of_all_the_rest(self) -> None:
        sample = Sample.of(QUESTION, {"MAC": VERDICT}).model_dump(mode="json")
        claimed = sample.pop("hash")
        text = json.dumps(sample, sort_keys=True, separators=(",", ":"))
        assert claimed == hashlib.sha256(text.encode()).hexdigest()

    def test_stays_the_same_from_one_version_to_the_next(self) -> None:
        """Results of different days can be compared; if this must change, so must SCHEMA_VERSION."""
        assert Sample.of(QUESTION, {"MAC": VERDICT}).hash == HASH

    def test_does_not_depend_on_the_order_of_the_rows(self) -> None:
        other = VERDICT.model_copy(update={"prediction": "Voss"})
        forth, back = {"MAC": VERDICT, "BM25": other}, {"BM25": other, "MAC": VERDICT}
        assert Sample.of(QUESTION, forth).hash == Sample.of(QUESTION, back).hash

    @pytest.mark.parametrize(
        "question",
        [
            Question("q2", QUESTION.question, QUESTION.answers, "d1"),
            Question("q1", "Who?", QUESTION.answers, "d1"),
            Question("q1", QUESTION.question, ("Ada Voss",), "d1"),
            Question("q1", QUESTION.question, QUESTION.answers, "d2"),
        ],
    )
    def test_changes_with_the_question(self, question: Question) -> None:
        assert Sample.of(question, {"MAC": VERDICT}).hash != HASH

    @pytest.mark.parametrize("change", [{"prediction": "ada"}, {"retrieved": ("d2", "d1")}, {"truncated": True}])
    def test_changes_with_the_answer(self, change: dict[str, Any]) -> None:
        assert Sample.of(QUESTION, {"MAC": VERDICT.model_copy(update=change)}).hash != HASH


class TestFile:
    def test_holds_everything_and_reads_back(self, tmp_path: Path) -> None:
        written = result()
        written.write(tmp_path / "result.json")
        values = json.loads((tmp_path / "result.json").read_text())
        assert Result.parse(values, "file") == written
        assert values["schema_version"] == results.SCHEMA_VERSION
        assert {"python", "torch", "transformers", "mac-rag", "bm25s"} <= values["versions"].keys()
        assert values["command"].startswith("python -m eval.squad")
        assert values["samples"][0]["rows"]["MAC"]["prediction"] == "Ada"

    def test_replaces_another_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        result(seed=1).write(tmp_path / "result.json")
        result(seed=2).write(tmp_path / "result.json")
        assert json.loads((tmp_path / "result.json").read_text())["seed"] == 2
        assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


class TestPath:
    def test_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        path = result_path(None, "squad")
        assert path.parent == Path("results")
        assert path.name.startswith("squad-")
        assert path.parent.is_dir()

    def test_makes_folders(self, tmp_path: Path) -> None:
        assert result_path(tmp_path / "a" / "b" / "r.json", "squad").parent.is_dir()

    def test_refuses_what_cannot_be_a_file(self, tmp_path: Path) -> None:
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


def test_table_shows_percentages(capsys: pytest.CaptureFixture[str]) -> None:
    show([ROW], title="squad")
    assert "recall" not in capsys.readouterr().out
    show([ROW, ROW.model_copy(update={"name": "BM25", "k": 5, "recall_at_k": 0.875})], title="squad")
    shown = capsys.readouterr().out
    mac, bm25 = (line.strip("│ ").split() for line in shown.splitlines() if "MAC" in line or "BM25" in line)
    assert [cell for cell in mac if cell != "│"] == ["MAC", "33.3", "50.0", "66.7", "-", "1", "1.5"]
    assert [cell for cell in bm25 if cell != "│"] == ["BM25", "33.3", "50.0", "66.7", "87.5", "1", "1.5"]
