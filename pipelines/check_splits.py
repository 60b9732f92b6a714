"""Searches the training data of recipes for held-out data: `python -m pipelines.check_splits --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.recipe import SetOption, stages_or_itself

if TYPE_CHECKING:
    from mac_rag.data.types import QADataset
    from pipelines.corpora.qa_data import DataConfig

_SHOWN = 5  # examples to print of each kind


def main(
    recipes: Annotated[
        list[str], typer.Argument(help="Files or names of recipes, or of pipelines for all of their stages.")
    ],
    split: Annotated[str, typer.Option(help="The held-out split of the data set that the recipes train on.")] = "test",
    set_: SetOption = None,
) -> None:
    """Check that the training data of recipes contain nothing of a held-out split.

    The command compares whole paragraphs, titles and questions, normalised as in SQuAD's evaluation. It fails if any of
    them is in both.
    """
    from mac_rag.errors import DataError

    shared_count = 0
    for recipe in [name for argument in recipes for name in stages_or_itself(argument)]:
        data = data_of(recipe, set_)
        if data is None:
            say(f"{recipe}: no data set, nothing to compare")
            continue
        held_out = dataset_contents(data.load(split))
        training = data.training_set()
        known = dataset_contents(training)
        shared = {kind: sorted(known[kind] & held_out[kind]) for kind in known}
        shared_count += sum(map(len, shared.values()))
        counts = ", ".join(f"{len(texts)} of {len(held_out[kind]):,} {kind}" for kind, texts in shared.items())
        say(f"{recipe}: {training.name}, {training.split} shares with {split}: {counts}")
        for text in [text for texts in shared.values() for text in texts[:_SHOWN]]:
            say(f"  {text:.100}")
    if shared_count:
        raise DataError(
            f"{shared_count} paragraphs, titles or questions of the split {split!r} are in the training data"
        )


def data_of(recipe: str, overrides: list[str] | None) -> DataConfig | None:
    """The data set that a recipe trains on; None if it has none.

    Raises:
        ConfigError: see `load_task`.
    """
    from pipelines.corpora.qa_data import DataRecipe
    from pipelines.tasks.registry import load_task

    _, config = load_task(recipe, overrides)
    return config.data if isinstance(config, DataRecipe) else None


def dataset_contents(data: QADataset) -> dict[str, set[str]]:
    """Documents, titles and questions of a data set, normalised."""
    from mac_rag.data.metrics import normalize

    # SQuAD writes the spaces in Wikipedia's titles as underscores.
    titles = (str(document.metadata.get("title", "")).replace("_", " ") for document in data.documents)
    return {
        "documents": {normalize(document.text) for document in data.documents},
        "titles": {normalize(title) for title in titles} - {""},
        "questions": {normalize(question.question) for question in data.questions},
    }


if __name__ == "__main__":
    run_command(main)
