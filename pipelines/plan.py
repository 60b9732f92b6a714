"""The memory that a training and its model will take, before any weights are loaded: `python -m pipelines.plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from pipelines.recipe import SetOption


def main(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, such as smollm2-360m; a recipe or a stage, such as mac-tiny/train-joint; or a MAC model, "
            "such as mac-small or a folder.",
            show_default="the names of the presets",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Memory of a GPU in GiB, or its name, such as rtx-4090 or a100-80gb. The plan then says what fits, "
            "and what would help.",
            show_default="none",
        ),
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents in the bank, each of one chunk.")] = 10_000,
    questions: Annotated[int, typer.Option(min=1, help="Questions that are answered at once.")] = 1,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of documents, question and answer in front of the LM.")
    ] = 2048,
    document_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a document in training.", show_default="as many as the model reads"),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print the table of all presets in docs/guides/presets.md, and no plan.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, with bytes.")] = False,
    set_: SetOption = None,
) -> None:
    """Print the size of a model and the memory of its training and of answering, part by part.

    Weights, gradients and the optimiser are counted; what a training step keeps for its backward pass is an estimate
    (see docs/guides/presets.md). No weights are loaded.
    """
    import json

    from mac_rag.errors import ConfigError
    from mac_rag.model.presets import PRESETS
    from pipelines.planning.advice import advice
    from pipelines.planning.answering import Asking
    from pipelines.planning.memory import gpu_bytes
    from pipelines.planning.report import make_plan, preset_table, text_lines
    from pipelines.planning.subject import subject

    if table:
        for line in preset_table():
            say(line)
        return
    if name is None:
        raise ConfigError(f"give a recipe, a MAC model or a preset; the presets are {', '.join(PRESETS)}")
    size = None if gpu is None else gpu_bytes(gpu)
    of = subject(name, set_ or ())
    plan = make_plan(of, Asking(documents, questions, context), document_tokens)
    crowded = size is not None and not plan.training.fits(size)
    help_ = advice(of, size or 0, document_tokens) if crowded else []
    if json_:
        say(json.dumps(plan.as_json(size, help_), indent=1), lines=True)
        return
    for line in text_lines(plan, size, help_):
        say(line)


if __name__ == "__main__":
    run_command(main)
