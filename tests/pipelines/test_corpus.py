"""What a base LM reads: blocks on disk, questions made from text, and the shares of a batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data.types import Document
from mac_rag.errors import ConfigError, DataError
from pipelines.corpora.blocks import Blocks, cut, pack, write_blocks
from pipelines.corpora.cloze import cloze_questions
from pipelines.corpora.qa_data import DataConfig
from pipelines.tasks.pretrain import PretrainConfig, PretrainTask, answer_tokens, portions
from pipelines.trainer import Trainer
from tests.pipelines.helpers import command

PLAIN = str.maketrans("", "", ",.")
ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), max_size=80)
PARAGRAPH = (
    "The harbour of Lerwick was rebuilt in 1886 by the engineer John Gifford, who came from Aberdeen that spring. "
    "Its two stone piers cost 41,000 pounds, and a lighthouse was added by the Northern Board nine years later. "
    "After the war the herring fleet left for Peterhead, and only 12 boats remained in the whole of Shetland by 1931."
)


@given(ROWS, st.integers(3, 10))
def test_cut_blocks_are_the_joined_rows(rows: list[list[int]], length: int) -> None:
    blocks = list(cut(rows, length))
    joined = [token for row in rows for token in row]
    assert [token for block in blocks for token in block] == joined[: len(joined) // length * length]
    assert all(len(block) == length for block in blocks)


@given(ROWS, st.integers(3, 10))
def test_packed_blocks_hold_every_row_whole(rows: list[list[int]], length: int) -> None:
    # Each row starts with a token that no other position has, so that blocks can be taken apart again.
    marked = [[100, *row][:length] for row in rows]
    found: list[list[int]] = []
    for block in pack(marked, length, 0):
        assert len(block) == length
        for token in block:
            if token == 100:
                found.append([])
            if token:
                found[-1].append(token)
    assert sorted(found) == sorted(marked)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_blocks_on_disk_are_one_sequence_of_blocks(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    rows = np.arange(70).reshape(7, 10) + vocabulary - 70
    paths = [tmp_path / f"{number}.npy" for number in range(3)]
    for path, part in zip(paths, (rows[:4], rows[:0], rows[4:]), strict=True):
        write_blocks(path, part.tolist(), 10, vocabulary)
        assert np.load(path).dtype == dtype
    blocks = Blocks.open(paths)
    assert [blocks.sequence(i, 0) for i in range(len(blocks))] == rows.tolist()
    for held_out in range(1, 7):
        kept, rest = blocks.split(held_out)
        assert [kept.sequence(i, 0) for i in range(len(kept))] == rows[:-held_out].tolist()
        assert [rest.sequence(i, 0) for i in range(len(rest))] == rows[-held_out:].tolist()
    with pytest.raises(DataError, match="validation_documents is 7, but the corpus fills only 7"):
        blocks.split(7)


@given(st.integers(1, 64), st.lists(st.floats(0, 9), min_size=1, max_size=4).filter(lambda shares: sum(shares) > 0.1))
def test_portions_add_up_and_stay_close_to_their_shares(size: int, shares: list[float]) -> None:
    counts = portions(size, shares)
    assert sum(counts) == size
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - size * share / sum(shares)) < 1
        assert share or not count


@given(st.lists(st.lists(st.integers(0, 4), min_size=9, max_size=9), min_size=1, max_size=3))
def test_answer_tokens_stand_between_the_mark_and_the_end(rows: list[list[int]]) -> None:
    """Against a plain loop; 1 2 is the mark, 0 the end."""
    expected = []
    for row in rows:
        inside, line = False, []
        for place, token in enumerate(row):
            line.append(inside)
            if token == 0:
                inside = False
            elif token == 2 and place and row[place - 1] == 1:
                inside = True
        expected.append(line)
    assert answer_tokens(torch.tensor(rows), (1, 2), 0).tolist() == expected


@given(st.integers(0, 10_000))
def test_cloze_questions_leave_out_their_answer(seed: int) -> None:
    questions = cloze_questions(Document("d", PARAGRAPH), 2, random.Random(seed))
    assert len(questions) <= 2
    assert len({question.id for question in questions}) == len(questions)
    for question in questions:
        answer = question.answers[0]
        assert PARAGRAPH.count(answer)
        assert question.question.endswith("?")
        words = set(question.question[:-1].translate(PLAIN).split())
        sentences = [sentence for sentence in PARAGRAPH.split(". ") if answer in sentence]
        wh = {"what", "which", "who", "where", "when", "in", "year", "how", "many", "number"}
        assert any({w for w in words if w.lower() not in wh} <= set(s.translate(PLAIN).split()) for s in sentences)


def squad_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two articles in SQuAD's layout, and splits of one article each."""
    from mac_rag.data import squad

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
        monkeypatch.setitem(squad.PARTS, name, squad.Part("train-v1.1.json", "train", start, stop, 4))
    return folder


def text_recipe(folder: Path, **values: Any) -> PretrainConfig:
    for number in range(2):
        rows = [json.dumps({"text": f"Title {i}\n{PARAGRAPH}\nArticle {i} ends here."}) for i in range(20)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(rows))
    corpus = {
        "files": str(folder / "part-*.jsonl"), "sequence_length": 512, "validation_documents": 2, "cloze": 0.5,
        **values,
    }  # fmt: skip
    lm = {"hidden_size": 16, "layers": 2, "heads": 2, "vocabulary": 300}
    trainer = {
        "steps": 2, "batch_size": 4, "learning_rate": 1e-3, "log_every": 1, "best": "f1", "precision": "bf16",
        "cpu": True,
    }  # fmt: skip
    return PretrainConfig.parse({"corpus": corpus, "lm": lm, "trainer": trainer}, "test")


def test_an_lm_from_texts_and_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squad = {"name": "squad", "path": str(squad_folder(tmp_path, monkeypatch)), "train": "qa_lt", "val": "qa_lt_val"}
    recipe = text_recipe(tmp_path, questions=squad)
    task = PretrainTask(recipe, tmp_path / "out")
    ids, targets = task.batch(0, 0, 4)
    texts = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert [text.count("Question:") > 0 for text in texts] == [False, True, True, True]
    assert "Who rebuilt it?" in texts[2]
    assert "Who rebuilt it?" in texts[3]
    assert torch.equal(targets == -100, ids == task.tokenizer.pad_token_id)
    figures = Trainer(task, recipe.trainer, tmp_path / "out").run()
    assert figures.keys() == {"perplexity", "em", "f1"}
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {"answers", "tokens_per_second"} <= lines[0].keys()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npy")}
    assert len(before) == 5
    again = PretrainTask(recipe, tmp_path / "out")
    assert torch.equal(again.batch(0, 0, 4)[0], ids)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npy")} == before


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


def test_the_loss_weighs_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squad = {"name": "squad", "path": str(squad_folder(tmp_path, monkeypatch)), "train": "qa_lt", "val": "qa_lt_val"}
    task = PretrainTask(text_recipe(tmp_path, questions=squad), tmp_path / "out")
    batch = task.batch(0, 0, 4)
    total = weight = 0.0
    with torch.no_grad():
        scalars = task(batch)
        for row in batch[0].tolist():
            logits = task.lm(input_ids=torch.tensor([row])).logits[0].double().log_softmax(-1)
            inside = False
            for place in range(1, len(row)):
                inside = (inside or row[place - 2 : place] == task._answer_mark) and row[place - 1] != task.encoder.eos
                if row[place] != task.tokenizer.pad_token_id:
                    total -= float(logits[place - 1, row[place]]) * (4 if inside else 1)
                    weight += 4 if inside else 1
    assert scalars["loss"].item() == pytest.approx(total / weight, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"files": None}, "cloze and questions are read beside text files"),
        ({"files": None, "cloze": 0, "questions": {}}, "cloze and questions are read beside text files"),
    ],
)
def test_a_corpus_says_what_does_not_fit(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_recipe(tmp_path, **values)


def test_test_data_in_training_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two articles ask the same questions; a text file holds a paragraph and the title of the second."""
    squad = {"name": "squad", "path": str(squad_folder(tmp_path, monkeypatch)), "train": "qa_lt", "val": "qa_lt_val"}
    pretrain = text_recipe(tmp_path, questions=squad)
    tune = {"base_lm": {"name": "x"}, "data": squad, "trainer": {"steps": 1, "batch_size": 1, "learning_rate": 1}}
    recipes = []
    for name, recipe in (("pretrain", pretrain.model_dump(mode="json")), ("tune", tune)):
        recipes.append(str(tmp_path / f"{name}.yaml"))
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    options = ("--split", "qa_lt_val")
    found = command("pipelines.check_splits", *recipes, *options)
    assert found.stdout.count("shares with qa_lt_val: 0 of 1 documents, 0 of 1 titles, 2 of 2 questions") == 2
    assert "4 paragraphs, titles or questions" in str(found.exception)
    assert command("pipelines.check_splits", recipes[1], *options, "--set", "data.unlike=qa_lt_val").exit_code == 0
    row = {"title": "title 1", "text": f"Words.\n{PARAGRAPH} 1"}
    (tmp_path / "part-0.jsonl").write_text(json.dumps(row))
    found = command("pipelines.check_splits", recipes[0], *options, "--set", "corpus.questions.unlike=qa_lt_val")
    assert "shares with qa_lt_val: 1 of 1 documents, 1 of 1 titles\n" in found.stdout
    assert "2 paragraphs" in str(found.exception)


def test_generated_news_is_held_against_its_own_held_out_stream() -> None:
    """A split of a generated data set is generated, too, and held against what is trained on."""
    found = command("pipelines.check_splits", "mac-tiny/train", "--set", "data.documents=50")
    assert found.exit_code == 0
    assert "newswire, train shares with test: 0 of 1,665 documents" in found.stdout
    found = command(
        "pipelines.check_splits",
        "mac-tiny/train",
        "--set",
        "data.documents=50",
        "--set",
        "data.seed=0",
        "--split",
        "train",
    )
    assert "shares with train: 0 of 1,665 documents, 50 of " in found.stdout
    assert found.exit_code == 1
