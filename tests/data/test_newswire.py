"""The newswire generator: reproducible, split by name, answerable by one document."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.data.newswire.generate import SPLITS, World, generate, split_of
from mac_rag.data.types import Document, QADataset


def digest(dataset: QADataset) -> str:
    lines = [f"{d.id}|{d.text}|{sorted(d.metadata.items())}" for d in dataset.documents]
    lines += [f"{q.id}|{q.question}|{q.answers}|{q.document_id}" for q in dataset.questions]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def updated_pairs(dataset: QADataset) -> Iterator[tuple[Document, Document]]:
    documents = {document.id: document for document in dataset.documents}
    for document in dataset.documents:
        if "updates" in document.metadata:
            yield documents[document.metadata["updates"]], document


@pytest.fixture(scope="module")
def changing() -> QADataset:
    """A stream in which most stories are updated, with a question about each fact."""
    return generate("val", 600, seed=3, questions_per_document=4, update_rate=0.9)


def test_a_small_corpus_is_the_one_that_models_were_trained_on() -> None:
    # A changed digest means changed documents: checkpoints and published figures then belong to another data set.
    assert digest(generate("train", 60, seed=7, questions_per_document=2, update_rate=0.3)) == (
        "94f35d936223d774339b5ad3abe85f70a5580388cc7a3d801e6ba18e4023a4dc"
    )
    assert digest(generate("test", 60)) == "811540341943efb0c358c2b158809b6d0653cb0e3b1785fb13a715cd07f3fcdd"


@settings(max_examples=10, deadline=None)
@given(split=st.sampled_from(SPLITS), seed=st.integers(0, 2**40), questions=st.integers(1, 4), rate=st.floats(0, 1))
def test_a_stream_follows_from_its_arguments_and_seed(split: str, seed: int, questions: int, rate: float) -> None:
    first = generate(split, 20, seed=seed, questions_per_document=questions, update_rate=rate)
    assert generate(split, 20, seed=seed, questions_per_document=questions, update_rate=rate) == first
    other = generate(split, 20, seed=seed + 1, questions_per_document=questions, update_rate=rate)
    assert not {d.text for d in first.documents} & {d.text for d in other.documents}


@settings(max_examples=10, deadline=None)
@given(split=st.sampled_from(SPLITS), seed=st.integers(0, 2**40), questions=st.integers(1, 4), rate=st.floats(0, 1))
def test_every_question_is_answered_by_its_document(split: str, seed: int, questions: int, rate: float) -> None:
    dataset = generate(split, 50, seed=seed, questions_per_document=questions, update_rate=rate)
    documents = {document.id: document for document in dataset.documents}
    assert len(documents) == len(dataset.documents) == 50
    assert len({question.id for question in dataset.questions}) == len(dataset.questions) == 50 * questions
    for question in dataset.questions:
        assert question.answers[0] in documents[question.document_id].text


def test_no_name_of_one_split_occurs_in_another() -> None:
    names = {}
    for split in SPLITS:
        world = World(split, random.Random(split))
        names[split] = {draw() for _ in range(2000) for draw in (world.surname, world.town)}
        assert all(split_of(name) == split for name in names[split])
    assert not names["train"] & names["val"]
    assert not names["train"] & names["test"]
    assert not names["val"] & names["test"]


def test_the_subjects_of_test_stories_are_never_named_in_training() -> None:
    seen = {word.strip(".,:?") for document in generate("train", 3000).documents for word in document.text.split()}
    for document in generate("test", 300).documents:
        subject = str(document.metadata["title"]).partition(":")[0]
        # The parts of a subject that are its own name, unlike `Bank` or `University`, belong to the test split.
        assert any(split_of(word) == "test" and word not in seen for word in subject.split())


def test_no_two_stories_share_a_subject_unless_one_updates_the_other(changing: QADataset) -> None:
    stories = [document for document in changing.documents if "updates" not in document.metadata]
    assert len({document.metadata["title"] for document in stories}) == len(stories)
    assert all(earlier.metadata["title"] == later.metadata["title"] for earlier, later in updated_pairs(changing))


def test_an_update_comes_later_and_changes_every_fact(changing: QADataset) -> None:
    answers = {question.id: question.answers[0] for question in changing.questions}
    position = {document.id: index for index, document in enumerate(changing.documents)}
    pairs = list(updated_pairs(changing))
    assert len(pairs) > 100
    for earlier, later in pairs:
        assert position[earlier.id] < position[later.id]
        assert earlier.metadata["date"][:4] < later.metadata["date"][:4]
        assert all(answers[f"{earlier.id}-{slot}"] != answers[f"{later.id}-{slot}"] for slot in range(4))


def test_questions_about_changed_facts_say_which_time_they_mean(changing: QADataset) -> None:
    asked = changing.questions_by_document()
    now = 0
    for earlier, later in updated_pairs(changing):
        for question in asked[earlier.id]:
            assert question.question.startswith(f"In {earlier.metadata['date'][:4]}: ")
        for question in asked[later.id]:
            assert question.question.startswith((f"In {later.metadata['date'][:4]}: ", "Now: "))
            now += question.question.startswith("Now: ")
    assert now > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "'dev'; choose one of train, val, test"),
        ({"documents": 0}, "at least 1, got 0"),
        ({"questions_per_document": 5}, "1 to 4, got 5"),
        ({"questions_per_document": 0}, "1 to 4, got 0"),
        ({"update_rate": 1.5}, r"\[0, 1\], got 1.5"),
        ({"update_rate": float("nan")}, r"\[0, 1\], got nan"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(**arguments)  # type: ignore[arg-type]
