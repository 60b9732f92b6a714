"""Looks for held-out data in the training data of recipes: `python -m pipelines.check_splits --help`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.recipe import SetOption, read_recipe, stages_or_itself

if TYPE_CHECKING:
    from mac_rag.data.types import QADataset
    from pipelines.corpora.qa_data import DataConfig

Contents = dict[str, set[str]]  # documents, titles and questions, normalised

_SHOWN = 5  # examples to print of each kind


def main(
    recipes: Annotated[
        list[str],
        typer.Argument(help="Files or names of recipes, or of pipelines for all of their stages."),
    ],
    split: Annotated[str, typer.Option(help="The held-out split of the data set that the recipes train on.")] = "test",
    set_: SetOption = None,
) -> None:
    """Check that the training data of recipes contain nothing of a held-out split.

    It compares whole paragraphs, titles and questions of the data set, and paragraphs and titles of text files, all
    normalised as in SQuAD's evaluation. The command fails if any of them is in both.
    """
    from mac_rag.errors import DataError

    shared_count = 0
    for recipe in [name for argument in recipes for name in stages_or_itself(argument)]:
        data, files = sources(recipe, set_)
        if data is None:
            say(f"{recipe}: no data set, nothing to compare")
            continue
        held_out = dataset_contents(data.load(split))
        training = data.training_set()
        training_contents = {f"{training.name}, {training.split}": dataset_contents(training)}
        if files is not None:
            training_contents[files] = text_contents(files)
        for source, known in training_contents.items():
            shared = {kind: sorted(known[kind] & held_out[kind]) for kind in known}
            shared_count += sum(map(len, shared.values()))
            counts = ", ".join(f"{len(texts)} of {len(held_out[kind]):,} {kind}" for kind, texts in shared.items())
            say(f"{recipe}: {source} shares with {split}: {counts}")
            for text in [text for texts in shared.values() for text in texts[:_SHOWN]]:
                say(f"  {text:.100}")
    if shared_count:
        raise DataError(
            f"{shared_count} paragraphs, titles or questions of the split {split!r} are in the training data"
        )


def sources(recipe: str, overrides: list[str] | None) -> tuple[DataConfig | None, str | None]:
    """The data set that a recipe trains on, and the glob of its text files; None for what it does not have.

    Raises:
        ConfigError: see `load_recipe`.
    """
    from pipelines.tasks.pretrain import PretrainConfig
    from pipelines.tasks.registry import TASK_KINDS

    values, where, task = read_recipe(recipe, overrides)
    if task is None:
        trains_mac = values.keys() & {"model", "preset", "start_from"}
        task = "pretrain" if "corpus" in values else "train" if trains_mac else "tune_qa"
    config: Any = TASK_KINDS[task].config.parse(values, where)
    if isinstance(config, PretrainConfig):
        return config.corpus.questions, config.corpus.files
    return config.data, None


def dataset_contents(data: QADataset) -> Contents:
    """Documents, titles and questions of a data set."""
    from mac_rag.data.metrics import normalize

    titles = (str(document.metadata.get("title", "")) for document in data.documents)
    return {
        "documents": {normalize(document.text) for document in data.documents},
        "titles": _titles(titles),
        "questions": {normalize(question.question) for question in data.questions},
    }


def text_contents(pattern: str) -> Contents:
    """Paragraphs and titles of text files."""
    from mac_rag.data.metrics import normalize
    from mac_rag.progress import progress_bar
    from pipelines.corpora.text import file_rows, text_files

    paragraphs: set[str] = set()
    titles: set[str] = set()
    files = text_files(pattern)
    with progress_bar("texts", len(files)) as bar:
        for file in files:
            for row in file_rows(file):
                paragraphs.update(normalize(line) for line in row["text"].split("\n"))
                titles |= _titles([str(row.get("title", ""))])
            bar.advance()
    return {"documents": paragraphs, "titles": titles}


def _titles(titles: Iterable[str]) -> set[str]:
    from mac_rag.data.metrics import normalize

    # SQuAD writes the spaces in Wikipedia's titles as underscores.
    return {normalize(title.replace("_", " ")) for title in titles} - {""}


if __name__ == "__main__":
    run_command(main)
