"""Training memory saved by back-propagation dropout (figure 4, table 3): `python -m eval.dropout_memory --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import BatchOption, OutputOption, ScaleOption, SeedOption, whole_numbers
from eval.harness.scales import SCALES
from eval.harness.streams import (
    DataOption,
    DocumentsOption,
    QuestionsOption,
    StepsOption,
    TrainedModel,
    TrainingRateOption,
    open_stream,
)
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from eval.harness.results import Row
    from mac_rag.data.types import QADataset
    from mac_rag.model import AmortizedModel
    from pipelines.objective import Batch

SHARES = (0.0, 0.25, 0.5, 0.75)
MINIMUM = "min"  # the paper's name of the ratio at which only one document has gradients

# Table 3 compares rows with equally many documents under gradients, which need about the same memory.
TABLE: dict[str, dict[str, tuple[int, int, float]]] = {  # name -> K, accumulated passes, dropout ratio p
    "tiny": {
        "No backprop.": (4, 1, 0.0),
        "MAC, p = 0.75": (16, 1, 0.75),
        "MAC, p = 0.5": (16, 1, 0.5),
        "MAC, p = 0": (16, 1, 0.0),
    },
    "paper": {"No backprop.": (1, 32, 0.0), "MAC": (4, 8, 0.75)},
}


def main(
    context: typer.Context,
    model: TrainedModel = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    counts: Annotated[
        str, typer.Option("--k", help="Documents K of a training batch, separated by commas.")
    ] = "1,2,4,8,16,32",
    trainings: Annotated[bool, typer.Option(help="Also train, for the table of answers by p.")] = True,
    steps: StepsOption = None,
    learning_rate: TrainingRateOption = None,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    output: OutputOption = None,
) -> None:
    """Measure the memory of a training step by K and the dropout ratio p, and what p does to answers.

    `peak_mb` is the peak memory of the forward and backward pass of one step, beyond the weights and their gradients.
    On a GPU torch.cuda reports it; on a CPU it comes from the allocations that torch's profiler records.

    Trained models stay beside the result, in variants/, and are not trained twice.
    """
    from eval.harness.results import result_path

    path = result_path(output, "dropout_memory")
    sizes = whole_numbers("--k", counts)
    setup = SCALES[scale]["dropout_memory"].override(model=model, documents=documents, questions=questions)
    from eval.harness.variants import Training, Variant, run_variants

    training = Training(setup.model, data, path.parent / "variants", seed, steps, scale, learning_rate)
    table = TABLE[scale] if trainings else {}
    longest = max([*sizes, *(count for count, _, _ in table.values())])
    stream = open_stream(data, "train", longest, seed=seed, scale=scale)[0]
    loaded = _to_train(setup.model)
    rows = memory_rows(loaded, stream, sizes, seed)
    variants = []
    for name, (count, passes, share) in table.items():
        trainer = {"batch_size": count, "accumulate": passes}
        changes: dict[str, Any] = {"backprop_dropout": share, "context_set": None, "trainer": trainer}
        peak = step_memory(loaded, first_batch(loaded, stream, count), share, seed)
        recipe = training.recipe("amortization", changes)
        variants.append(Variant(name, recipe, {"K": count, "p": share}, {"memory_gb": peak / 1e9}))
    run_variants(
        "dropout_memory",
        variants,
        training,
        setup,
        path,
        batch_size=batch_size,
        options=setup.options(context.params),
        further=rows,
        not_run={} if trainings else {"the table of answers by p": "--no-trainings was given"},
    )


def memory_rows(model: AmortizedModel, stream: QADataset, counts: list[int], seed: int) -> list[Row]:
    """A row with the peak memory for each K and each dropout ratio p.

    Raises:
        ConfigError: if the stream has too few documents with questions.
    """
    from eval.harness.results import Row

    rows = []
    for count in counts:
        batch = first_batch(model, stream, count)
        for share in (*SHARES, MINIMUM):
            ratio = 1 - 1 / count if isinstance(share, str) else share
            measures = {"peak_mb": step_memory(model, batch, ratio, seed) / 1e6}
            rows.append(Row(name=f"K = {count}, p = {share}", settings={"K": count, "p": share}, measures=measures))
    return rows


def first_batch(model: AmortizedModel, stream: QADataset, count: int) -> Batch:
    """A batch of a stream's first documents, cut to the model's limit, with one question on each."""
    from mac_rag.errors import ConfigError
    from pipelines.objective import Batch

    first_question = {question.document_id: question for question in reversed(stream.questions)}
    documents = [document for document in stream.documents if document.id in first_question][:count]
    if len(documents) < count:
        raise ConfigError(f"K is {count}, but the stream has only {len(documents)} documents with questions")
    questions = [first_question[document.id] for document in documents]
    return Batch(
        documents=[model.amortization.split(document.text)[0] for document in documents],
        questions=[question.question for question in questions],
        answers=[question.answers[0] for question in questions],
        gold=range(count),
    )


def step_memory(model: AmortizedModel, batch: Batch, dropout: float, seed: int) -> int:
    """Peak bytes of one training step (equation 2) with back-propagation dropout, beyond weights and gradients.

    The gradients are allocated before the step, as in every step but the first. Afterwards the model is in evaluation
    mode, without gradients.
    """
    import torch

    from eval.harness.allocations import allocated_peak
    from pipelines.objective import LossWeights, mac_loss

    def step() -> None:
        torch.manual_seed(seed)
        mac_loss(model, batch, LossWeights(), backprop_dropout=dropout)[0]["loss"].backward()

    model.train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    peak = allocated_peak(step, model.device)[1]
    model.zero_grad(set_to_none=True)
    model.eval()
    return peak


def _to_train(name: str) -> AmortizedModel:
    """Builds a preset from its pretrained parts, or loads a checkpoint."""
    from mac_rag.lm.devices import default_device
    from mac_rag.lm.loading import require_gradients
    from mac_rag.model import AmortizedModel
    from mac_rag.model.presets import PRESETS

    if name not in PRESETS:
        return AmortizedModel.from_pretrained(name)
    require_gradients(PRESETS[name].base_lm.quantization, default_device(None))
    return AmortizedModel.from_config(PRESETS[name])


if __name__ == "__main__":
    run_command(main)
