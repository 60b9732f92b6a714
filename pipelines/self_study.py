"""Writes questions and answers about a user's documents: `python -m pipelines.self_study --help`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say, show_table


def main(
    documents: Annotated[
        list[Path],
        typer.Option(
            help="Text or Markdown, one document each; .jsonl; .csv; .parquet; a folder of such files; or "
            "hub:OWNER/NAME for a data set of the Hub. May be given several times."
        ),
    ],
    lm: Annotated[
        str,
        typer.Option(
            help="The LM that writes: smollm2-135m, a folder or a name on the Hub; or module:attr, a LlamaIndex LLM or "
            "a function that makes one."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for documents.jsonl, questions.jsonl, dropped.jsonl and study.json. An interrupted run in it "
            "is resumed."
        ),
    ],
    per_passage: Annotated[
        int,
        typer.Option(min=1, help="Questions to write about each passage of some 400 tokens; fewer pass the checks."),
    ] = 6,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most documents, the first ones.", show_default="all")
    ] = None,
    own_answers: Annotated[
        bool,
        typer.Option(
            "--own-answers",
            help="Keep all well-formed questions, with what the LM itself answers after the passage: for training with "
            "the LM as its own teacher.",
        ),
    ] = False,
    tune: Annotated[
        Path | None,
        typer.Option(
            help="Then tune the LM to read these documents through its own keys and values, into this folder, by the "
            "recipe my-lm-reading of pipelines.train: its best/ is the adapter of `mac-rag init`.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Let an LM write questions and answers about your documents, to train and evaluate on.

    The answers are chosen from the documents (names, dates, numbers, phrases) or written by the LM (definitions,
    reasons, overviews). A pair is dropped if its answer does not follow from the document, if the LM does not give this
    answer to its own question, or if it fails another check. The folder is data of your own: `--data OUTPUT` of
    eval.qa, and `--set data.name=own --set data.path=OUTPUT` of pipelines.train.
    """
    from mac_rag.errors import ConfigError, DataError
    from pipelines.tasks.self_study import study

    if tune is not None and ":" in lm:
        raise ConfigError(
            f"--tune trains an LM of transformers, and --lm is {lm!r}; leave --tune out, or name such an LM"
        )
    report = study(documents, lm, output, per_passage=per_passage, limit=limit, own_answers=own_answers)
    for table in report.tables():
        show_table(table)
    if not report.total.kept:
        raise DataError(f"no question passed the checks (see {output / 'dropped.jsonl'}); take a larger LM")
    say(
        f"{report.total.kept:,} questions about {report.documents:,} documents in {output}; the answers of "
        f"{report.kept_standing:,} stand in their documents word for word"
    )
    if tune is not None:
        from pipelines.tasks.registry import load_task, run_task

        overrides = [f"base_lm.name={json.dumps(lm)}", f"data.path={json.dumps(str(output))}"]
        run_task(*load_task("my-lm-reading", overrides), tune)
        say(f"next: mac-rag init FOLDER --lm {lm} --adapter {tune / 'best'} --documents ...")


if __name__ == "__main__":
    run_command(main)
