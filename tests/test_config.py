"""Configurations refuse what contradicts itself, in messages that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mac_rag.config import MACConfig
from mac_rag.errors import ConfigError
from tests.helpers import mac_config

ENCODER = {"design": "decoder-only", "name": None}
BASE = {
    "base_lm": {"name": "gpt2"},
    "amortization": ENCODER,
    "input_encoder": ENCODER,
    "aggregation": {"prior_width": 8},
}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"sentence_encoder": {"name": "minilm"}}, "the sentence encoder 'minilm' serves the document prior"),
        ({"hashed_bm25": {"vectors": 4}}, "hashed_bm25 serves the document prior"),
    ],
)
def test_what_finds_documents_needs_a_document_prior(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MACConfig.parse({**BASE, **part, "aggregation": {}}, "a file")


def test_a_message_does_not_name_a_thousand_faults() -> None:
    values = mac_config(Path("lm")).model_dump(mode="json")
    values["languages"] = ["en", *[0] * 1000]
    with pytest.raises(ConfigError, match=r"languages\.1: .*\(got 0\)(.*\n)+  and 980 more") as refusal:
        MACConfig.parse(values, "config.json")
    assert len(str(refusal.value).splitlines()) == 22
