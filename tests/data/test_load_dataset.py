"""One entry for all data sets: names, splits, paths, and streams cut to a length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data import load_dataset
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import STREAM_LENGTH, generate
from mac_rag.data.types import shortest_first
from mac_rag.errors import ConfigError


def test_newswire_is_generated_at_the_papers_length_or_any_other() -> None:
    assert load_dataset("newswire", "test") == generate("test", STREAM_LENGTH)
    assert load_dataset("newswire", "val", documents=20) == generate("val", 20)


def test_a_stream_is_cut_to_its_first_documents_with_their_questions(tmp_path: Path) -> None:
    written = generate("val", 30, questions_per_document=2)
    write_archivalqa(written, tmp_path / "val.csv")
    dataset = load_dataset("archivalqa", "val", tmp_path, documents=7)
    assert dataset.documents == written.documents[:7]
    assert dataset.questions == written.questions[:14]
    assert load_dataset("archivalqa", "val", tmp_path, documents=99).documents == written.documents


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("triviaqa", "test"), {}, "'triviaqa'; choose one of newswire, squad, streamingqa, archivalqa"),
        (("newswire", "qa_lt"), {}, "newswire has no split 'qa_lt'; choose one of train, val, test"),
        (("streamingqa", "qa_lt"), {}, "choose one of train, val, test, qa_train, qa_val"),
        (("newswire", "test"), {"documents": 0}, "at least 1, got 0"),
        (("newswire", "test", "here"), {}, "generated and reads no path, got here"),
        (("archivalqa", "test"), {}, "archivalqa needs the path of its files; give it$"),
    ],
)
def test_impossible_requests_are_named(arguments: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(*arguments, **options)


@given(st.lists(st.text()))
def test_the_shortest_answer_leads_and_no_other_is_lost(answers: list[str]) -> None:
    ordered = shortest_first(answers)
    assert set(ordered) == {answer.strip() for answer in answers} - {""}
    assert len(set(ordered)) == len(ordered)
    assert not ordered or len(ordered[0]) == min(map(len, ordered))
