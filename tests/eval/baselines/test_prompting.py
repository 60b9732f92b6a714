"""Prompting baselines: which prompt each question gets."""

from __future__ import annotations

import pytest

from eval.baselines.prompting import FewShot, RetrieverOnly, drawn_examples
from eval.harness.systems import MACSystem, ask
from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever

STREAM = generate("test", 8, seed=4)
TRAINING = generate("train", 6).questions
ASKED = [question.question for question in STREAM.questions]


def test_zero_shot_is_the_lm_alone(tiny_model: MACModel) -> None:
    system = FewShot(tiny_model, batch_size=3)
    system.adapt(STREAM.documents)
    assert system.name == "Zero-shot"
    assert system.answer(ASKED) == tiny_model.generate(ASKED)


def test_few_shot_puts_closed_examples_in_front(tiny_model: MACModel) -> None:
    examples = TRAINING[:2]
    system = FewShot(tiny_model, examples)
    prompts, limit = tiny_model.base_lm.prompts, tiny_model.config.max_new_tokens
    shown = [
        token
        for example in examples
        for token in prompts.question(example.question) + prompts.answer(example.answers[0])
    ]
    expected = [
        tiny_model.base_lm.generate([prompts.start + shown + prompts.question(q)], None, max_new_tokens=limit)[0]
        for q in ASKED
    ]
    assert system.name == "2-shot"
    assert system.answer(ASKED) == expected


def test_examples_are_drawn_by_the_seed() -> None:
    assert drawn_examples(TRAINING, 5, 1) == drawn_examples(TRAINING, 5, 1)
    assert len({question.id for question in drawn_examples(TRAINING, 5, 1)}) == 5
    assert any(drawn_examples(TRAINING, 5, 0) != drawn_examples(TRAINING, 5, seed) for seed in range(1, 5))
    with pytest.raises(ConfigError, match="7 examples are wanted, but the training set has 6"):
        drawn_examples(TRAINING, 7, 0)


def test_the_retriever_alone_is_the_engine_without_memory(tiny_model: MACModel) -> None:
    system = RetrieverOnly(tiny_model, 2)
    system.adapt(STREAM.documents[:3])
    system.adapt(STREAM.documents[3:])
    engine = MACEngine(tiny_model, retriever=BM25Retriever(), k=2)
    engine.adapt(STREAM.documents)
    assert system.answer(ASKED) == [answer.text for answer in engine.answer(ASKED, use_memory=False)]


def test_mac_as_a_system_is_the_engine_and_is_scored_like_it(tiny_model: MACModel) -> None:
    system = MACSystem(tiny_model, batch_size=5)
    system.adapt(STREAM.documents[:3])
    system.adapt(STREAM.documents[3:])
    engine = MACEngine(tiny_model)
    engine.adapt(STREAM.documents)
    row, verdicts = ask("a name", system, STREAM.questions, 8)
    assert [verdict.prediction for verdict in verdicts] == [answer.text for answer in engine.answer(ASKED)]
    assert (row.name, row.settings, row.documents, row.questions) == ("a name", {"method": "MAC"}, 8, 8)
