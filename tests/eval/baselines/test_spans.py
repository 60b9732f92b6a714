"""Salient spans and the token weights they give."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import spacy
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.baselines.finetuning import (
    RULES,
    Passage,
    SalientSpanWeights,
    UniformWeights,
    passages,
    salient_spans,
    weighted_loss,
)
from mac_rag.model import MACModel
from pipelines.corpora.salient_spans import rule_spans

TEXT = (
    "On May 3, 1999 the Lund Bank paid $1,200.50 to Ada Voss. Rain fell. It was her 2nd prize from University of Kell."
)


def test_rules_find_names_dates_and_numbers() -> None:
    found = {TEXT[first:end] for first, end in rule_spans(TEXT)}
    assert {"May 3, 1999", "Lund Bank", "$1,200.50", "Ada Voss", "2nd", "University of Kell"} <= found
    covered = {TEXT[place] for first, end in rule_spans(TEXT) for place in range(first, end)}
    assert covered
    for ordinary in ("Rain", "It ", "paid", "prize"):
        at = TEXT.index(ordinary)
        assert not any(first <= at < end for first, end in rule_spans(TEXT)), ordinary


@given(st.text(alphabet=st.sampled_from("aB é.Ü1,\n$-'\"(May 3")) | st.text())
def test_spans_lie_inside_the_text(text: str) -> None:
    assert all(0 <= first < end <= len(text) for first, end in rule_spans(text))


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which Python imports packages, with no spaCy pipeline beyond those put there."""
    kept = [folder for folder in sys.path if not list(Path(folder or ".").glob("en_core_web*"))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    return tmp_path


def installed(folder: Path, name: str) -> None:
    """A spaCy pipeline that knows the entity Lund Bank, as pip would install it."""
    pipeline = spacy.blank("en", meta={"name": name.removeprefix("en_"), "version": "1.0.0"})
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": "ORG", "pattern": "Lund Bank"}])
    (folder / name).mkdir()
    pipeline.to_disk(folder / name / f"{name}-1.0.0")
    shutil.copy(folder / name / f"{name}-1.0.0" / "meta.json", folder / name)
    (folder / name / "__init__.py").write_text(
        "from spacy.util import load_model_from_init_py\n"
        "def load(**overrides):\n"
        "    return load_model_from_init_py(__file__, **overrides)\n"
    )
    about = folder / f"{name}-1.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    (about / "entry_points.txt").write_text(f"[spacy_models]\n{name} = {name}\n")


def test_without_an_english_pipeline_rules_find_the_spans(pipelines: Path) -> None:
    found = salient_spans()
    assert found.settings["spans"] == RULES


def test_an_installed_english_pipeline_finds_the_spans(pipelines: Path, tiny_model: MACModel) -> None:
    installed(pipelines, "en_names_sm")
    found = salient_spans()
    assert found.settings["spans"] == "spaCy en_names_sm"
    (passage,) = passages(tiny_model.base_lm.prompts, TEXT, 1024)
    kept = [span for span, weight in zip(passage.spans, found.weights(passage), strict=True) if weight]
    assert "".join(passage.text[first:end] for first, end in kept).strip() == "Lund Bank"


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=4), st.lists(st.integers(1, 3), max_size=8))
def test_a_token_counts_where_it_overlaps_a_span(drawn: list[tuple[int, int]], lengths: list[int]) -> None:
    spans = [(first, min(12, first + length)) for first, length in drawn]
    tokens, at = [(0, 0)], 0
    for length in lengths:
        tokens.append((at, min(12, at + length)))
        at = min(12, at + length)
    passage = Passage(torch.zeros(len(tokens), dtype=torch.long), "x" * 12, tuple(tokens))
    weights = SalientSpanWeights(lambda _: spans, "given").weights(passage)
    expected = [float(any(max(a, first) < min(b, end) for first, end in spans)) for a, b in tokens]
    assert weights.tolist() == expected
    assert UniformWeights().weights(passage).tolist() == [1.0] * len(tokens)


@pytest.mark.parametrize("window", [1024, 20])
def test_passages_hold_all_tokens_of_the_document_as_the_prompt_writes_it(tiny_model: MACModel, window: int) -> None:
    prompts = tiny_model.base_lm.prompts
    parts = list(passages(prompts, TEXT, window))
    assert all(len(part.ids) <= window for part in parts)
    joined = [token for part in parts for token in part.ids.tolist()[len(prompts.start) :]]
    assert prompts.start + joined == prompts.prompt_start([TEXT])
    assert "".join(part.text[first:end] for part in parts for first, end in part.spans) == TEXT + "\n"


def test_the_loss_is_a_weighted_mean_over_predicted_tokens() -> None:
    torch.manual_seed(0)
    logits, ids, weights = torch.randn(5, 7), torch.randint(7, (5,)), torch.rand(5)
    expected = sum(-weights[i] * logits[i - 1].log_softmax(-1)[ids[i]] for i in range(1, 5)) / 4
    torch.testing.assert_close(weighted_loss(logits, ids, weights), expected)
