"""Dense retrieval over any encoder: ranking, changes, filters, files, and work that is never done twice."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.data.types import Document
from mac_rag.errors import BankError, FingerprintError
from mac_rag.retrieval import DenseRetriever, snapshot
from tests.retrieval.helpers import WordEncoder, changed, documents, in_blocks

WORDS = [f"w{i}" for i in range(40)]


def corpus(size: int, seed: int = 0) -> list[Document]:
    rng = random.Random(seed)
    return [Document(f"{seed}-{i}", f"{i} " + " ".join(rng.choices(WORDS, k=6)), {"i": i}) for i in range(size)]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_hits_are_the_largest_dot_products_whatever_came_and_went(data: st.DataObject) -> None:
    retriever = DenseRetriever(WordEncoder())
    texts = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)
    *_, kept = changed(retriever, data, texts)
    allowed = set(data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True))) if kept else set()
    [question], k, encode = (
        data.draw(st.lists(texts, min_size=1, max_size=1)),
        data.draw(st.integers(1, 6)),
        WordEncoder(),
    )
    for these in (None, allowed):
        chosen = [document for document in kept.values() if these is None or document.id in these]
        scores = [float(encode.questions([question])[0] @ encode.questions([d.text])[0]) for d in chosen]
        best = sorted(range(len(chosen)), key=lambda i: (-scores[i], i))[:k]  # small whole numbers: ties are exact
        [hits] = retriever.retrieve([question], k, allowed=these)
        assert [(hit.document_id, hit.score, hit.text) for hit in hits] == [
            (chosen[i].id, scores[i], chosen[i].text) for i in best
        ]


class TestWork:
    def test_texts_that_are_the_same_are_encoded_once(self) -> None:
        encoder = WordEncoder()
        retriever = DenseRetriever(encoder)
        retriever.add(documents("storm", "sun", "storm"))
        retriever.delete("d0")
        retriever.add([Document("later", "sun"), Document("again", "storm")])
        assert sorted(encoder.encoded) == ["storm", "sun"]
        retriever.delete("d2")
        retriever.delete("again")
        retriever.add([Document("back", "storm")])
        assert [hit.document_id for hit in retriever.retrieve(["storm"], 1)[0]] == ["back"]

    def test_an_interrupted_add_adds_nothing_and_goes_on_where_it_stopped(self, tmp_path: Path) -> None:
        everything = corpus(2500)
        broken = DenseRetriever(WordEncoder(fail_after=2), folder=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            broken.add(everything)
        assert len(broken) == 0
        encoder = WordEncoder()
        retriever = DenseRetriever(encoder, folder=tmp_path)
        retriever.add(everything)
        assert len(encoder.encoded) == 2500 - 2 * 1024
        fresh = DenseRetriever(WordEncoder())
        fresh.add(everything)
        assert retriever.retrieve(WORDS, 3) == fresh.retrieve(WORDS, 3)

    def test_what_another_encoder_left_or_what_is_damaged_is_encoded_again(self, tmp_path: Path) -> None:
        DenseRetriever(WordEncoder("other"), folder=tmp_path).add(documents("storm"))
        DenseRetriever(WordEncoder(), folder=tmp_path).add(documents("sun"))
        for part in tmp_path.glob("*.part.safetensors"):
            part.write_bytes(part.read_bytes()[:-1] + b"\7")
        (tmp_path / ("0" * 64 + ".part.safetensors")).write_bytes(b"garbage")
        encoder = WordEncoder()
        DenseRetriever(encoder, folder=tmp_path).add(documents("storm", "sun"))
        assert sorted(encoder.encoded) == ["storm", "sun"]


class TestFiles:
    def test_everything_comes_back_without_being_encoded(self, tmp_path: Path) -> None:
        retriever = DenseRetriever(WordEncoder(), folder=tmp_path)
        retriever.add(corpus(40))
        retriever.delete("0-3")
        retriever.save(tmp_path)
        assert sorted(path.suffixes[-1] for path in tmp_path.iterdir()) == [".json", ".safetensors"]
        encoder = WordEncoder()
        again = DenseRetriever.load(tmp_path, encoder)
        assert again.retrieve(WORDS, 9) == retriever.retrieve(WORDS, 9)
        again.add([Document("copy", corpus(40)[5].text)])
        assert encoder.encoded == []
        assert len(again) == 40

    def test_another_encoder_is_refused(self, tmp_path: Path) -> None:
        DenseRetriever(WordEncoder("one")).save(tmp_path)
        with pytest.raises(FingerprintError, match="made by the encoder 'one', not by 'two'"):
            DenseRetriever.load(tmp_path, WordEncoder("two"))


def test_many_questions_are_scored_in_blocks() -> None:
    retriever = DenseRetriever(WordEncoder())
    retriever.add(corpus(50))
    whole = retriever.retrieve(WORDS, 4)
    blocks = in_blocks(DenseRetriever(WordEncoder()), 120)
    blocks.add(corpus(50))
    assert blocks.retrieve(WORDS, 4) == whole
    assert np.shape(whole) == (40, 4)


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "unlink", "mkdir", "stat", "listdir", "scandir"])
def test_a_folder_that_fails_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whichever call of the system fails: while vectors are cached, saved, and found again."""
    plain, calls, refusals = getattr(os, call), 0, []
    for number in itertools.count(1):
        folder, calls = tmp_path / str(number), 0

        def failing(*arguments: Any, number: int = number, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(5, "Input/output error")
            return plain(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                retriever = DenseRetriever(WordEncoder(), folder=folder)
                for text in ("one two", "three"):
                    retriever.add([Document(text, text)])
                    retriever.save(folder)
                assert snapshot.exists(folder)
            except BankError as error:
                refusals.append((str(folder), str(error)))
        if calls < number:
            break
    assert refusals
    assert all(place in refusal for place, refusal in refusals)
