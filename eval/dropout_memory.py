"""What back-propagation dropout saves in training (figure 4, table 3): `python -m eval.dropout_memory --help`."""

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
    from torch import Tensor

    from eval.harness.results import Row
    from mac_rag.data.types import QADataset
    from mac_rag.model import MACModel
    from mac_rag.model.objective import Batch

SHARES = (0.0, 0.25, 0.5, 0.75)
MINIMUM = "min"  # the paper's name for: one document has gradients, all others have none

# The rows with equally many documents under gradients need about the same memory: that is the comparison of table 3.
TABLE: dict[str, dict[str, tuple[int, int, float]]] = {  # name -> K, passes that are accumulated, p
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
    counts: Annotated[str, typer.Option("--k", help="Documents K of a training batch, with commas.")] = "1,2,4,8,16,32",
    trainings: Annotated[bool, typer.Option(help="Train as well, for the table of answers by p.")] = True,
    steps: StepsOption = None,
    learning_rate: TrainingRateOption = None,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    output: OutputOption = None,
) -> None:
    """Measure the memory of a training step by K and the dropout ratio p, and what p does to answers.

    `peak_mb` is the most that forward and backward pass of one step hold at once, beyond the weights and their
    gradients: on a GPU as torch.cuda tells it, on a CPU from the allocations that torch's profiler records. `saved_mb`
    are the tensors that the forward pass keeps for the backward pass, each once, without the weights.

    The trainings are kept beside the result, in variants/, and are not made twice.
    """
    from eval.harness.results import result_path

    path = result_path(output, "dropout_memory")
    sizes = whole_numbers("--k", counts)
    setup = SCALES[scale]["dropout_memory"].override(model=model, documents=documents, questions=questions)
    from eval.harness.variants import Training, Variant, run_variants

    training = Training(setup.model, data, path.parent / "variants", seed, steps, scale, learning_rate)
    table = TABLE[scale] if trainings else {}
    most = max([*sizes, *(count for count, _, _ in table.values())])
    stream = open_stream(data, "train", most, seed=seed, scale=scale)[0]
    loaded = _to_train(setup.model)
    rows = memory_rows(loaded, stream, sizes, seed)
    variants = []
    for name, (count, passes, share) in table.items():
        changes: dict[str, Any] = {"backprop_dropout": share, "trainer": {"batch_size": count, "accumulate": passes}}
        peak = step_memory(loaded, first_batch(loaded, stream, count), share, seed)[0]
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


def memory_rows(model: MACModel, stream: QADataset, counts: list[int], seed: int) -> list[Row]:
    """A row for each K and each p."""
    from eval.harness.results import Row

    rows = []
    for count in counts:
        batch = first_batch(model, stream, count)
        for share in (*SHARES, MINIMUM):
            ratio = 1 - 1 / count if isinstance(share, str) else share
            peak, saved = step_memory(model, batch, ratio, seed)
            rows.append(
                Row(
                    name=f"K = {count}, p = {share}",
                    settings={"K": count, "p": share},
                    measures={"peak_mb": peak / 1e6, "saved_mb": saved / 1e6},
                )
            )
    return rows


def first_batch(model: MACModel, stream: QADataset, count: int) -> Batch:
    """The first documents of a stream, cut to the model's limit, with one question on each.

    Raises:
        ConfigError: when the stream has too few documents with questions.
    """
    from mac_rag.errors import ConfigError
    from mac_rag.model.objective import Batch

    asked = {question.document_id: question for question in reversed(stream.questions)}
    chosen = [document for document in stream.documents if document.id in asked][:count]
    if len(chosen) < count:
        raise ConfigError(f"K is {count}, but the stream has only {len(chosen)} documents with questions")
    questions = [asked[document.id] for document in chosen]
    return Batch(
        documents=[model.amortization.split(document.text)[0] for document in chosen],
        questions=[question.question for question in questions],
        answers=[question.answers[0] for question in questions],
        gold=range(count),
    )


def step_memory(model: MACModel, batch: Batch, dropout: float, seed: int) -> tuple[int, int]:
    """Bytes at the peak of one training step (equation 2), and bytes that its forward pass saves for the backward one.

    The weights' gradients are there before, as in any step but the first.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from eval.harness.allocations import allocated_peak
    from mac_rag.model.objective import LossWeights, mac_loss

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss() -> Tensor:
        torch.manual_seed(seed)
        return mac_loss(model, batch, LossWeights(), backprop_dropout=dropout)[0]["loss"]

    def step() -> None:
        loss().backward()

    model.train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = loss()  # alive, so that no address is used twice
    del kept
    peak = allocated_peak(step, model.device)[1]
    model.zero_grad(set_to_none=True)
    model.eval()
    return peak, sum(saved.values())


def _to_train(name: str) -> MACModel:
    """A preset built from its pretrained parts, or a checkpoint."""
    import os

    from mac_rag.lm.devices import default_device
    from mac_rag.lm.loading import require_gradients
    from mac_rag.model import MACModel
    from mac_rag.model.presets import PRESETS

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces each start and stop on standard error
    if name not in PRESETS:
        return MACModel.from_pretrained(name)
    require_gradients(PRESETS[name].base_lm.quantization, default_device(None))
    return MACModel.from_config(PRESETS[name])


if __name__ == "__main__":
    run_command(main)
