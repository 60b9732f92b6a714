"""Writes generated news in the ArchivalQA schema: `python -m pipelines.make_newswire --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from mac_rag.data.newswire.generate import STREAM_LENGTH

Size = Annotated[int, typer.Option(min=1, help="Documents of that split.")]


def main(
    output: Annotated[Path, typer.Option(help="Folder for train.csv, val.csv, test.csv, qa_lt.csv and qa_lt_val.csv.")],
    train: Size = 20_000,
    val: Size = 1_000,
    test: Size = STREAM_LENGTH,
    qa_lt: Size = 20_000,
    qa_lt_val: Size = 1_000,
    questions_per_document: Annotated[int, typer.Option(min=1, max=4, help="Questions about each document.")] = 1,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal files.")] = 0,
) -> None:
    """Write newswire, the generated news with questions, as CSV files in the ArchivalQA schema.

    Every command that reads ArchivalQA reads them, such as `python -m eval.archivalqa --data DIR`. qa_lt and qa_lt_val
    are for tuning base LMs. They tell other stories than train and val, with names from the same two pools.
    """
    from mac_rag.data.archivalqa import write_archivalqa
    from mac_rag.data.newswire.generate import generate

    # Streams of other seeds are unrelated to each other.
    plan = {
        "train": ("train", train, seed),
        "val": ("val", val, seed),
        "test": ("test", test, seed),
        "qa_lt": ("train", qa_lt, seed + 1),
        "qa_lt_val": ("val", qa_lt_val, seed + 1),
    }
    for name, (split, documents, split_seed) in plan.items():
        dataset = generate(split, documents, seed=split_seed, questions_per_document=questions_per_document)
        write_archivalqa(dataset, output / f"{name}.csv")
        say(f"{output / name}.csv: {len(dataset.documents):,} documents, {len(dataset.questions):,} questions")


if __name__ == "__main__":
    run_command(main)
