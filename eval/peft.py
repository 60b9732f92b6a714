"""Kinds of modulation, how phi* changes the LM: P-tuning v2, LoRA and FiLM (table 4): `python -m eval.peft --help`."""

from __future__ import annotations

import typer

from eval.harness.command import BatchOption, OutputOption, ScaleOption, SeedOption
from eval.harness.scales import SCALES
from eval.harness.streams import (
    DataOption,
    DocumentsOption,
    QuestionsOption,
    StepsOption,
    TrainedModel,
    TrainingRateOption,
)
from mac_rag.cli.run import run_command

KINDS = {"P-tuning v2": "prefix", "LoRA": "lora", "FiLM": "film"}
NOTE = (
    "Each kind's map from phi* starts anew; all else starts from {model}, whose networks were trained with P-tuning v2."
)


def main(
    context: typer.Context,
    model: TrainedModel = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    steps: StepsOption = None,
    learning_rate: TrainingRateOption = None,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    output: OutputOption = None,
) -> None:
    """Train MAC with each kind of modulation on the same budget, and compare their answers from memory alone.

    Trained models stay beside the result, in variants/, and are not trained twice.
    """
    from eval.harness.results import result_path

    path = result_path(output, "peft")
    setup = SCALES[scale]["peft"].override(model=model, documents=documents, questions=questions)
    from eval.harness.variants import Training, Variant, run_variants

    training = Training(setup.model, data, path.parent / "variants", seed, steps, scale, learning_rate)
    variants = [
        Variant(name, training.recipe("modulation", {"model": {"modulation": {"kind": kind}}}))
        for name, kind in KINDS.items()
    ]
    run_variants(
        "peft",
        variants,
        training,
        setup,
        path,
        batch_size=batch_size,
        options=setup.options(context.params),
        notes=[NOTE.format(model=setup.model)] if scale == "tiny" else [],
    )


if __name__ == "__main__":
    run_command(main)
