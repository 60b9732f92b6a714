"""Splits of a data set are joined for training, and held-out data among what is trained on is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mac_rag.data import squad
from mac_rag.errors import ConfigError, DataError
from pipelines.corpora.qa_data import DataConfig
from tests.pipelines.helpers import command

PARAGRAPH = (
    "The harbour of Lerwick was rebuilt in 1886 by the engineer John Gifford, who came from Aberdeen that spring. "
    "Its two stone piers cost 41,000 pounds, and a lighthouse was added by the Northern Board nine years later. "
    "After the war the herring fleet left for Peterhead, and only 12 boats remained in the whole of Shetland by 1931."
)


def squad_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two articles in SQuAD's layout, and splits of one article each."""
    articles = []
    for number in range(2):
        qas = [
            {"id": f"{number}{i}", "question": question, "answers": [{"text": answer, "answer_start": 0}]}
            for i, (question, answer) in enumerate([("Who rebuilt it?", "John Gifford"), ("When?", "1886")])
        ]
        articles.append({"title": f"Title {number}", "paragraphs": [{"context": PARAGRAPH + f" {number}", "qas": qas}]})
    (folder / "train-v1.1.json").write_text(json.dumps({"data": articles}))
    parts = {"qa_lt": (0, 2), "qa_lt_val": (2, 4)}
    for name, (start, stop) in parts.items():
        monkeypatch.setitem(squad.PARTS, name, squad.SplitRange("train-v1.1.json", start, stop, 4))
    return folder


def test_splits_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(squad_folder(tmp_path, monkeypatch))
    alone = [DataConfig(name="squad", path=folder, train=split).training_set() for split in ("qa_lt_val", "qa_lt")]
    both = DataConfig(name="squad", path=folder, train=("qa_lt_val", "qa_lt")).training_set()
    assert both.documents == alone[0].documents + alone[1].documents
    assert both.questions == alone[0].questions + alone[1].questions
    with pytest.raises(DataError, match=r"qa_lt\+qa_lt cannot be joined: both hold the document 'Title_0-000'"):
        DataConfig(name="squad", path=folder, train=("qa_lt", "qa_lt")).training_set()
    with pytest.raises(ConfigError, match="train must name a split"):
        DataConfig.parse({"train": []}, "test")


def test_test_data_in_training_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two articles ask the same questions."""
    squad = {"name": "squad", "path": str(squad_folder(tmp_path, monkeypatch)), "train": "qa_lt", "val": "qa_lt_val"}
    trainer = {"steps": 1, "batch_size": 1, "learning_rate": 1}
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(yaml.safe_dump({"task": "tune_qa", "base_lm": {"name": "x"}, "data": squad, "trainer": trainer}))
    options = (str(recipe), "--split", "qa_lt_val")
    found = command("pipelines.check_splits", *options)
    assert "shares with qa_lt_val: 0 of 1 documents, 0 of 1 titles, 2 of 2 questions" in found.stdout
    assert "2 paragraphs, titles or questions" in str(found.exception)
    assert command("pipelines.check_splits", *options, "--set", "data.unlike=qa_lt_val").exit_code == 0
    found = command("pipelines.check_splits", *options, "--set", "data.train=qa_lt_val")
    assert "shares with qa_lt_val: 1 of 1 documents, 1 of 1 titles, 2 of 2 questions" in found.stdout
    assert "4 paragraphs, titles or questions" in str(found.exception)
    (tmp_path / "pretrain.yaml").write_text(yaml.safe_dump({"task": "pretrain", "trainer": trainer}))
    assert "nothing to compare" in command("pipelines.check_splits", str(tmp_path / "pretrain.yaml")).stdout


def test_generated_news_is_held_against_its_own_held_out_stream() -> None:
    """A split of a generated data set is generated, too, and held against what is trained on."""
    options = ("mac-tiny/train", "--set", "data.documents=50")
    found = command("pipelines.check_splits", *options)
    assert found.exit_code == 0
    assert "newswire, train shares with test: 0 of 1,665 documents" in found.stdout
    found = command("pipelines.check_splits", *options, "--set", "data.seed=0", "--split", "train")
    assert "shares with train: 0 of 1,665 documents, 50 of " in found.stdout
    assert found.exit_code == 1
