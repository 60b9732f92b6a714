"""Gives the index of a MAC model hashed words: `python -m pipelines.add_lexical --help`."""

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
    model: Annotated[str, typer.Option(help="A MAC model that has an index, name or folder.")],
    output: Annotated[Path, typer.Option(help="Folder for the model with words, new or empty.")],
    words: Annotated[int, typer.Option(min=1, help="R, vectors that the words of a text are hashed to.")] = 8,
    weight: Annotated[float, typer.Option(min=1e-6, help="Of words in the document prior, beside a cosine.")] = 0.1,
    store: Annotated[Literal["fp32", "bf16", "int8"], typer.Option(help="How the weights are stored.")] = "fp32",
    set_: SetOption = None,
) -> None:
    """Let the document prior compare words, too: count how rare they are in the training set of a recipe.

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
    with_words = index_words(MACModel.from_pretrained(model), (d.text for d in data.documents), words, weight)
    with_words.save_pretrained(output, dtype=torch.int8 if store == "int8" else DTYPES[store])
    typer.echo(f"{output}: counted in {len(data.documents):,} documents of {data.name}, {data.split}")


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
    from mac_rag.errors import ConfigError
    from mac_rag.model import MACModel
    from mac_rag.model.factory import make_words

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


if __name__ == "__main__":
    run_command(main)
