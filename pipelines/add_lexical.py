"""Gives a MAC model hashed BM25: `python -m pipelines.add_lexical --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.recipe import ConfigOption, SetOption, load_recipe


def main(
    config: ConfigOption,
    model: Annotated[str, typer.Option(help="A MAC model with a document prior: a name or a folder.")],
    output: Annotated[Path, typer.Option(help="Folder for the new model, new or empty.")],
    words: Annotated[int, typer.Option(min=1, help="R, the number of lexical vectors of each text.")] = 8,
    weight: Annotated[
        float,
        typer.Option(min=1e-6, help="Weight of their product, which the document prior adds to the cosine."),
    ] = 0.1,
    store: Annotated[Literal["fp32", "bf16", "int8"], typer.Option(help="Data type of the stored weights.")] = "fp32",
    set_: SetOption = None,
) -> None:
    """Add hashed BM25 to a model, so that its document prior compares words as well.

    The command counts how rare each token is in the training set of a recipe of pipelines.train, and reads nothing else
    of the recipe. Nothing is trained, and all weights stay as they are.
    """
    from mac_rag.errors import ConfigError
    from mac_rag.lm.devices import STORED_DTYPES
    from mac_rag.model import MACModel
    from pipelines.tasks.add_lexical import add_hashed_bm25
    from pipelines.tasks.train_config import TrainConfig

    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; choose another --output")
    data = load_recipe(TrainConfig, config, set_).data.training_set()
    extended = add_hashed_bm25(MACModel.from_pretrained(model), (d.text for d in data.documents), words, weight)
    extended.save_pretrained(output, dtype=STORED_DTYPES[store])
    say(f"{output}: counted in {len(data.documents):,} documents of {data.name}, {data.split}")


if __name__ == "__main__":
    run_command(main)
