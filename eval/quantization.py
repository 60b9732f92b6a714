"""Training in 4 bit, 16 bit and 32 bit (table 8): `python -m eval.quantization --help`."""

from __future__ import annotations

from typing import Any

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

WHOLE = {"quantization": "none", "dtype": "fp32"}
FROZEN = {"quantization": "none", "dtype": "bf16"}
NF4 = {"quantization": "nf4", "dtype": "bf16"}
# Pretrained networks are quantised; networks that are trained from scratch never are.
PRECISIONS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "32bit": {"trainer": {"precision": "fp32"}},
        "16bit": {"trainer": {"precision": "bf16"}},
        "4bit": {"trainer": {"precision": "bf16"}, "model": {"base_lm": NF4}},
    },
    "paper": {
        "16bit": {"model": {"base_lm": FROZEN, "amortization": WHOLE, "input_encoder": WHOLE}},
        "4bit": {"model": {"base_lm": NF4, "amortization": NF4, "input_encoder": NF4}},
    },
}


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
    """Train MAC around a base LM in each precision on the same budget, and compare answers from memory alone.

    16 bit is mixed precision (bfloat16), 4 bit is NF4 by bitsandbytes. Training in 4 bit needs a CUDA GPU; elsewhere
    the result lists it as not run. Trained models stay beside the result, in variants/, and are not trained twice.
    """
    from eval.harness.results import result_path

    path = result_path(output, "quantization")
    setup = SCALES[scale]["quantization"].override(model=model, documents=documents, questions=questions)
    from eval.harness.variants import Training, Variant, run_variants
    from mac_rag.errors import QuantizationError
    from mac_rag.lm.devices import default_device
    from mac_rag.lm.loading import require_gradients

    training = Training(setup.model, data, path.parent / "variants", seed, steps, scale, learning_rate)
    precisions, not_run = dict(PRECISIONS[scale]), {}
    try:
        require_gradients("nf4", default_device(None))
    except QuantizationError as error:
        not_run["4bit"] = str(error)
        del precisions["4bit"]
    variants = [Variant(name, training.recipe("modulation", changes)) for name, changes in precisions.items()]
    run_variants(
        "quantization",
        variants,
        training,
        setup,
        path,
        batch_size=batch_size,
        options=setup.options(context.params),
        not_run=not_run,
    )


if __name__ == "__main__":
    run_command(main)
