"""Documents of other tenants, which are not allowed: they leave no trace, whatever was put and deleted before.

Retrievers: bit by bit. Banks: but for the order in which a sum is rounded. Engines: the same answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mac_rag.bank import MemoryBank
from mac_rag.bank.reader import BankReader
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError
from mac_rag.retrieval import BM25Retriever
from tests.bank.helpers import READINGS, ROUNDING, put_entries, random_rows
from tests.retrieval.helpers import RETRIEVERS
from tests.torture.changes import small_model
from tests.torture.part import Part

_WORDS = [f"w{number}" for number in range(7)]
_QUESTIONS = ["Who opened the bridge?", "When did the museum close?"]
_NEWS = generate("val", 12)
_ENGINES = {
    "streaming": AttentionConfig(),
    "preselect": AttentionConfig(strategy="preselect", preselected=2),
    "hierarchical": AttentionConfig(strategy="hierarchical", subgroup=2),
}


class Torture(Part):
    """Every retriever, every way to read a bank, and every kind of engine, in turn."""

    def __init__(self, place: Path) -> None:
        self._model = small_model(place)
        self._ways: list[tuple[str, Callable[[str, random.Random], None], str]] = [
            *(("retriever", self._retriever, name) for name in RETRIEVERS),
            *(("bank", self._bank, name) for name in READINGS),
            *(("engine", self._engine, name) for name in _ENGINES),
        ]

    def kind(self, seed: int) -> str:
        return self._ways[seed % len(self._ways)][0]

    def trial(self, seed: int) -> None:
        _, check, name = self._ways[seed % len(self._ways)]
        try:
            check(name, random.Random(seed))
        except BaseException as error:
            error.add_note(name)
            raise

    def _retriever(self, name: str, draw: random.Random) -> None:
        retriever, fresh = RETRIEVERS[name](), RETRIEVERS[name]()
        held: dict[str, Document] = {}  # in the order of addition
        names = [f"d{number}" for number in range(draw.randint(1, 20))]
        for _ in range(draw.randint(1, 6)):
            if draw.random() < 0.3 and held:
                gone = draw.choice(list(held))
                retriever.delete(gone)
                del held[gone]
            if draw.random() < 0.2:  # what it remembers of a question must not matter
                retriever.retrieve([_text(draw)], 3, allowed=_some(names, draw))
            new = [Document(each, _text(draw)) for each in draw.sample(names, draw.randint(1, len(names)))]
            retriever.put(new)
            for document in new:
                held.pop(document.id, None)
                held[document.id] = document
        allowed = _some(names, draw)
        fresh.add([document for document in held.values() if document.id in allowed])
        questions, k = [_text(draw) for _ in range(draw.randint(1, 4))], draw.randint(1, 20)
        found = retriever.retrieve(questions, k, allowed={*allowed, "nobody"})
        assert found == fresh.retrieve(questions, k)

    def _bank(self, name: str, draw: random.Random) -> None:
        model, config = self._model, AttentionConfig.model_validate(READINGS[name])
        bank, fresh = (MemoryBank(model.fingerprint) for _ in range(2))
        reader, names = BankReader(model, bank, config), [f"d{number}" for number in range(draw.randint(1, 12))]
        for _ in range(draw.randint(1, 5)):
            new = draw.sample(names, draw.randint(1, len(names)))
            rows = [draw.randint(1, 3) for _ in new]
            bank.put([Document(each, "") for each in new], random_rows(model, sum(rows), draw.getrandbits(30)), rows)
            if draw.random() < 0.5:  # so that what is cached of the bank is older than its changes
                reader.aggregate(_QUESTIONS)
            if draw.random() < 0.3 and (merged := _some(bank.document_ids, draw)):
                bank.merge(merged, random_rows(model, 2, draw.getrandbits(30)))
            if draw.random() < 0.4 and len(bank) > 1:
                bank.delete(draw.choice(bank.document_ids))
        allowed = _some(names, draw)
        seen = [entry for entry in bank if all(member.document_id in allowed for member in entry.members)]
        put_entries(fresh, seen)
        if not seen:
            _refused(lambda: reader.aggregate(_QUESTIONS, allowed))
            return
        found, wanted = reader.aggregate(_QUESTIONS, allowed), BankReader(model, fresh, config).aggregate(_QUESTIONS)
        torch.testing.assert_close(found.phi, wanted.phi, **ROUNDING)
        torch.testing.assert_close(found.discarded, wanted.discarded, **ROUNDING)

    def _engine(self, name: str, draw: random.Random) -> None:
        engine, fresh = (
            MACEngine(self._model, retriever=BM25Retriever(), k=3, attention=_ENGINES[name]) for _ in range(2)
        )
        versions = [*_NEWS.documents, *(Document(each.id, f"Not so. {each.text}") for each in _NEWS.documents[:4])]
        held: dict[str, Document] = {}
        for _ in range(draw.randint(1, 3)):
            new = {document.id: document for document in draw.sample(versions, draw.randint(1, 8))}
            engine.adapt(new.values())
            for document in new.values():
                if held.get(document.id) != document:
                    held.pop(document.id, None)
                    held[document.id] = document
            if draw.random() < 0.4:
                gone = draw.choice(list(held))
                engine.forget(gone)
                del held[gone]
        allowed = _some([document.id for document in _NEWS.documents], draw)
        questions = [each.question for each in draw.sample(list(_NEWS.questions), 2)]
        left = [document for document in held.values() if document.id in allowed]
        if not left:
            _refused(lambda: engine.answer(questions, allowed=allowed))
            return
        fresh.adapt(left)
        for ours, theirs in zip(engine.answer(questions, allowed=allowed), fresh.answer(questions), strict=True):
            assert (ours.text, ours.contexts, ours.document_ids) == (theirs.text, theirs.contexts, theirs.document_ids)


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randrange(10)))


def _some(names: list[str], draw: random.Random) -> set[str]:
    share = draw.random()
    return {name for name in names if draw.random() < share}


def _refused(act: Callable[[], object]) -> None:
    with pytest.raises(BankError, match=r"none of the documents|is empty"):
        act()
