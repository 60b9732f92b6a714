"""Documents that are not allowed leave no trace in how a bank is read: it is read as one that never held them.

Not bit by bit: rows are projected and summed in batches, and a sum is rounded by its order. What the order can change
is below the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.bank.reader import BankReader
from mac_rag.config import AttentionConfig
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.model import MACModel
from tests.bank.helpers import READINGS, ROUNDING, put_entries, random_rows

QUESTIONS = ["Who opened the bridge?", "When did the museum close?"]


@pytest.mark.parametrize("reading", READINGS)
@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=10),
    use_prior=st.booleans(),
    read_before=st.booleans(),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_a_bank_is_read_as_one_that_never_held_the_others(
    loaded_tiny_model: MACModel,
    reading: str,
    counts: list[int],
    use_prior: bool,
    read_before: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    model = loaded_tiny_model
    config = AttentionConfig.model_validate(READINGS[reading])
    phi = random_rows(model, sum(counts), seed)
    documents = [Document(f"d{number}", "") for number in range(len(counts))]
    ids = st.sampled_from([document.id for document in documents])
    merged = data.draw(st.sampled_from([(), tuple(data.draw(st.sets(ids, max_size=3)))]))
    deleted, allowed = data.draw(st.sets(ids, max_size=3)), data.draw(st.sets(ids, min_size=1))
    bank, fresh = (MemoryBank(model.fingerprint) for _ in range(2))
    bank.put(documents, phi, counts)
    reader = BankReader(model, bank, config)
    if read_before:  # so that what is cached of the bank is older than its changes
        reader.aggregate(QUESTIONS)
    if merged:
        bank.merge(merged, random_rows(model, 2, seed + 50))
    for document_id in deleted:
        if document_id in bank:
            bank.delete(document_id)
    seen = [entry for entry in bank if all(member.document_id in allowed for member in entry.members)]
    put_entries(fresh, seen)
    expected = BankReader(model, fresh, config)
    model.aggregation.use_prior = use_prior
    try:
        if not seen:
            with pytest.raises(BankError, match=r"none of the documents|is empty"):
                reader.aggregate(QUESTIONS, allowed)
            return
        found, wanted = reader.aggregate(QUESTIONS, allowed), expected.aggregate(QUESTIONS)
        torch.testing.assert_close(found.phi, wanted.phi, **ROUNDING)
        torch.testing.assert_close(found.discarded, wanted.discarded, **ROUNDING)
        if config.strategy != "hierarchical":
            ids_found, mass = reader.document_mass(QUESTIONS, allowed)
            ids_wanted, mass_wanted = expected.document_mass(QUESTIONS)
            assert ids_found == ids_wanted
            torch.testing.assert_close(mass, mass_wanted, **ROUNDING)
    finally:
        model.aggregation.use_prior = True
