"""A rehearsal of tables 1 and 2 from the data as released to the report: the steps and recipes of `eval.paper`.

The readers, commands, recipes and steps are the real ones. Small are the numbers of documents and steps, and the LMs
and encoders that bear the presets' names; they are not quantised, because a CPU cannot train through 4 bit.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from eval.baselines import factory
from eval.baselines.camels import CamelsConfig
from eval.baselines.ccm import CCMConfig
from eval.baselines.factory import BaselineSetup
from eval.harness.paper_plan import TrainedModel, models_needed, models_to_train, steps
from eval.harness.results import Result
from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig
from mac_rag.data.archivalqa import COLUMNS
from mac_rag.data.newswire.generate import generate
from mac_rag.data.streamingqa import PARTS
from mac_rag.model import presets
from pipelines.recipe import load_recipe
from pipelines.tasks.registry import run_task
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig
from tests.data.test_streamingqa import article, write_release
from tests.eval.helpers import Command
from tests.helpers import Folder

SMALL = BaselineSetup(
    training_documents=8, validation_documents=2, rates=(1e-3,), retention_rate=1e-3,
    camels=CamelsConfig(steps=1, accumulate=1), ccm=CCMConfig(steps=1, batch_size=2),
)  # fmt: skip
SHORT = [
    "trainer.steps=2", "trainer.batch_size=4", "trainer.accumulate=2", "trainer.validate_every=2",
    "trainer.save_every=2", "trainer.warmup_steps=1", "trainer.cpu=true", "data.validation_documents=2",
]  # fmt: skip


def write_data(folder: Path) -> None:
    """StreamingQA and ArchivalQA in the files as they are released, with generated news in them."""
    stream, lines = generate("train", 24), []
    rows = []
    for document, question in zip(stream.documents, stream.questions, strict=True):
        line, name = article("20200131", document.text)
        lines.append(line)
        rows.append({"question": question.question, "answers": list(question.answers), "evidence_id": name})
    (folder / "streamingqa").mkdir(parents=True)
    for part in PARTS.values():
        write_release(folder / "streamingqa", lines, *rows, file=part.file)
    (folder / "archivalqa").mkdir()
    for split in ("train", "val", "test", "qa_lt", "qa_lt_val"):
        with (folder / "archivalqa" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            for document, question in zip(stream.documents, stream.questions, strict=True):
                writer.writerow(
                    {"question": question.question, "answer": question.answers[0], "para_id": f"{document.id}_0",
                     "date": "2004-01-31", "ans_paragraph": document.text}
                )  # fmt: skip
            writer.writerow({"question": "?", "answer": "x", "para_id": "z_0", "date": "2004-01-31"})  # no paragraph


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, few steps of the baselines."""
    for split, part in PARTS.items():
        start, stop = (0, 8) if split.startswith("qa") or split == "test" else (8, 20)
        monkeypatch.setitem(PARTS, split, part._replace(start=start, stop=stop))
    monkeypatch.setitem(factory.SCALES, "paper", SMALL)
    monkeypatch.setattr(factory, "_EXAMPLES", 2)
    monkeypatch.setattr("pipelines.tasks.tune_qa.LORA_RANK", 2)


@pytest.fixture
def small_presets(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = EncoderConfig(name=str(model_folder("t5")))
    changes: dict[str, Any] = {"amortization": encoder, "input_encoder": encoder, "tokens": 4}
    changes["aggregation"] = AggregationConfig(blocks=2, heads=2, head_width=8)
    for name, config in presets.PAPER.items():
        lm = BaseLMConfig(name=str(model_folder("llama" if name == "llama2-7b" else "gpt2")))
        monkeypatch.setitem(presets.PRESETS, name, config.model_copy(update={**changes, "base_lm": lm}))


def train(model: TrainedModel, data: Path) -> None:
    kind = TuneConfig if model.task == "tune_qa" else TrainConfig
    sets = [] if model.task == "tune_qa" else ["context_set=2"]
    run_task(
        model.task,
        load_recipe(kind, model.recipe, [*model.overrides(data / model.dataset), *SHORT, *sets]),
        Path(model.folder),
    )


@pytest.mark.slow
def test_tables_1_and_2_from_data_to_report(
    command: Command, small_presets: None, shortened: None, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write_data(data)
    planned = [step for step in steps("paper", data, 0) if not step.missing]
    tables = [
        step for step in planned
        if (step.experiment == "main_table" and step.name.endswith("streamingqa")) or step.name == "archivalqa"
    ]  # fmt: skip
    assert len(tables) == 5
    for model in models_to_train(path for step in tables for path in models_needed(step)):
        train(model, data)
        assert (Path(model.path) / "config.json").exists()
    for step in tables:
        arguments = [*step.arguments, "--documents", "6", "--questions", "4", "--output", str(step.result(Path("out")))]
        compared = step.experiment == "main_table"
        expected = {"MAC", "Uniform", "Salient Spans", "2-shot", "Zero-shot"} if compared else {"bm25 top-5 + MAC"}
        if not compared:
            arguments[arguments.index("--retriever") + 1] = "bm25"  # the encoders of the others are not here
        code, _, errors = command(f"eval.{step.experiment}", *arguments)
        assert code == 0, errors
        result = Result.read(step.result(Path("out")))
        assert (result.protocol, result.not_run) == ("published", {})
        assert expected <= {row.name for row in result.rows}
        assert any(row.name == "CaMeLS" for row in result.rows) == (compared and "llama2-7b" not in step.name)
    assert command("eval.report.__main__", "out", "--output", "report.html")[0] == 0
    page = Path("report.html").read_text()
    assert page.count("published protocol") >= 5
