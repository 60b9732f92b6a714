"""Gives a MAC model hashed BM25: `python -m pipelines.add_lexical --help`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, SetOption, load_recipe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mac_rag.model import MACModel


def main(
    config: ConfigOption,
    model: Annotated[str, typer.Option(help="A MAC model with a sentence encoder: a name or a folder.")],
    output: Annotated[Path, typer.Option(help="Folder for the new model, new or empty.")],
    words: Annotated[int, typer.Option(min=1, help="R, lexical vectors of each text.")] = 8,
    weight: Annotated[
        float, typer.Option(min=1e-6, help="Weight of their product beside the cosine in the document prior.")
    ] = 0.1,
    store: Annotated[Literal["fp32", "bf16", "int8"], typer.Option(help="How the weights are stored.")] = "fp32",
    set_: SetOption = None,
) -> None:
    """Let the document prior compare words, too: count in the training set of a recipe how rare each token is.

    Nothing is trained, and all weights stay as they are. The recipe is one of pipelines.train; only its data are read.
    """
    import torch

    from mac_rag.errors import ConfigError
    from mac_rag.lm.devices import DTYPES
    from mac_rag.model import MACModel
    from pipelines.tasks.train import TrainConfig

    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; choose another --output")
    data = load_recipe(TrainConfig, config, set_).data.training_set()
    extended = add_hashed_bm25(MACModel.from_pretrained(model), (d.text for d in data.documents), words, weight)
    extended.save_pretrained(output, dtype=torch.int8 if store == "int8" else DTYPES[store])
    typer.echo(f"{output}: counted in {len(data.documents):,} documents of {data.name}, {data.split}")


def add_hashed_bm25(model: MACModel, texts: Iterable[str], vectors: int, weight: float) -> MACModel:
    """The same networks with hashed BM25, whose counts come from a corpus; a model's former counts are replaced.

    Args:
        model: a model with a sentence encoder. Its parts go over to the new model; do not use it any more.
        texts: the corpus.
        vectors, weight: see `mac_rag.config.HashedBM25Config`.

    Raises:
        ConfigError: for a model without a sentence encoder.
        DocumentError: for a text that the model cannot take.
    """
    from mac_rag.config import HashedBM25Config
    from mac_rag.errors import ConfigError
    from mac_rag.model import MACModel
    from mac_rag.model.factory import make_hashed_bm25

    if model.config.sentence_encoder is None:
        raise ConfigError(
            "this model has no sentence encoder, beside which hashed BM25 is added; train one with "
            "model.sentence_encoder"
        )
    lexical = HashedBM25Config(vectors=vectors, weight=weight)
    config = model.config.model_copy(update={"hashed_bm25": lexical})
    hashed_bm25 = make_hashed_bm25(config, model.base_lm)
    assert hashed_bm25 is not None
    hashed_bm25.count(model.amortization.ids(chunk) for text in texts for chunk in model.amortization.split(text))
    for encoder in (model.amortization, model.input_encoder):
        encoder.network.hashed_bm25 = hashed_bm25
    again = MACModel(config, model.base_lm, model.amortization, model.input_encoder)
    again.aggregation.load_state_dict(model.aggregation.state_dict())
    again.modulation.load_state_dict(model.modulation.state_dict())
    return again.eval()


if __name__ == "__main__":
    run_command(main)
