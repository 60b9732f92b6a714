"""Fits a MAC model's codebooks for banks with rows `pq`: `python -m pipelines.fit_rows --help`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.recipe import ConfigOption, SetOption, load_recipe

if TYPE_CHECKING:
    from mac_rag.model import AmortizedModel
    from mac_rag.nn.product_quantizer import ProductQuantizer


def main(
    config: ConfigOption,
    model: Annotated[Path, typer.Option(help="Folder of a MAC model, into which the codebooks go.", file_okay=False)],
    documents: Annotated[int, typer.Option(min=1, help="At most so many training documents, drawn at random.")] = 2000,
    code_bytes: Annotated[int, typer.Option(min=1, help="M, bytes of a memory token; a divisor of its width.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    set_: SetOption = None,
) -> None:
    """Fit the codebooks with which banks keep memory tokens in a tenth of the bytes (`mac-rag adapt --rows pq`).

    They are learned from the memory tokens of training documents of a recipe of pipelines.train, of which nothing else
    is read, and go into the model's folder. The model's weights stay as they are, and a bank that has codebooks keeps
    them.
    """
    import random

    from mac_rag.errors import ConfigError
    from mac_rag.model import AmortizedModel
    from mac_rag.model.checkpoint import CONFIG, write_quantizer
    from pipelines.tasks.train_config import TrainConfig

    if not (model / CONFIG).is_file():
        raise ConfigError(f"{model} is no folder of a MAC model; save one there first (AmortizedModel.save_pretrained)")
    loaded = AmortizedModel.from_pretrained(model)
    dataset = load_recipe(TrainConfig, config, set_).data.training_set()
    texts = [document.text for document in dataset.documents]
    texts = random.Random(seed).sample(texts, min(documents, len(texts)))
    quantizer = fit_quantizer(loaded, texts, code_bytes, seed=seed)
    write_quantizer(quantizer, model)
    source = f"{len(texts):,} documents of {dataset.name}, {dataset.split}"
    say(f"{model}: {quantizer.code_bytes} bytes for each memory token, fitted to {source}")


def fit_quantizer(model: AmortizedModel, texts: Sequence[str], code_bytes: int, *, seed: int = 0) -> ProductQuantizer:
    """Fits codebooks to a model's memory tokens of representative documents.

    A model with a sentence encoder keeps the first token of a row as it is: the document prior compares it.

    Raises:
        ConfigError: for too few texts, or if the bytes of a token (`code_bytes`, M) do not divide its width.
        DocumentError: for a text that the model cannot take.
    """
    from mac_rag.errors import ConfigError
    from mac_rag.nn.product_quantizer import CODEWORDS, ProductQuantizer

    rows = [row for text in texts for row in model.amortization.plan(text)]
    whole = int(model.config.sentence_encoder is not None)
    tokens = model.config.tokens - whole
    if tokens < 1 or len(rows) * tokens < CODEWORDS:
        raise ConfigError(
            f"{len(rows)} rows of {max(0, tokens)} tokens are too few to learn {CODEWORDS} codewords from; take more "
            "documents"
        )
    if model.base_lm.width % code_bytes:
        raise ConfigError(
            f"{code_bytes} bytes cannot share the {model.base_lm.width} numbers of a memory token evenly; take a "
            "divisor"
        )
    phi = model.amortize_rows(rows)[:, : model.config.tokens].cpu()
    return ProductQuantizer.fit(phi, code_bytes, fingerprint=model.fingerprint, whole=whole, seed=seed)


if __name__ == "__main__":
    run_command(main)
