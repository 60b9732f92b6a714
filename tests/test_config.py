"""Fields that were renamed are read under their old names for one release, with a warning that tells the new ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mac_rag.config import Config, HashedBM25Config, MACConfig, Renaming, SentenceEncoderConfig
from mac_rag.errors import ConfigError
from mac_rag.model.stored_names import fingerprint_fields, stored_name
from tests.helpers import mac_config

ENCODER = {"design": "decoder-only", "name": None}
BASE = {
    "base_lm": {"name": "gpt2"},
    "amortization": ENCODER,
    "input_encoder": ENCODER,
    "aggregation": {"prior_width": 8},
}


class Renamed(Config):
    RENAMED: ClassVar[Mapping[str, Renaming]] = {
        "old": "new",
        "start": lambda value: {"init": {"built": "pretrained"}.get(value, value)},
    }

    new: int = 1
    init: str = "pretrained"


def test_old_names_and_old_values_are_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Renamed: old is now called new; the next release"):
        assert Renamed.parse({"old": 3}, "a file").new == 3
    with pytest.warns(FutureWarning, match="start is now called init"):
        assert Renamed.parse({"start": "built"}, "a file").init == "pretrained"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Renamed.parse({"new": 3, "init": "x"}, "a file").new == 3


def test_an_old_name_beside_its_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="old is the old name of new; give only new"):
        Renamed.parse({"old": 3, "new": 4}, "a file")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_bad_value_under_an_old_name_is_named_by_the_new_one() -> None:
    with pytest.raises(ConfigError, match="new: "):
        Renamed.parse({"old": "many"}, "a file")


def test_an_index_of_old_is_a_sentence_encoder_and_hashed_bm25() -> None:
    index = {"name": "minilm", "revision": None, "embeddings": "base-lm", "words": 8, "words_weight": 0.3}
    with pytest.warns(FutureWarning, match="index is now called sentence_encoder and hashed_bm25"):
        config = MACConfig.parse({**BASE, "index": index}, "a file")
    assert config.sentence_encoder == SentenceEncoderConfig(name="minilm", embeddings="base-lm")
    assert config.hashed_bm25 == HashedBM25Config(vectors=8, weight=0.3)
    # What the version before hashed, with pydantic, of such a configuration.
    aggregation = '{"blocks":4,"heads":8,"head_width":96,"feed_forward":4,"prior_width":8,"prior_sharpness":1.0}'
    assert fingerprint_fields(config) == (
        '{"index":{"name":"minilm","revision":null,"embeddings":"base-lm","words":8,"words_weight":0.3},'
        f'"tokens":24,"aggregation":{aggregation}}}'
    )
    with pytest.warns(FutureWarning):
        config = MACConfig.parse({**BASE, "index": {"name": "minilm", "words": 0}}, "a file")
    assert config.sentence_encoder == SentenceEncoderConfig(name="minilm")
    assert config.hashed_bm25 is None
    assert fingerprint_fields(config) == f'{{"tokens":24,"aggregation":{aggregation}}}'


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


def test_names_in_checkpoints_are_those_of_the_first_version() -> None:
    stored = {
        "amortization.network.sentence_encoder.encoder.bias": "amortization.network.index.encoder.bias",
        "amortization.network.hashed_bm25.rarity": "amortization.network.words.rarity",
        "input_encoder.network.sentence_encoder.weight": "input_encoder.network.index.weight",
        "amortization.network.mlps.inner": "amortization.network.mlps.inner",
        "aggregation.prior.key.weight": "aggregation.prior.key.weight",
    }
    assert {name: stored_name(name) for name in stored} == stored


def test_a_message_does_not_name_a_thousand_faults() -> None:
    values = mac_config(Path("lm")).model_dump(mode="json")
    values["modulation"]["targets"] = [0] * 1000
    with pytest.raises(ConfigError, match=r"targets\.0: .*\(got 0\)(.*\n)+  and 980 more") as refusal:
        MACConfig.parse(values, "config.json")
    assert len(str(refusal.value).splitlines()) == 22
