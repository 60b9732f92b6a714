"""Adds lexical vectors to a trained MAC model: nothing is trained, tokens are counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from mac_rag.atomic_files import write_folder
from mac_rag.config import Config, HashedBM25Config, MACConfig
from mac_rag.errors import ConfigError
from mac_rag.lm.devices import STORED_DTYPES
from mac_rag.model import AmortizedModel
from mac_rag.model.factory import make_hashed_bm25
from pipelines.corpora.qa_data import DataConfig

_VECTORS = 8  # R, lexical vectors of each text: those of both shipped models


class AddLexicalConfig(Config):
    """A stage that adds lexical vectors to a MAC checkpoint, whose counts come from the training documents.

    Attributes:
        weight: weight of the lexical vectors' product beside the cosine in the document prior.
        store_dtype: dtype of the stored weights; see `mac_rag.lm.loading.to_int8`.
    """

    start_from: str
    data: DataConfig = DataConfig()
    weight: float = Field(0.1, gt=0)
    store_dtype: Literal["fp32", "bf16", "int8"] = "fp32"


def write_extended(config: AddLexicalConfig, output: Path) -> None:
    """Writes the extended model to `output/last`.

    Raises:
        ConfigError: for a model without a document prior.
    """
    texts = (document.text for document in config.data.training_set().documents)
    model = add_hashed_bm25(AmortizedModel.from_pretrained(config.start_from), texts, _VECTORS, config.weight)
    with write_folder(output / "last") as new:
        model.save_pretrained(new, dtype=STORED_DTYPES[config.store_dtype])


def add_hashed_bm25(model: AmortizedModel, texts: Iterable[str], vectors: int, weight: float) -> AmortizedModel:
    """The same networks with hashed BM25, whose counts come from a corpus; a model's former counts are replaced.

    Args:
        model: a model with a document prior. Its parts go over to the new model; do not use it any more.
        texts: the corpus.
        vectors, weight: see `mac_rag.config.HashedBM25Config`.

    Raises:
        ConfigError: for a model without a document prior.
        DocumentError: for a text that the model cannot take.
    """
    if model.aggregation.prior is None:
        raise ConfigError("this model has no document prior, which hashed BM25 serves; train one with prior_width")
    lexical = HashedBM25Config(vectors=vectors, weight=weight)
    config = model.config.model_copy(update={"hashed_bm25": lexical})
    hashed_bm25 = make_hashed_bm25(config, model.base_lm)
    assert hashed_bm25 is not None
    hashed_bm25.count(row for text in texts for row in model.amortization.plan(text))
    for encoder in (model.amortization, model.input_encoder):
        encoder.network.hashed_bm25 = hashed_bm25
    return rebuilt(model, config).eval()


def rebuilt(model: AmortizedModel, config: MACConfig) -> AmortizedModel:
    """The same encoders, LM and weights with another configuration, which adds to the model's own.

    Additions to the aggregation network are untrained. The parts of the model go over to the new one; do not use it any
    more.
    """
    again = AmortizedModel(config, model.base_lm, model.amortization, model.input_encoder)
    again.aggregation.load_state_dict(model.aggregation.state_dict(), strict=False)
    again.modulation.load_state_dict(model.modulation.state_dict())
    again.base_lm_trained = model.base_lm_trained
    return again.train(model.training)
