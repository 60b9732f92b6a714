"""Are the sources of right answers the right ones? The command, and its controls."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest

from eval.report.collect import collect
from eval.report.page import page
from eval.sources import Named, control_rows, named_of
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Source
from mac_rag.sources import highlights
from tests.eval.helpers import Evaluate


def test_controls_are_their_definitions() -> None:
    sources = [Source("bridge", 0.3), Source("river", 0.5), Source("note")]
    only = named_of("bridge", frozenset({"bridge"}), sources, ["river", "bridge"])
    assert (only.first, only.most_attended, only.retrieved) == ("bridge", "river", "river")
    several = Named("bridge", frozenset({"bridge", "river"}), "river", "bridge", "bridge")
    nowhere = Named("bridge", frozenset(), "note", "note", "note")
    rows = {row.name: row.measures for row in control_rows("MAC", [only, several, nowhere, several])}
    assert rows == {
        "MAC: first source": {"right_document": 0.25, "holds_answer": 0.75, "elsewhere": 0.5},
        "MAC: most attention": {"right_document": 0.5, "holds_answer": 0.5},
        "MAC: the retriever's first": {"right_document": 0.5, "holds_answer": 0.5},
        "MAC: any that holds the answer": {"right_document": (1 + 0.5 + 0.5) / 4, "holds_answer": 0.75},
    }
    assert control_rows("MAC", []) == []
    without = named_of("bridge", frozenset({"bridge"}), sources, [])
    assert "MAC: the retriever's first" not in {row.name for row in control_rows("MAC", [without])}


def test_mac_tiny_names_the_right_document(evaluate: Evaluate, tmp_path: Path) -> None:
    options = ("--documents", "60", "--questions", "40", "--k", "3")
    result, rows, samples, _ = evaluate("sources", *options, model="mac-tiny")
    for name in ("MAC", "bm25 top-3 + MAC"):
        first = rows[f"{name}: first source"]
        assert first.measures["right_document"] >= 0.95
        assert first.measures["right_document"] >= rows[f"{name}: any that holds the answer"].measures["right_document"]
        assert first.questions == round(rows[name].measures["right"] * 40)
    assert "MAC: the retriever's first" not in rows
    texts = {document.id: document.text for document in generate("test", 60).documents}
    assert len(result.quotes) == 20
    assert all(quote.sentence in texts[quote.document_id] for quote in result.quotes)
    shown = page(collect([tmp_path]))
    quote = result.quotes[0]
    assert f"<mark>{escape(quote.sentence[slice(*highlights(quote.sentence, quote.answer)[0])])}</mark>" in shown
    name = "bm25 top-3 + MAC"
    assert rows[name].em == pytest.approx(sum(sample.rows[name].em for sample in samples) / 40)
