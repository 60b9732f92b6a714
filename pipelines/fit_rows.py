"""Fits a MAC model's codebooks for banks with rows `pq`: `python -m pipelines.fit_rows --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.recipe import ConfigOption, SetOption, load_recipe


def main(
    config: ConfigOption,
    model: Annotated[Path, typer.Option(help="Folder of a MAC model, into which the codebooks go.", file_okay=False)],
    documents: Annotated[int, typer.Option(min=1, help="At most so many training documents, drawn at random.")] = 2000,
    code_bytes: Annotated[int, typer.Option(min=1, help="M, bytes of a memory token; a divisor of its width.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    set_: SetOption = None,
) -> None:
    """Fit the codebooks with which banks keep memory tokens in a tenth of the bytes (`mac-rag adapt --rows pq`).

    They are learned from the memory tokens of documents of the training set of a recipe of pipelines.train, and nothing
    else of the recipe is read. They go into the model's folder. Its weights stay as they are, and a bank that has
    codebooks keeps them.
    """
    from mac_rag.errors import ConfigError
    from mac_rag.model import MACModel
    from mac_rag.model.checkpoint import CONFIG, write_quantizer
    from pipelines.tasks.fit_rows import drawn, fit_quantizer
    from pipelines.tasks.train_config import TrainConfig

    if not (model / CONFIG).is_file():
        raise ConfigError(f"{model} is no folder of a MAC model; save one there first (MACModel.save_pretrained)")
    loaded = MACModel.from_pretrained(model)
    dataset = load_recipe(TrainConfig, config, set_).data.training_set()
    texts = drawn([document.text for document in dataset.documents], documents, seed)
    quantizer = fit_quantizer(loaded, texts, code_bytes, seed=seed)
    write_quantizer(quantizer, model)
    source = f"{len(texts):,} documents of {dataset.name}, {dataset.split}"
    say(f"{model}: {quantizer.code_bytes} bytes for each memory token, fitted to {source}")


if __name__ == "__main__":
    run_command(main)
