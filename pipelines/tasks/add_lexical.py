"""Giving a trained MAC model lexical vectors: nothing is trained, tokens are counted."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from mac_rag.config import Config
from mac_rag.errors import ConfigError
from mac_rag.lm.devices import DTYPES
from mac_rag.model import MACModel
from mac_rag.model.factory import make_words
from pipelines.corpora.qa_data import DataConfig


class AddLexicalConfig(Config):
    """A stage that adds lexical vectors to a model.

    Attributes:
        start_from: a MAC checkpoint, name or folder.
        data: in its training documents the tokens are counted.
        vectors: R, lexical vectors of each text.
        weight: weight of their product beside the cosine in the document prior.
        store_dtype: dtype of the stored weights; see `mac_rag.lm.int8_storage` for int8.
    """

    start_from: str
    data: DataConfig = DataConfig()
    vectors: int = Field(8, ge=1)
    weight: float = Field(0.1, gt=0)
    store_dtype: Literal["fp32", "bf16", "int8"] = "fp32"


def write_extended(config: AddLexicalConfig, output: Path) -> None:
    """Writes the extended model to `output/last`.

    Raises:
        ConfigError: for a model without a sentence encoder.
    """
    texts = (document.text for document in config.data.training_set().documents)
    model = index_words(MACModel.from_pretrained(config.start_from), texts, config.vectors, config.weight)
    new = output / ".last.new"
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new, dtype=torch.int8 if config.store_dtype == "int8" else DTYPES[config.store_dtype])
    new.rename(output / "last")


def index_words(model: MACModel, texts: Iterable[str], vectors: int, weight: float) -> MACModel:
    """The same networks, their index with words; those that it had are counted anew.

    Args:
        model: with an index. It must not be used any more.
        texts: in which words are counted.
        vectors, weight: see `mac_rag.config.IndexConfig`.

    Raises:
        ConfigError: for a model without an index.
        DocumentError: for a text that the model cannot take.
    """
    index = model.config.index
    if index is None:
        raise ConfigError("this model has no index that words could go with; train one with model.index")
    wanted = index.model_copy(update={"words": vectors, "words_weight": weight})
    config = model.config.model_copy(update={"index": wanted})
    words = make_words(config, model.base_lm)
    assert words is not None
    words.count(model.amortization.ids(chunk) for text in texts for chunk in model.amortization.split(text))
    for encoder in (model.amortization, model.input_encoder):
        encoder.network.words = words
    again = MACModel(config, model.base_lm, model.amortization, model.input_encoder)
    again.aggregation.load_state_dict(model.aggregation.state_dict())
    again.modulation.load_state_dict(model.modulation.state_dict())
    return again.eval()
