"""The documents and sentences that an answer rests on."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.asking import in_their_letters
from mac_rag.bank import MemoryBank
from mac_rag.config import AttentionConfig
from mac_rag.data.characters import word_forms
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.sources import highlights, sentence_spans, support_of
from tests.cli.helpers import refusal, run

PRESS = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
MATCH = "Irene Searkwell struck the first goal. Norrland won."
QUESTION = "How many workers does Rainga Press have?"


@pytest.fixture(scope="module")
def model() -> MACModel:
    return MACModel.from_pretrained("mac-tiny")


def engine_of(model: MACModel, *, keep_texts: bool = False, retriever: BM25Retriever | None = None) -> MACEngine:
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=keep_texts), retriever)
    engine.adapt([Document("match", MATCH, {"date": "2004-05"}), Document("press", PRESS, {"year": 2005})])
    return engine


def test_shares_are_the_attention(model: MACModel) -> None:
    engine = engine_of(model)
    ids, mass = engine.document_attention([QUESTION])
    [answer] = engine.answer([QUESTION], sources=2)
    assert {source.document_id: source.share for source in answer.sources} == dict(zip(ids, mass[0].tolist()))
    assert [source.document_id for source in answer.sources] == ["press", "match"]
    assert [source.text for source in answer.sources] == [None, None]  # the bank keeps none
    assert [source.retrieved for source in answer.sources] == [False, False]
    press, match = answer.sources
    assert press.date is None
    assert dict(press.metadata) == {"year": 2005}
    assert match.date.isoformat() == "2004-05-01T00:00:00+00:00"
    assert engine.answer([QUESTION])[0].sources == ()
    assert engine.answer([QUESTION], sources=1)[0].sources == (press,)


def test_kept_texts_give_the_sentence(model: MACModel) -> None:
    [answer] = engine_of(model, keep_texts=True).answer([QUESTION], sources=2)
    assert answer.text == "180"
    assert [source.sentence for source in answer.sources] == ["The company employs 180 people.", None]


@pytest.mark.parametrize("use_memory", [True, False])
def test_a_retrieved_document_that_holds_the_answer_comes_first(model: MACModel, use_memory: bool) -> None:
    engine = engine_of(model, retriever=BM25Retriever())
    [answer] = engine.answer([QUESTION], use_memory=use_memory, sources=2)
    first = answer.sources[0]
    assert (first.document_id, first.retrieved, first.text) == ("press", True, PRESS)
    assert first.sentence == "The company employs 180 people."
    assert (first.share is None) == (not use_memory)
    # One without the answer is behind it, however much attention it has.
    [other] = engine.answer(["Who struck the first goal?"], use_memory=use_memory, sources=2)
    assert other.sources[0].document_id == "match"


def test_an_answer_that_came_piece_by_piece(model: MACModel) -> None:
    engine = engine_of(model, keep_texts=True)
    answer = "".join(engine.stream(QUESTION))
    assert engine.sources(QUESTION, answer, most=2) == engine.answer([QUESTION], sources=2)[0].sources
    assert [source.span for source in engine.sources(QUESTION)] == [None, None]
    assert [source.document_id for source in engine.sources(QUESTION, allowed={"match"})] == ["match"]
    assert engine.sources(QUESTION, answer, texts={"note": "180 came."}, use_memory=False)[0].sentence == "180 came."


def test_contexts_of_the_caller_are_no_documents(model: MACModel) -> None:
    [answer] = engine_of(model).answer([QUESTION], contexts=[[PRESS]], sources=5)
    assert {source.document_id for source in answer.sources} == {"press", "match"}
    assert not any(source.retrieved for source in answer.sources)


def test_merged_documents_have_their_own_dates_and_texts(model: MACModel) -> None:
    engine = engine_of(model, keep_texts=True)
    engine.bank.merge(["match", "press"], engine.bank["match"].phi)  # type: ignore[attr-defined]
    texts = {source.document_id: source.text for source in engine.sources(QUESTION, "180")}
    assert texts == {"match": MATCH, "press": PRESS}
    with pytest.raises(BankError, match="'bridge' is none of the documents"):
        engine.bank["match"].place("bridge")


def test_what_cannot_be_told_is_an_error(model: MACModel) -> None:
    engine = engine_of(model)
    with pytest.raises(ConfigError, match="sources is -1"):
        engine.answer([QUESTION], sources=-1)
    coarse = MACEngine(model, engine.bank, attention=AttentionConfig(strategy="hierarchical"))
    with pytest.raises(ConfigError, match="hierarchical"):
        coarse.answer([QUESTION], sources=1)


@given(st.text(alphabet="Aa b.!?\n\"'1é", max_size=60))
def test_sentences_cover_a_text(text: str) -> None:
    spans = sentence_spans(text)
    assert "".join("".join(text[start:end].split()) for start, end in spans) == "".join(text.split())
    assert all(start < end for start, end in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize(
    "sentences",
    [
        ["It was built ca. 1890 for max. 20 people.", "It stands."],
        ["He met Lt. Col. Ray Oss on Sept. 5.", "They ate at 5 p.m. in Kell.", "Then he left."],
        ["See vol. 3, pp. 4-5, and fig. 2.", "It is at No. 5 Kell Road."],
        ["It weighs 5 lbs. and sold 20 pct. more.", "Nice."],
        ["Acme Corp. was founded in Jan. 1990.", "Mr. J. R. Smith et al. wrote of it."],
        ["He chose plan A.", "It is in hall B.", "She got vitamin C.", "Then she left."],
        ["It opened in the U.K. in 1990.", "He moved to the U.S. in May.", "The mayor stayed."],
        ["Is it?", "Yes!", "It costs $3.5 million.", "Visit example.com today."],
        ["“He left.”", "She said: “Go!” and stayed."],
        ["यह एक वाक्य है।", "यह दूसरा है।"],
        ["我去了。", "你呢？", "他走了！"],
        ["東京は首都です。", "人口は1400万人です。"],
    ],
)
def test_a_sentence_is_whole(sentences: list[str]) -> None:
    text = ("" if ord(sentences[0][0]) > 0x3000 else " ").join(sentences)
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


def test_long_texts_are_cut_in_linear_time() -> None:
    for piece in ("Mr. Berg came on Jan. 5. ", "a. ", '"a." ', "(", "\n", "x" * 50, "。"):
        text = piece * (400_000 // len(piece))
        started = time.perf_counter()
        spans = sentence_spans(text)
        assert time.perf_counter() - started < 10  # two thousand times as long as it takes
        assert "".join("".join(text[start:end].split()) for start, end in spans) == "".join(text.split())


def test_an_answer_is_written_as_its_document_writes_it(mac_small: MACModel) -> None:
    """By an LM whose tokenizer drops case, accents and spaces, from memory, from documents, and in a stream."""
    assert not mac_small.base_lm.keeps_letters
    question = "Who runs the factory in Orsena?"
    name = "Siân O’Brien"
    text = f"The factory in Orsena is run by {name}. It was opened in 2004."
    engine = MACEngine(mac_small, MemoryBank(mac_small.fingerprint, keep_texts=True))
    engine.adapt([Document("factory", text)])
    assert engine.answer([question])[0].text == name
    [answer] = engine.answer([question], sources=1)
    assert (answer.text, answer.sources[0].sentence) == (name, f"The factory in Orsena is run by {name}.")
    assert engine.answer([question], contexts=[[text]], use_memory=False)[0].text == name
    assert "".join(engine.stream(question)) == name


def test_an_lm_that_keeps_letters_is_not_corrected(model: MACModel) -> None:
    assert model.base_lm.keeps_letters
    assert in_their_letters(engine_of(model)._reader, [], ["press"], [], None, with_memory=True) == ["press"]


def test_the_sentence_is_chosen_by_the_answer_then_by_the_question() -> None:
    text = 'The U.S. won. In 1990 Mr. Berg came. "In 1990," she said, "the museum opened." It closed in 2001.'
    for answer, expected in {
        "1990": '"In 1990," she said, "the museum opened."',
        "Mr. Berg": "In 1990 Mr. Berg came.",
        "2001": "It closed in 2001.",
        "the year 1700 of a Danish king": None,
        "": None,
    }.items():
        support = support_of(text, answer, "When did the museum open, or when was it opened?")
        assert (None if support is None else text[slice(*support.span)]) == expected


def test_the_answers_words_come_before_attention_and_the_questions_beside_it(model: MACModel) -> None:
    engine = MACEngine(model, MemoryBank(model.fingerprint))
    read = {
        "half": "Berg spoke for the workers of Rainga Press, and how many workers does it have?",
        "bare": "Anna Berg came.",
        "asked": "For the workers of Rainga Press spoke Anna Berg.",
        "none": "How many workers does Rainga Press have?",
    }
    found = engine.sources("Who spoke for the workers of Rainga Press?", "Anna Berg", texts=read, use_memory=False)
    assert [source.document_id for source in found] == ["asked", "bare", "half", "none"]
    assert engine.sources(QUESTION, "", texts=read, use_memory=False)[0].document_id == "half"  # as retrieved


def test_few_sources_are_the_first_of_many(model: MACModel) -> None:
    """The document that holds the answer is named, though another one has more attention."""
    engine = engine_of(model, keep_texts=True)
    for answer in ("180", "Norrland"):
        assert engine.sources(QUESTION, answer, most=1) == engine.sources(QUESTION, answer, most=2)[:1]
    assert engine.sources(QUESTION, "Norrland", most=1)[0].document_id == "match"


def test_the_command_prints_json_and_a_table(tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    lines = [{"id": "p\x1b[2J", "text": PRESS, "date": "2005"}, {"id": "match", "text": MATCH}]
    notes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bank = tmp_path / "bank"
    run("adapt", notes, "--bank", bank, "--model", "mac-tiny", "--keep-texts")
    printed = run("ask", QUESTION, "--bank", bank, "--json").stdout
    assert "\x1b" not in printed
    record = json.loads(printed)
    assert (record["answer"], record["truncated"]) == ("180", False)
    first = record["sources"][0]
    assert (first["document_id"], first["date"]) == ("p\x1b[2J", "2005-01-01")
    assert first["sentence"] == "The company employs 180 people."
    table = run("ask", QUESTION, "--bank", bank, "--explain").stdout
    assert "\x1b" not in table
    assert "2005-01-01" in table
    assert "employs" in table
    assert "leave --explain out" in refusal("ask", QUESTION, "--bank", bank, "--json", "--explain")


@given(st.text(max_size=40), st.text(max_size=8))
def test_highlights_are_the_answer_or_its_words(text: str, answer: str) -> None:
    places = highlights(text, answer)
    wanted = word_forms(answer)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(places))
    for start, end in places:
        words = word_forms(text[start:end])
        assert words == wanted or (len(words) == 1 and words[0] in wanted)
    if not places:
        assert not set(wanted) & set(word_forms(text))


def test_the_answer_as_a_whole_is_highlighted_before_its_words() -> None:
    text = "The head of the museum of Orsena is <b>Ada</b> Voss 😀, the heir of the Voss."
    assert [text[slice(*place)] for place in highlights(text, "museum of Orsena")] == ["museum of Orsena"]
    assert [text[slice(*place)] for place in highlights(text, "ada voss")] == ["Ada", "Voss", "Voss"]


def test_sources_cost_no_second_pass_over_the_bank(model: MACModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    passes: list[int] = []
    forward = model.aggregation.forward

    def counting(question: Any, *arguments: Any, **options: Any) -> Any:
        passes.append(len(question.tokens))
        return forward(question, *arguments, **options)

    monkeypatch.setattr(model.aggregation, "forward", counting)
    [answer] = engine.answer([QUESTION], sources=2)
    assert passes == [1]
    assert answer.text == engine.answer([QUESTION])[0].text
    many = engine.answer([f"{QUESTION} {number}" for number in range(10)], sources=2)  # more than one pass takes
    alone = [engine.answer([f"{QUESTION} {number}"], sources=2)[0] for number in range(10)]
    for one, other in zip(many, alone, strict=True):
        assert one.text == other.text
        for found, expected in zip(one.sources, other.sources, strict=True):
            assert found.document_id == expected.document_id
            assert found.share == pytest.approx(expected.share, abs=1e-5)
