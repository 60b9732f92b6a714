"""What two splits share: found where it was put, and by a plain loop over all n-grams."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from eval.contamination import ngrams, overlap_row
from eval.harness.results import Result
from mac_rag.data.types import Document, QADataset, Question
from tests.eval.helpers import Command

TEXT = st.lists(st.sampled_from("ab bc cd de".split()), max_size=7).map(" ".join)


def dataset(split: str, texts: list[str], titles: list[str], questions: list[str]) -> QADataset:
    documents = tuple(Document(f"{split}{i}", t, {"title": n}) for i, (t, n) in enumerate(zip(texts, titles)))
    asked = tuple(Question(f"{split}{i}", q, ("x",), documents[0].id) for i, q in enumerate(questions))
    return QADataset("set", split, documents, asked)


@given(st.lists(TEXT, min_size=1, max_size=4), st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 3))
def test_ngrams_equal_a_plain_loop(theirs: list[str], ours: list[str], size: int) -> None:
    def plain(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + size]) for i in range(len(words)) if i + size <= len(words)}

    def all_of(texts: list[str]) -> set[tuple[str, ...]]:
        return {gram for text in texts for gram in plain(text)}

    assert len(set(ngrams(ours, size))) == len(all_of(ours))
    row = overlap_row(dataset("train", theirs, theirs, []), dataset("test", ours, ours, []), size)
    known = all_of(theirs)
    found = all_of(ours)
    assert row.measures["ngrams_shared_percent"] == 100 * len(found & known) / max(1, len(found))
    assert row.measures["documents_with_ngram_percent"] == 100 * sum(bool(plain(t) & known) for t in ours) / len(ours)


def test_shared_texts_are_found_in_any_case_and_punctuation() -> None:
    train = dataset("train", ["The harbour opened.", "Rain fell"], ["Harbour", "Rain"], ["Who opened it?"])
    test = dataset("test", ["a harbour OPENED", "Snow fell"], ["Snow", "rain!"], ["Who opened it", "When?"])
    measures = overlap_row(train, test, 2).measures
    assert measures["documents_shared_percent"] == 50
    assert measures["titles_shared_percent"] == 50
    assert measures["questions_shared_percent"] == 50
    assert measures["ngrams_shared_percent"] == 50


def test_without_titles_there_is_no_figure_for_titles() -> None:
    assert (
        "titles_shared_percent"
        not in overlap_row(dataset("a", ["x"], [""], []), dataset("b", ["y"], [""], []), 1).measures
    )


def test_command(command: Command, tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_checkpoint, "--documents", 6, "--questions", 3, "--output", "r.json")
    assert command("eval.contamination", *arguments)[0] == 0
    overlap, *answered = Result.read(tmp_path / "r.json").rows
    assert overlap.measures["documents_shared_percent"] == 0
    assert [row.settings["method"] for row in answered] == ["Zero-shot", "5-shot", "MAC"]
