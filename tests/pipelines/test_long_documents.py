"""Documents beyond a model's limit become documents of their own before training starts, with the right questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import DataError, DocumentError
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.model import MACModel
from pipelines.corpora.long_documents import divided, within_limits, within_sequences
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from tests.helpers import Folder
from tests.pipelines.test_pipelines import train_recipe


def data_set(text: str, *questions: Question, **more: str) -> QADataset:
    documents = [Document("long", text, {"title": "T"}), *(Document(name, other) for name, other in more.items())]
    return QADataset("own", "train", tuple(documents), questions)


def sentences(document: Document) -> list[str]:
    return [f"{sentence}." for sentence in document.text.removesuffix(".").split(". ")]


@pytest.mark.parametrize(
    ("question", "answers", "chunk"),
    [
        ("Who came?", ["Ada"], "long"),
        ("Who left in 1999?", ["Bo", "Ada"], "long#2"),  # the first answer counts before the second
        ("When did it close?", ["1999"], "long#3"),  # of two chunks with the answer, the one of more shared words
        ("Who left?", ["the bo"], "long#2"),  # as SQuAD compares answers
        ("Who else?", ["Cy"], "long"),  # nowhere: the first
        ("Which?", ["oor"], "long#3"),  # written so, within a word
    ],
)
def test_a_question_goes_to_the_chunk_with_its_answer(question: str, answers: list[str], chunk: str) -> None:
    text = "Ada came. In 1999 Bo left the hall. The door did close in 1999."
    data = data_set(
        text, Question("q", question, tuple(answers), "long"), Question("r", "?", ("x",), "other"), other="x"
    )
    result = divided(data, sentences, "a sentence")
    assert result.questions[0].document_id == chunk
    assert result.questions[1] is data.questions[1]


def test_chunks_keep_order_metadata_and_ids_of_their_own() -> None:
    data = data_set("One. Two. Three.", **{"long#2": "Another.", "last": "Last."})
    result = divided(data, sentences, "a sentence")
    assert [(document.id, document.text) for document in result.documents] == [
        ("long", "One."), ("long#3", "Two."), ("long#4", "Three."), ("long#2", "Another."), ("last", "Last."),
    ]  # fmt: skip
    assert [document.metadata for document in result.documents[:3]] == [{"title": "T"}] * 3
    assert result.documents[3:] == data.documents[1:]


def test_a_chunk_is_what_a_model_reads_at_once(loaded_tiny_model: MACModel, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = loaded_tiny_model.amortization
    text = " ".join(f"Sentence {i} tells of town {i}." for i in range(400))
    data = data_set(text, Question("q", "What tells of town 399?", ("399",), "long"), other="Short.")
    result = within_limits(data, loaded_tiny_model)
    assert [document.text for document in result.documents] == [*encoder.split(text), "Short."]
    assert len(result.documents) > 2
    assert all(len(encoder.ids(document.text)) <= encoder.max_tokens for document in result.documents)
    assert result.questions[0].document_id == result.documents[-2].id
    shown = capsys.readouterr().err
    assert f"own, train: 1 of 2 documents are longer than {encoder.max_tokens} tokens; they are divided into" in shown


def test_what_no_model_reads_is_named_at_the_start(loaded_tiny_model: MACModel) -> None:
    with pytest.raises(DataError, match=r"question 'q': a text of \d+ tokens is longer than the limit of"):
        within_limits(data_set("A text.", Question("q", "Who? " * 3_000, ("text",), "long")), loaded_tiny_model)
    with pytest.raises(DocumentError, match="document 'other': the character at index 1 is NUL"):
        within_limits(data_set("A text.", other="a\0b"), loaded_tiny_model)


def test_what_the_lm_writes_fits_into_its_window(tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM may read less at once than the amortization network."""
    tiny_model.base_lm.model.config.max_position_embeddings = 100
    prompts, window = tiny_model.base_lm.prompts, 100 - tiny_model.modulation.prefix_length
    text = " ".join(f"Sentence {i} tells of town {i}." for i in range(30))
    data = data_set(text, Question("q", "What tells of town 1?", ("Sentence 1",), "long"))
    assert within_limits(data, tiny_model) is data
    written = within_limits(data, tiny_model, reconstruction=True)
    lengths = [len(prompts.prompt_start([document.text])) for document in written.documents]
    assert max(lengths) <= window < len(prompts.prompt_start([text]))
    assert len(lengths) < 2 * sum(lengths) / window + 1
    data = data_set(text, Question("q", "What?", ("a long answer " * 40,), "long"))
    with pytest.raises(DataError, match=rf"question 'q' takes \d+ tokens with its answer, and the LM reads {window}"):
        within_limits(data, tiny_model)


def test_a_document_fits_into_a_sequence_with_its_questions(loaded_tiny_model: MACModel) -> None:
    encoder: PromptEncoder = loaded_tiny_model.base_lm.prompts
    text = " ".join(f"Sentence {i} tells of town {i}." for i in range(60))
    questions = [Question(f"q{i}", f"What tells of town {i}?", (f"Sentence {i}",), "long") for i in (1, 58)]
    result = within_sequences(data_set(text, *questions), encoder, 128)
    texts = {document.id: document.text for document in result.documents}
    assert len(texts) > 3
    for question in result.questions:
        [(prompt, answer)] = encoder.exchanges([texts[question.gold]], [(question.question, question.answers[0])])
        assert len(prompt) + len(answer) <= 128
        assert question.answers[0] in texts[question.gold]
    assert within_sequences(data_set(text, *questions), encoder, 4_000).documents[0].text == text


def test_training_on_long_documents_starts_and_validates(model_folder: Folder, tmp_path: Path) -> None:
    """They failed in the batch that drew them, and in every validation."""
    rows = [
        {"document": f"Rain fell on town {i}. " * 60, "question": f"What fell on town {i}?", "answers": "Rain"}
        for i in range(9)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "own", "path": str(tmp_path / "mine.jsonl"), "train": "all", "val": "all"}
    recipe: dict[str, Any] = train_recipe(model_folder, data=source).model_dump(mode="json")
    recipe["model"]["max_document_tokens"] = 256
    task = TrainTask(TrainConfig.parse(recipe, "test"))
    batch = task.batch(0, 0, 3)
    assert len(task(batch)) > 1
    assert task.validate()["loss"] > 0
