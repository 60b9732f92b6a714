"""A BM25 index in the file of a bank: what it finds, what one commit means for it, and what is left of a deletion."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever, index_faults, index_size
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, DamageError
from mac_rag.retrieval import BM25Retriever, Tokenizer
from tests.bank.helpers import fast_folder, memory
from tests.helpers import run_in_process
from tests.retrieval.helpers import PLAIN

WORDS = ["storm", "sun", "rain", "snow", "fog"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
IDS = st.sampled_from([f"d{number}" for number in range(6)])
BRIDGE = Document("bridge", "Anna Berg opened the bridge.", {"year": 2004})
RIVER = Document("river", "A ferry crosses the river.")


def everything(retriever: BM25Retriever) -> object:
    """All that a retriever tells, in its order."""
    allowed = {"d0", "d2", "d3"}
    return (
        list(retriever.content_hashes()),
        [retriever.retrieve([*WORDS, " ".join(WORDS)], k, allowed=some) for k in (1, 9) for some in (None, allowed)],
    )


def fresh(documents: dict[str, Document], idf: str) -> BM25Retriever:
    retriever = BM25Retriever(tokenizer=PLAIN, idf=idf)  # type: ignore[arg-type]
    retriever.add(list(documents.values()))
    return retriever


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(["lucene", "okapi"]))
def test_results_are_those_of_a_retriever_in_memory(data: st.DataObject, keep_texts: bool, idf: str) -> None:
    """After every change, rollback, refresh, deletion by the bank alone, and reopening."""
    with fast_folder() as folder:
        bank = MemoryBank.create(folder / "bank", "f00d", keep_texts=keep_texts)
        retriever = BankBM25Retriever(bank, tokenizer=PLAIN, idf=idf)  # type: ignore[arg-type]
        kept: dict[str, Document] = {}
        retriever.put([])
        bank.commit()
        committed = dict(kept)
        reader = MemoryBank.open(folder / "bank")
        follower = BankBM25Retriever(reader)
        steps = ["put", "put both", "delete", "delete both", "bank", "commit", "commit", "rollback", "refresh", "open"]
        for step in data.draw(st.lists(st.sampled_from(steps), max_size=14)):
            if step in ("put", "put both"):
                names = data.draw(st.lists(IDS, unique=True, max_size=3))
                new = [Document(name, data.draw(TEXTS), {"step": [1]}) for name in names]
                if step == "put both":
                    bank.put(new, memory(len(new))) if new else None
                retriever.put(new)
                for document in new:
                    kept.pop(document.id, None)
                    kept[document.id] = document
            elif step in ("delete", "delete both") and kept:
                name = data.draw(st.sampled_from(sorted(kept)))
                retriever.delete(name)
                del kept[name]
                if step == "delete both" and name in bank:
                    bank.delete(name)
            elif step == "bank" and len(bank):
                name = data.draw(st.sampled_from(bank.document_ids))
                alone = data.draw(st.booleans())
                bank.delete(name, from_index=alone)
                if alone:
                    kept.pop(name, None)
            elif step == "commit":
                bank.commit()
                committed = dict(kept)
            elif step == "rollback":
                bank.rollback()
                kept = dict(committed)
            elif step == "refresh":
                reader.refresh()
                assert everything(follower) == everything(fresh(committed, idf))
            elif step == "open":
                bank.close()
                bank = MemoryBank.open(folder / "bank", write=True)
                retriever = BankBM25Retriever(bank)
                kept = dict(committed)
            assert everything(retriever) == everything(fresh(kept, idf))
            assert len(retriever) == len(kept)
            assert index_size(bank) == len(kept)
            assert not list(index_faults(bank))
        bank.close()
        reader.close()
