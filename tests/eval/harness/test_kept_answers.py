"""Kept answers on a real, untrained model: nothing is asked twice, and nothing else is taken for an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval.harness.kept_answers import KeptAnswer, KeptAnswers, Prompt, answer_source
from eval.harness.protocol import Outcome, run_protocol
from mac_rag.data.newswire.generate import generate
from mac_rag.engine import Answer, MACEngine
from mac_rag.errors import ConfigError, DataError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever

STREAM = generate("test", 12, seed=5)
ROWS = ["LM alone", "MAC", "one top-1", "one top-1 + MAC", "two top-1", "two top-1 + MAC"]
GIVEN = KeptAnswer(text="Ada Voss", seconds=0.5)


@pytest.fixture(autouse=True)
def uncounted_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures the costs of answers asks the engine as well, and gives no answers."""
    monkeypatch.setattr("eval.harness.protocol.Costs", lambda *_: SimpleNamespace(measures=lambda *_: {}))


class Counting(MACEngine):
    """Counts the answers that it gives; stops before the one that would be too many."""

    asked = 0
    stop_after: int | None = None

    def answer(self, questions: list[str], **options: object) -> list[Answer]:
        if self.stop_after is not None and self.asked + len(questions) > self.stop_after:
            raise KeyboardInterrupt
        self.asked += len(questions)
        return super().answer(questions, **options)


def run(engine: Counting, path: Path | None) -> Outcome:
    kept = None if path is None else KeptAnswers(path, answer_source(engine.model, STREAM.documents))
    return run_protocol(
        engine, STREAM, {name: BM25Retriever() for name in ("one", "two")}, [1], kept=kept, batch_size=1
    )


def predictions(outcome: Outcome) -> list[dict[str, str]]:
    return [{name: verdict.prediction for name, verdict in sample.rows.items()} for sample in outcome.samples]


def test_equal_prompts_of_two_retrievers_are_answered_once(tiny_model: MACModel) -> None:
    engine = Counting(tiny_model)
    outcome = run(engine, None)
    assert engine.asked == 4 * 12
    assert [row.name for row in outcome.rows] == ROWS
    one, two = outcome.rows[2:4], outcome.rows[4:]
    assert [row.model_copy(update={"name": ""}) for row in one] == [row.model_copy(update={"name": ""}) for row in two]


def test_an_interrupted_run_continues(tiny_model: MACModel, tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    engine = Counting(tiny_model)
    engine.stop_after = 33
    with pytest.raises(KeyboardInterrupt):
        run(engine, path)
    with path.open("ab") as file:
        file.write(b'{"key":"cut of')
    done = engine.asked
    assert done == 2 * 12 + 2 * 4  # both rows without documents, and two whole groups after them
    again = Counting(tiny_model)
    outcome = run(again, path)
    assert again.asked == 4 * 12 - done
    assert predictions(outcome) == predictions(run(Counting(tiny_model), None))


def test_answers_of_other_weights_or_streams_are_not_found(tiny_model: MACModel, tmp_path: Path) -> None:
    source = answer_source(tiny_model, STREAM.documents)
    assert source == answer_source(tiny_model, STREAM.documents)
    first = STREAM.documents[0]
    redated = (replace(first, metadata={**first.metadata, "date": "1999"}), *STREAM.documents[1:])
    sources = {source, answer_source(tiny_model, STREAM.documents[1:]), answer_source(tiny_model, redated)}
    for network in (tiny_model.base_lm, tiny_model.amortization):
        with torch.no_grad():
            next(network.parameters()).add_(1)
        sources.add(answer_source(tiny_model, STREAM.documents))
    assert len(sources) == 5
    path = tmp_path / "answers.jsonl"
    KeptAnswers(path, source).add({("Who?", ()): GIVEN}, None)
    found = [KeptAnswers(path, other).find(("Who?", ()), None) for other in sources]
    assert [answer for answer in found if answer] == [GIVEN]


def test_an_answer_is_found_by_question_documents_and_weight(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path / "answers.jsonl", "a")
    kept.add({("Who?", ("Rain.", "Sun.")): GIVEN}, 0.5)
    for answers in (kept, KeptAnswers(tmp_path / "answers.jsonl", "a")):
        assert answers.find(("Who?", ("Rain.", "Sun.")), 0.5) == GIVEN
        for prompt in (("Who", ("Rain.", "Sun.")), ("Who?", ("Sun.", "Rain.")), ("Who?", ("Rain.",)), ("Who?", ())):
            assert answers.find(prompt, 0.5) is None
        for share in (None, 1.0):
            assert answers.find(("Who?", ("Rain.", "Sun.")), share) is None
        assert answers.find(("Who?", ("Rain.", "Sun."), "2004"), 0.5) is None
    kept.add({Prompt("Who?", as_of="2004"): GIVEN}, None)
    assert kept.find(Prompt("Who?"), None) == GIVEN  # the LM alone answers the same at every moment
    assert kept.find(Prompt("Who?", as_of="2004"), 1.0) is None


@pytest.mark.parametrize("content", ["my notes\n", "my notes", '{"text": "Rain fell."}', '{"key": 1}\n'])
def test_a_file_with_other_content_is_refused_and_left_unchanged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=r"notes\.txt, line 1: not a kept answer"):
        KeptAnswers(path)
    assert path.read_text() == content


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--answers .* cannot be written"):
        KeptAnswers(tmp_path)
