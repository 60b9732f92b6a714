"""Controls of a memory: what each answers from, how an interrupted run goes on, and what a model cannot have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.harness.controls import answers_from_two_texts, ask_controls, controls_of
from eval.harness.results import Result
from mac_rag.config import AggregationConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel, ReadRow, ReadRows
from tests.eval.helpers import Command
from tests.helpers import mac_config, own_kv

STREAM = generate("test", 8, seed=3)
QUESTIONS = [question.question for question in STREAM.questions]
TEXTS = {document.id: document.text for document in STREAM.documents}
ROWS = [
    "memory",
    "first row's tokens",
    "first 3 rows' tokens side by side",
    "right document's tokens",
    "right document's text",
    "first document's text",
    "BM25's first text",
    "BM25's first text + memory",
    "both texts, max rule",
    "memory, prior off",
]


def adapted(model: MACModel) -> MACEngine:
    for parameter in model.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # answers depend on the memory
    engine = MACEngine(model)
    engine.adapt(STREAM.documents)
    return engine


def test_each_control_answers_from_what_its_name_says(tiny_model: MACModel) -> None:
    engine = adapted(tiny_model)
    model, bank = tiny_model, engine.bank
    controls = controls_of(engine, STREAM, batch_size=3)
    rows, verdicts = ask_controls(controls, None, "")
    assert [row.name for row in rows] == list(verdicts) == ROWS
    assert not controls.not_run
    answers = {name: [verdict.prediction for verdict in column] for name, column in verdicts.items()}
    shown = {name: [verdict.retrieved for verdict in column] for name, column in verdicts.items()}

    assert answers["memory"] == [answer.text for answer in engine.answer(QUESTIONS)]
    with model.without_document_prior():
        assert answers["memory, prior off"] == [answer.text for answer in engine.answer(QUESTIONS)]
    with torch.no_grad():
        scores = model.aggregation.prior_scores(model._encode(QUESTIONS), model.project(bank.phi))
    ids = [entry.members[0].document_id for entry in bank]
    ranked = [[ids[row] for row in rows] for rows in scores.argsort(1, descending=True).tolist()]
    gold = [question.document_id for question in STREAM.questions]

    def from_tokens(documents: list[list[str]]) -> list[str]:
        phi = torch.stack([torch.cat([bank[name].phi[0] for name in some]) for some in documents])
        return model.generate(QUESTIONS, modulation=phi)

    assert answers["first row's tokens"] == from_tokens([some[:1] for some in ranked])
    assert answers["first 3 rows' tokens side by side"] == from_tokens([some[:3] for some in ranked])
    assert shown["first 3 rows' tokens side by side"] == [tuple(some[:3]) for some in ranked]
    assert answers["right document's tokens"] == from_tokens([[str(name)] for name in gold])
    assert answers["right document's text"] == model.generate(QUESTIONS, [[TEXTS[str(name)]] for name in gold])
    assert answers["first document's text"] == model.generate(QUESTIONS, [[TEXTS[some[0]]] for some in ranked])
    found = [list(documents) for documents in shown["BM25's first text"]]
    assert answers["BM25's first text"] == model.generate(QUESTIONS, [[TEXTS[name] for name in some] for some in found])
    with_memory = engine.answer(QUESTIONS, contexts=[[TEXTS[name] for name in some] for some in found])
    assert answers["BM25's first text + memory"] == [answer.text for answer in with_memory]

    first = rows[0]
    attended, mass = engine.document_attention(QUESTIONS)
    right = [attended[place] == name for place, name in zip(mass.argmax(1).tolist(), gold)]
    wrong = [not verdict.em for verdict in verdicts["memory"]]
    assert first.measures["attended_right"] == pytest.approx(sum(right) / 8)
    assert first.measures["read_wrong"] == pytest.approx(sum(a and b for a, b in zip(right, wrong)) / 8)
    assert first.measures["wrong_document"] + first.measures["read_wrong"] == pytest.approx(sum(wrong) / 8)
    assert first.gain is None
    for row in rows[1:]:
        assert row.gain.f1.mean == pytest.approx(row.f1 - first.f1)


def test_controls_of_own_keys_and_values_read_the_rows_that_their_names_say(
    model_folder: Callable[[str], Path],
) -> None:
    model = own_kv(model_folder("llama"))
    engine = MACEngine(model)
    engine.adapt(STREAM.documents)
    stream, asked = replace(STREAM, questions=STREAM.questions[:4]), QUESTIONS[:4]
    rows, verdicts = ask_controls(controls_of(engine, stream, batch_size=3), None, "")
    answers = {name: [verdict.prediction for verdict in column] for name, column in verdicts.items()}
    shown = {name: [verdict.retrieved for verdict in column] for name, column in verdicts.items()}
    assert answers["memory"] == [answer.text for answer in engine.answer(asked)]
    read = shown["memory, scores off"]
    ids, mass = engine.document_attention(asked)
    assert [set(some) for some in read] == [{ids[place] for place in row.nonzero()[:, 0].tolist()} for row in mass]
    assert any(len(some) > 1 for some in read)
    gold = [str(question.document_id) for question in stream.questions]

    def from_rows(documents: list[list[str]]) -> list[str]:
        told = []
        for question, some in zip(asked, documents):
            rows = [model.amortize_rows([model.plan(TEXTS[name])[0]])[0] for name in some]
            phi = ReadRows([[ReadRow(model.decode(row), 0.0) for row in rows]])
            told += model.generate([question], modulation=phi)
        return told

    assert answers["memory, scores off"] == from_rows([list(some) for some in read])
    assert answers["first document's row"] == from_rows([[some[0]] for some in read])
    assert answers["right document's row"] == from_rows([[name] for name in gold])
    assert answers["right document's text"] == model.generate(asked, [[TEXTS[name]] for name in gold])
    together = [[TEXTS[name] for name in some] for some in read]
    assert answers["texts of the documents in memory"] == model.generate(asked, together)
    assert shown["first document's text"] == [some[:1] for some in read]
    attended = [ids[place] == name for place, name in zip(mass.argmax(1).tolist(), gold)]
    assert rows[0].measures["attended_right"] == pytest.approx(sum(attended) / 4)


@pytest.mark.parametrize("extractive", [None, ()])
def test_the_max_rule_over_two_texts_is_a_plain_loop(tiny_model: MACModel, extractive: tuple[str, ...] | None) -> None:
    model, lm = tiny_model, tiny_model.base_lm
    model.config = model.config.model_copy(update={"extractive": extractive})
    texts = [document.text for document in STREAM.documents]
    first, second = (
        [model.fit_to_window(question, [texts[(number + shift) % 8]]) for number, question in enumerate(QUESTIONS[:3])]
        for shift in (0, 1)
    )
    answers = answers_from_two_texts(model, first, second)
    assert answers_from_two_texts(model, first, first) == model.generate(first)
    assert answers_from_two_texts(model, first, second, weight=0.999999) == model.generate(first)
    if extractive is None:
        assert answers == [said(model, *pair) for pair in zip(first, second)]
    else:
        assert answers != [said(model, *pair) for pair in zip(first, second)]
    assert lm.generate([prompt.ids for prompt in first], None, max_new_tokens=16) != answers


def said(model: MACModel, first: FittedPrompt, second: FittedPrompt) -> str:
    """Greedy, the whole sequence anew for each token."""
    lm = model.base_lm
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < model.config.max_new_tokens and (not tokens or tokens[-1] not in lm.end_tokens):
            both = [lm.answer_logits([prompt.ids], [[*tokens, 0]], None)[-1].softmax(-1) for prompt in (first, second)]
            tokens.append(int(torch.maximum(*both).argmax()))
    text: str = lm.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


def test_what_a_model_or_a_stream_lacks_is_not_run(model_folder: Callable[[str], Path]) -> None:
    plain = AggregationConfig(blocks=1, heads=2, head_width=8)
    torch.manual_seed(0)
    model = MACModel.from_config(mac_config(model_folder("llama"), aggregation=plain, modulation={"kind": "film"}))
    engine = MACEngine(model)
    engine.adapt(STREAM.documents)
    unnamed = replace(STREAM, questions=(replace(STREAM.questions[0], document_id=None), *STREAM.questions[1:]))
    controls = controls_of(engine, unnamed)
    rows, verdicts = ask_controls(controls, None, "")
    lacking = {*ROWS[2:5], ROWS[-1]}
    assert set(controls.not_run) == lacking
    assert [row.name for row in rows] == [name for name in ROWS if name not in lacking]
    assert controls.not_run["right document's text"] == "1 of 8 questions name no document of the stream"
    attended = model.attention(QUESTIONS, engine.bank.phi).argmax(1)
    ids = [entry.members[0].document_id for entry in engine.bank]
    assert [verdict.retrieved for verdict in verdicts[ROWS[1]]] == [(ids[row],) for row in attended.tolist()]


def test_command_goes_on_where_it_was_interrupted(command: Command, tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_checkpoint, "--documents", "6", "--answers", "kept.jsonl", "--output", "whole.json")
    code, shown, _ = command("eval.controls", *arguments)
    assert code == 0
    assert all(name in shown for name in ROWS)
    assert "attends to the right one and answers wrong in" in shown.replace("\n", " ")
    kept = (tmp_path / "kept.jsonl").read_bytes()
    lines = kept.splitlines(keepends=True)
    (tmp_path / "kept.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:20])
    code, _, _ = command("eval.controls", *arguments[:-1], "again.json")
    assert code == 0
    assert len((tmp_path / "kept.jsonl").read_bytes().splitlines()) == len(lines)
    whole, again = (Result.read(tmp_path / name) for name in ("whole.json", "again.json"))
    assert [row.name for row in whole.rows] == ROWS
    for one, other in zip(whole.rows, again.rows):
        assert one.model_copy(update={"seconds": None}) == other.model_copy(update={"seconds": None})
    assert whole.read_samples(tmp_path / "whole.json") == again.read_samples(tmp_path / "again.json")
