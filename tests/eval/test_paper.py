"""Running all experiments: what is planned, what is run again and what is not, and what becomes of failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eval.harness import paper_plan as plan
from eval.harness.paper_plan import DATASETS, Step, StepRecord, read_records, write_records
from eval.harness.results import Result, checkout
from eval.paper import AnswerDigests, finished, run_steps
from mac_rag.errors import DataError
from mac_rag.model import MACModel
from tests.eval.helpers import Command, result, scored
from tests.helpers import DEEP, DIGITS


def on(checkpoint: Path) -> Step:
    arguments = ("--model", str(checkpoint), "--sizes", "3", "--questions", "3", "--prior", "off")
    return Step("bank_size", "bank_size", arguments)


class TestRun:
    @pytest.mark.slow
    def test_continues_after_failures_and_repeats_no_finished_step(
        self, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        planned = [
            Step("lost", "bank_size", ("--sizes", "none")),
            Step("elsewhere", "ood", (), missing="no folder squad in --data"),
            on(tiny_checkpoint),
        ]
        records = run_steps(planned, tmp_path)
        assert [(record.name, record.status) for record in records] == [
            ("lost", "failed"),
            ("elsewhere", "not run"),
            ("bank_size", "done"),
        ]
        assert records[0].reason == "--sizes takes whole numbers separated by commas, got 'none'"
        assert records[1].reason == "no folder squad in --data"
        assert Result.read(tmp_path / "bank_size.json").command == planned[2].shown(tmp_path)
        assert "Generated newswire" in (tmp_path / "bank_size.log").read_text()
        assert read_records(tmp_path) == records
        assert "[1/3] lost\n" in capsys.readouterr().out

        written = (tmp_path / "bank_size.json").stat().st_mtime_ns
        again = run_steps(planned[1:], tmp_path)
        assert again[1] == records[2]
        assert (tmp_path / "bank_size.json").stat().st_mtime_ns == written
        assert "[2/2] bank_size: done before" in capsys.readouterr().out

    def test_results_of_others_do_not_count(self, tiny_checkpoint: Path, tiny_model: MACModel, tmp_path: Path) -> None:
        step, commit, prints = on(tiny_checkpoint), checkout(), AnswerDigests()
        digest = MACModel.from_pretrained(str(tiny_checkpoint)).answer_digest
        named = {"name": str(tiny_checkpoint), "answer_digest": digest}
        mine = result("bank_size").model.model_copy(update=named)
        made = result("bank_size", command=step.shown(tmp_path), git=commit, model=mine)
        assert not finished(step, tmp_path, commit, prints)
        made.write(step.result(tmp_path))
        assert finished(step, tmp_path, commit, prints)
        assert not finished(replace(step, arguments=("--seed", "1")), tmp_path, commit, prints)
        assert not finished(step, tmp_path, None if commit else result("x").git, prints)
        for other in ({"answer_digest": "00"}, {"name": str(tmp_path / "gone")}):
            made.model_copy(update={"model": mine.model_copy(update=other)}).write(step.result(tmp_path))
            assert not finished(step, tmp_path, commit, prints)
        step.result(tmp_path).write_text("{")
        assert not finished(step, tmp_path, commit, prints)

    @pytest.mark.parametrize("content", ["[1]", "1", DEEP, f"[{DIGITS}]"])
    def test_damaged_records_are_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "steps.json").write_text(content)
        with pytest.raises(DataError, match=r"steps\.json is damaged"):
            read_records(tmp_path)


class TestCommand:
    def test_failures_are_reported(self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def planned(scale: str, data: Path | None, seed: int) -> list[Step]:
            return [Step("peft", "peft", (), missing="no time"), Step("gone", "nowhere", ())]

        monkeypatch.setattr(plan, "steps", planned)
        (tmp_path / "out").mkdir()
        result("archivalqa", [scored("MAC", 0.5)]).write(tmp_path / "out" / "archivalqa.json")
        code, shown, errors = command("eval.paper", "--output", "out")
        assert code == 1
        assert "0 done, 1 failed, 1 not run" in shown
        assert "failed: gone: " in errors
        assert "eval.nowhere" in errors
        assert "peft: not run, no time" in (tmp_path / "out" / "report.html").read_text()

    @pytest.mark.parametrize("datasets", [DATASETS, ("streamingqa",), ()])
    def test_a_dry_run_shows_what_would_run(self, command: Command, tmp_path: Path, datasets: tuple[str, ...]) -> None:
        for name in datasets:
            (tmp_path / "data" / name).mkdir(parents=True)
        data = ("--data", tmp_path / "data") if datasets else ()
        code, shown, _ = command("eval.paper", "--scale", "paper", "--dry-run", *data)
        assert code == 0
        planned = plan.steps("paper", Path(data[1]) if data else None, 0)
        for number, step in enumerate(planned, 1):
            assert f"[{number}/{len(planned)}] {step.name}" in shown
        named = [{Path(text).name for text in step.arguments} & set(DATASETS) for step in planned]
        waiting = sum(not names <= set(datasets) for names in named)
        assert f"{len(planned)} steps: {waiting} wait for data; " in shown
        assert shown.count("data that you bring") == waiting
        assert "python -m pipelines.tune_qa --config gpt2-xl/tune_qa --output runs/gpt2-xl/tune_qa " in shown
        assert not (tmp_path / "results").exists()

    def test_a_dry_run_of_the_tiny_scale(self, command: Command) -> None:
        code, shown, _ = command("eval.paper", "--dry-run")
        assert code == 0
        assert "0 models to train first" in shown

    def test_refusals(self, command: Command, tmp_path: Path) -> None:
        code, _, errors = command("eval.paper", "--scale", "paper", "--data", tmp_path)
        assert code == 1
        assert "none of the folders" in errors
        code, _, errors = command("eval.paper", "--data", tmp_path)
        assert code == 1
        assert f"--data {tmp_path} is for --scale paper" in errors
        assert command("eval.paper", "--scale", "huge")[0] == 2
        (tmp_path / "file").touch()
        code, _, errors = command("eval.paper", "--output", tmp_path / "file")
        assert code == 1
        assert "cannot be a folder" in errors


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    record = StepRecord(name="peft", experiment="peft", status="failed", reason="no time")
    write_records(tmp_path, [record])
    assert read_records(tmp_path) == [record]
