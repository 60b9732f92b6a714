"""Perplexity: where a document is cut, equality with a plain loop, and the whole command."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.harness.variants import Training
from eval.perplexity import BEGINNING, TRAINING_DOCUMENTS, continuations, cut, language_recipe, perplexity
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset
from mac_rag.model import MACModel
from tests.eval.helpers import Evaluate

STREAM = generate("test", 6)


def test_a_document_is_cut_after_its_first_tenth(tiny_model: MACModel) -> None:
    prompts = tiny_model.base_lm.prompts
    for text in (STREAM.documents[0].text, "Two words", "Rain"):
        beginning, rest = cut(prompts, text)
        assert beginning
        assert rest
        assert beginning + rest == prompts.tokenizer(text, add_special_tokens=False).input_ids
    beginning, rest = cut(prompts, STREAM.documents[0].text)
    assert len(beginning) == round(BEGINNING * (len(beginning) + len(rest)))


@pytest.mark.parametrize("memory", [True, False])
def test_perplexity_equals_a_plain_loop(tiny_model: MACModel, memory: bool) -> None:
    lm, prompts = tiny_model.base_lm, tiny_model.base_lm.prompts
    bank = tiny_model.amortize([document.text for document in STREAM.documents[:3]]) if memory else None
    total, tokens = 0.0, 0
    for document in STREAM.documents:
        beginning, rest = cut(prompts, document.text)
        start = [*prompts.start, *beginning]
        modulation = None
        with torch.no_grad():
            if bank is not None:
                phi = tiny_model.aggregate([prompts.tokenizer.decode(beginning)], bank)
                modulation = tiny_model.modulation(phi)
            total += float(lm.answer_loss([start], [rest], modulation))
        tokens += len(rest)
    assert perplexity(tiny_model, STREAM.documents, bank, 4) == pytest.approx(math.exp(total / tokens), rel=1e-4)


@given(st.lists(st.text("ab ", min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_continuations_keep_every_word(texts: list[str]) -> None:
    documents = tuple(Document(str(i), text) for i, text in enumerate(texts))
    made = continuations(QADataset("set", "train", documents, ()))
    assert [document.text for document in made.documents] == [text for text in texts if len(text.split()) > 1]
    for document, question in zip(made.documents, made.questions, strict=True):
        assert f"{question.question} {question.answers[0]}".split() == document.text.split()


def test_each_system_has_a_perplexity(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINING_DOCUMENTS, "tiny", 40)
    rows = evaluate("perplexity", "--steps", 1, "--documents", 4, "--baselines", "uniform").rows
    assert list(rows) == ["LM alone", "MAC, trained on questions", "MAC", "Uniform"]
    for row in rows.values():
        assert min(row.measures[f"perplexity_{which}"] for which in ("adapted", "unseen")) > 1


def test_the_papers_recipe_loads(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_archivalqa(generate(split, 4), tmp_path / "archivalqa" / f"{split}.csv")
    training = Training("gpt2-large", str(tmp_path / "archivalqa"), tmp_path / "variants", 0, None, "paper")
    recipe = language_recipe(training, 1_000_000)
    assert recipe.model.prompt.question == "{question}"
    assert len(recipe.data.training_set().documents) == 4
