"""For tests of LMs: a small prefix LM; and what a cell of the conformance matrix found goes into the run's report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from mac_rag.errors import MACError
from mac_rag.lm.prefix_lm import PrefixLM, PrefixLMConfig
from tests.helpers import VOCABULARY, save_tokenizer

InTable: TypeAlias = Callable[..., None]


@pytest.fixture
def in_table(record_property: Callable[[str, object], None]) -> InTable:
    """Names the cell of the table that a test fills; see `tests.lm.matrix_table`."""

    def record(name: str, kind: str, dtype: str, refusal: MACError | None = None) -> None:
        for key, value in (("lm", name), ("kind", kind), ("dtype", dtype)):
            record_property(key, value)
        if refusal is not None:
            record_property("refusal", f"refused: {str(refusal).removeprefix(name).partition(';')[0].strip()}")

    return record


@pytest.fixture(scope="session")
def prefix_lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prefix LM with random weights, whose tokenizer puts <s> in front of a text."""
    torch.manual_seed(7)
    config = PrefixLMConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, is_decoder=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("prefix") / "lm"
    PrefixLM(config).save_pretrained(place)
    save_tokenizer(place, "<s> $A")
    return place
