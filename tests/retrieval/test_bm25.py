"""BM25: the incremental index against the formula written out, rank_bm25 against itself; changes, files, edges."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.retrieval import BM25Retriever, Tokenizer, make_retriever, snapshot
from mac_rag.retrieval.bm25 import ENGLISH_STOPWORDS, Engine
from tests.retrieval.helpers import changed

ENGINES: tuple[Engine, ...] = ("incremental", "rank_bm25")
GERMAN = ("die", "der", "ein", "am", "und")


def documents(*texts: str) -> list[Document]:
    return [Document(f"d{index}", text) for index, text in enumerate(texts)]


def filled(engine: Engine, texts: Sequence[str], tokenizer: Tokenizer | None = None) -> BM25Retriever:
    retriever = BM25Retriever(engine, tokenizer=tokenizer)
    retriever.add(documents(*texts))
    return retriever


def oracle(texts: Sequence[str], question: str, k: int, tokenize: Tokenizer) -> list[tuple[str, float]]:
    """The formula of the docstring, one term and one document at a time."""
    corpus = [tokenize(text) for text in texts]
    mean = sum(map(len, corpus)) / len(corpus)
    scores = []
    for terms in corpus:
        score = 0.0
        for term in tokenize(question):
            frequency = terms.count(term)
            if frequency:
                holding = sum(term in other for other in corpus)
                idf = math.log(1 + (len(corpus) - holding + 0.5) / (holding + 0.5))
                score += idf * (frequency * 2.5 / (frequency + 1.5 * (1 - 0.75 + 0.75 * len(terms) / mean)))
        scores.append(score)
    ranked = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-scores[i], i))
    return [(f"d{i}", scores[i]) for i in ranked[:k]]


def check_against_oracle(texts: Sequence[str], questions: Sequence[str], k: int, tokenize: Tokenizer) -> None:
    expected = [oracle(texts, question, k, tokenize) for question in questions]
    for hits, wanted in zip(filled("incremental", texts, tokenize).retrieve(questions, k), expected, strict=True):
        assert [hit.document_id for hit in hits] == [document_id for document_id, _ in wanted]
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in wanted], rel=1e-9, abs=1e-9)
        assert all(hit.text == texts[int(hit.document_id[1:])] for hit in hits)


def random_corpus(rng: random.Random) -> tuple[list[str], list[str]]:
    """Texts and questions of few words: most terms stand in more than half of the texts, and ties are common."""
    words = [f"w{i}" for i in range(rng.choice((2, 5, 30, 300)))]
    texts = [" ".join(rng.choices(words, k=rng.randint(0, 12))) for _ in range(rng.choice((1, 2, 3, 10, 40)))]
    return texts, [" ".join(rng.choices([*words, "unknown"], k=rng.randint(0, 6))) for _ in range(5)]


def test_rank_bm25_ranks_and_scores_as_the_library_does() -> None:
    """rank_bm25 unchanged, as its users call it. It cannot index documents that hold no term at all."""
    rng = random.Random(4)
    for texts, questions in (random_corpus(rng) for _ in range(300)):
        corpus = [text.split() for text in texts]
        found = filled("rank_bm25", texts, Tokenizer(stemmer=None, stopwords=())).retrieve(questions, 50)
        if not any(corpus):
            assert found == [[]] * len(questions)
            continue
        library = BM25Okapi(corpus)
        for question, hits in zip(questions, found, strict=True):
            terms = question.split()
            scores = library.get_scores(terms)
            sharing = [i for i in range(len(texts)) if set(terms) & set(corpus[i])]
            ranked = sorted(sharing, key=lambda i: (-scores[i], i))
            assert [hit.document_id for hit in hits] == [f"d{i}" for i in ranked]
            assert [hit.score for hit in hits] == pytest.approx([scores[i] for i in ranked], rel=1e-12, abs=1e-12)


WORDS = st.sampled_from(
    ["Running", "runs", "ran", "the", "of", "Zürich", "ZÜRICH", "8", "x", "—", "the-end", "İ", "東京"]
)
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=8),
    questions=st.lists(TEXTS, min_size=1, max_size=4),
    k=st.integers(1, 10),
    stemmer=st.sampled_from(["english", None]),
    stopwords=st.sampled_from([ENGLISH_STOPWORDS, GERMAN, ()]),
)
def test_the_index_follows_the_formula_under_every_tokenization(
    texts: list[str], questions: list[str], k: int, stemmer: str | None, stopwords: tuple[str, ...]
) -> None:
    check_against_oracle(texts, questions, k, Tokenizer(stemmer=stemmer, stopwords=stopwords))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("engine", ENGINES)
def test_changes_leave_the_index_of_a_fresh_start(engine: Engine, data: st.DataObject) -> None:
    retriever = BM25Retriever(engine)
    for kept in changed(retriever, data, TEXTS):
        fresh = BM25Retriever(engine)
        fresh.add(list(kept.values()))
        questions = data.draw(st.lists(TEXTS, max_size=3))
        assert retriever.retrieve(questions, 3) == fresh.retrieve(questions, 3)


class TestFiles:
    TOKENIZER = Tokenizer(pattern=r"[a-zß-ü]+", stemmer="german", stopwords=GERMAN)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_everything_comes_back(self, engine: Engine, tmp_path: Path) -> None:
        retriever = filled(engine, ["die Häuser der Stadt", "ein Haus", "", "drei Brücken", "Stürme"], self.TOKENIZER)
        retriever.add([Document("m", "Haus am Meer", {"date": "May 1"})])
        retriever.delete("d1")
        retriever.save(tmp_path)
        again = BM25Retriever.load(tmp_path)
        assert (again.engine, again.tokenizer) == (engine, self.TOKENIZER)
        questions = ["Häusern", "Brücke", "7", "Sturm"]
        assert again.retrieve(questions, 9) == retriever.retrieve(questions, 9)
        assert [hit.metadata for hit in again.retrieve(["Meer"], 1)[0]] == [{"date": "May 1"}]
        for index in (again, retriever):  # and both go on alike
            index.add([Document("n", "noch ein Haus")])
            index.delete("d0")
        assert again.retrieve(questions, 9) == retriever.retrieve(questions, 9)
        again.save(tmp_path)
        assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
        assert len(make_retriever("bm25", folder=tmp_path)) == len(again) == 5

    def test_an_empty_index_comes_back(self, tmp_path: Path) -> None:
        BM25Retriever().save(tmp_path)
        again = BM25Retriever.load(tmp_path)
        assert len(again) == 0
        assert again.retrieve(["storm"], 2) == [[]]

    def test_terms_of_another_analysis_are_cut_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("mac_rag.retrieval.bm25.ANALYSIS", "another")
            patch.setattr(Tokenizer, "__call__", lambda self, text: text.upper().split())
            filled("incremental", ["storms in May"]).save(tmp_path)
        assert len(BM25Retriever.load(tmp_path).retrieve(["storm"], 1)[0]) == 1

    def test_damage_is_noticed(self, tmp_path: Path) -> None:
        with pytest.raises(BankError, match="there is no retriever in"):
            BM25Retriever.load(tmp_path)
        filled("incremental", ["storm in May"]).save(tmp_path)
        manifest, arrays = tmp_path / "retriever.json", next(tmp_path.glob("*.safetensors"))
        whole = manifest.read_bytes()
        for bad, said in (
            (whole[:-9], "is damaged"),
            (whole.replace(b"storm", b"snow", 1), "checksum of retriever.json does not match"),
            (whole.replace(b'"bm25"', b'"dense"', 1), "kind 'dense' in format 1, not 'bm25'"),
            (whole.replace(b'"format": 1', b'"format": 9', 1), "in format 9"),
        ):
            manifest.write_bytes(bad)
            with pytest.raises(BankError, match=said):
                BM25Retriever.load(tmp_path)
        manifest.write_bytes(whole)
        arrays.write_bytes(arrays.read_bytes()[:-4] + b"\7\7\7\7")
        with pytest.raises(BankError, match="build it again from its documents"):
            BM25Retriever.load(tmp_path)
        arrays.unlink()
        with pytest.raises(BankError, match="is damaged"):
            BM25Retriever.load(tmp_path)

    @pytest.mark.parametrize("vocabulary", [["storm", "may", "storm"], ["storm", "may", "fog"]])
    def test_a_vocabulary_that_no_document_has(self, tmp_path: Path, vocabulary: list[str]) -> None:
        """With checksums that fit: a word twice is refused, and a word of no document finds none."""
        filled("incremental", ["storm in May"]).save(tmp_path)
        body, arrays = snapshot.read(tmp_path, "bm25")
        assert body["vocabulary"] == vocabulary[:2]
        snapshot.write(tmp_path, "bm25", {**body, "vocabulary": vocabulary}, arrays)
        if len(set(vocabulary)) < 3:
            with pytest.raises(BankError, match="a word of the vocabulary comes twice; build it again"):
                BM25Retriever.load(tmp_path)
            return
        again = BM25Retriever.load(tmp_path)
        assert again.retrieve(["fog", "no fog"], 2) == [[], []]
        assert len(again.retrieve(["storm or fog"], 2)[0]) == 1


def test_unknown_engine_and_languages_are_refused() -> None:
    with pytest.raises(ConfigError, match="'lucene'; choose one of incremental, rank_bm25"):
        BM25Retriever("lucene")
    with pytest.raises(ConfigError, match="unknown stemmer 'klingon'"):
        Tokenizer(stemmer="klingon")
    with pytest.raises(ConfigError, match=r"must be a tuple of words, got 'klingon'; give \(\) to keep all"):
        Tokenizer(stopwords="klingon")  # type: ignore[arg-type]
    for pattern in ("(", "(a)"):
        with pytest.raises(ConfigError, match=r"groups|not a regular expression"):
            Tokenizer(pattern)
