"""Perplexity under the memory on adapted and unseen documents (table 6): `python -m eval.perplexity --help`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.baselines.options import FINE_TUNING, RateOption, chosen_methods
from eval.harness.command import BatchOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import (
    DataOption,
    DocumentsOption,
    StepsOption,
    TrainedModel,
    named_data,
    open_stream,
    write_once,
)
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from torch import Tensor

    from eval.harness.results import Row
    from eval.harness.variants import Training
    from mac_rag.data.types import Document, QADataset
    from mac_rag.lm.base_lm import BaseLM
    from mac_rag.lm.prompt import PromptEncoder
    from mac_rag.model import AmortizedModel
    from pipelines.tasks.train_config import TrainConfig

BEGINNING = 0.1  # share of a document's tokens that the input encoder reads and the LM continues
STEPS = 150  # of the training at the tiny scale
TRAINING_DOCUMENTS = {"tiny": 2_500, "paper": 1_000_000}  # at most
# No text around the beginning and the rest of a document: together they are the document.
PROMPT = {"document": "{document}\n", "question": "{question}", "answer": " {answer}"}
NOTE = (
    "The LM of {model} was last trained on answers alone and models other text poorly. Fine-tuning teaches it that as "
    "it adapts; under the memory it stays frozen."
)


def main(
    context: typer.Context,
    model: TrainedModel = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    steps: StepsOption = None,
    baselines: Annotated[str, typer.Option(help="Online fine-tuning to compare with, separated by commas.")] = ",".join(
        FINE_TUNING
    ),
    learning_rate: RateOption = None,
    documents: DocumentsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    output: OutputOption = None,
) -> None:
    """Adapt to a stream, then measure perplexity on its documents and on as many unseen ones.

    The first 10 % of a document's tokens take the place of the question; perplexity is that of the other 90 %. MAC is
    trained for this task first, on documents of the training split; the trained model stays beside the result, in
    variants/. At the tiny scale training starts from --model, which has a row of its own.
    """
    from eval.harness.results import result_path

    path = result_path(output, "perplexity")
    names = chosen_methods(baselines, FINE_TUNING) if baselines else []
    setup = SCALES[scale]["perplexity"].override(model=model, documents=documents)
    stream, source = open_stream(data, "test", 2 * setup.documents, seed=seed, scale=scale)
    from eval.baselines.factory import open_factory
    from eval.baselines.finetuning import FineTuning
    from eval.harness.paper_plan import tuned_lm
    from eval.harness.variants import Training, trained
    from mac_rag.lm.loading import load_tokenizer
    from mac_rag.model import AmortizedModel
    from mac_rag.model.presets import preset

    tiny_steps = STEPS if scale == "tiny" and steps is None else steps
    training = Training(setup.model, data, path.parent / "variants", seed, tiny_steps, scale)
    half = len(stream.documents) // 2
    adapted, unseen = stream.documents[:half], stream.documents[half:]
    models = {} if scale == "paper" else {"MAC, trained on questions": AmortizedModel.from_pretrained(setup.model)}
    if scale == "paper":
        tuned = tuned_lm(setup.model, named_data(data or "")[0])
        config = preset(setup.model)
        tokenizer = load_tokenizer(config.base_lm.name if tuned is None else tuned.path)
    else:
        model_before = next(iter(models.values()))
        config, tokenizer = model_before.config, model_before.base_lm.tokenizer
    most = 3 * config.max_document_tokens // 4  # of the LM's tokens; the amortization network may have others
    recipe = language_recipe(training, TRAINING_DOCUMENTS[scale], tokenizer, most)
    models["MAC"] = trained(recipe, training.runs)
    rows = [perplexity_row("LM alone", models["MAC"], adapted, unseen, batch_size, lm=models["MAC"].base_lm)]
    for name, network in models.items():
        rows.append(perplexity_row(name, network, adapted, unseen, batch_size))
    if names:
        checkpoint = setup.model if scale == "tiny" else f"runs/{setup.model}/train/best"
        factory = open_factory(
            setup.override(model=checkpoint),
            path,
            scale=scale,
            data=data,
            seed=seed,
            device=None,
            batch_size=batch_size,
        )
        for method in names:
            system = factory.make(method, learning_rate=learning_rate or factory.setup.retention_rate)
            assert isinstance(system, FineTuning)
            system.adapt(adapted)
            row = perplexity_row(system.name, factory.model, adapted, unseen, batch_size, lm=system.lm)
            rows.append(row.model_copy(update={"settings": {"method": system.name, **system.settings}}))
    report(
        path,
        experiment="perplexity",
        options=setup.options(context.params),
        rows=rows,
        dataset=stream,
        source=source,
        model=models["MAC"],
        notes=[NOTE.format(model=setup.model)] if scale == "tiny" else [],
    )


def perplexity_row(
    name: str,
    model: AmortizedModel,
    adapted: Sequence[Document],
    unseen: Sequence[Document],
    batch_size: int,
    *,
    lm: BaseLM | None = None,
) -> Row:
    """Measures perplexity on adapted and on unseen documents as one row.

    An `lm` is measured without memory; None measures the model with a bank of the adapted documents.
    """
    from eval.harness.results import Row
    from mac_rag.engine import MACEngine

    phi = None
    if lm is None:
        engine = MACEngine(model)
        engine.adapt(adapted, progress=True)
        phi = engine.bank.phi
    return Row(
        name=name,
        settings={"method": name},
        measures={
            "perplexity_adapted": perplexity(model, adapted, phi, batch_size, lm=lm),
            "perplexity_unseen": perplexity(model, unseen, phi, batch_size, lm=lm),
        },
        documents=len(adapted),
    )


def perplexity(
    model: AmortizedModel,
    documents: Sequence[Document],
    phi: Tensor | None,
    batch_size: int,
    *,
    lm: BaseLM | None = None,
) -> float:
    """The perplexity of the tokens of documents after their first 10 %.

    Args:
        model: documents are cut to its limit, and its base LM reads them.
        phi: memory tokens of the bank `[K, T, D]`; None for the LM alone.
        lm: an LM to read them instead of the model's base LM.
    """
    import torch

    from mac_rag.progress import progress_bar

    lm = lm or model.base_lm
    prompts = lm.prompts
    halves = [cut(prompts, model.amortization.split(document.text)[0]) for document in documents]
    order = sorted(range(len(halves)), key=lambda i: len(halves[i][1]))
    bank = None if phi is None else model.project(phi)
    total, tokens = 0.0, 0
    with torch.no_grad(), progress_bar("perplexity", len(halves)) as bar:
        for first in range(0, len(order), batch_size):
            batch = [halves[i] for i in order[first : first + batch_size]]
            modulation = None
            if bank is not None:
                questions = [prompts.tokenizer.decode(beginning) for beginning, _ in batch]
                modulation = model.modulation(model.aggregate(questions, bank))
            starts = [[*prompts.start, *beginning] for beginning, _ in batch]
            losses = lm.answer_loss(starts, [rest for _, rest in batch], modulation)
            total += float(losses.sum())
            tokens += sum(len(rest) for _, rest in batch)
            bar.advance(len(batch))
    return math.exp(total / tokens)


def cut(prompts: PromptEncoder, text: str) -> tuple[list[int], list[int]]:
    """Cuts a document's ids after the first 10 % of its tokens; both parts have at least one."""
    ids = prompts.texts.ids(text.strip())
    count = min(max(1, round(BEGINNING * len(ids))), len(ids) - 1)
    return ids[:count], ids[count:]


def language_recipe(training: Training, documents: int, tokenizer: Any, most: int) -> TrainConfig:
    """The recipe of language modelling: a document's first 10 % of words are the question, the rest is the answer.

    Takes at most so many documents of the training split, each cut to `most` of the tokenizer's tokens.

    Raises:
        DataError: for documents that cannot be written as a data set of questions.
    """
    name = "newswire" if training.data is None else named_data(training.data)[0]
    folder = training.runs / f"language-{name}-{training.seed}"
    data = {"name": "archivalqa", "path": str(folder), "validation_documents": 32}
    for split, size in (("train", documents), ("val", 32)):
        stream, _ = open_stream(training.data, split, size, seed=training.seed, scale=training.scale)
        write_once(folder / f"{split}.csv", partial(continuations, stream, tokenizer, most))
    return training.recipe(None, {"model": {"prompt": PROMPT}, "data": data})


def continuations(stream: QADataset, tokenizer: Any, most: int) -> QADataset:
    """A question of each document's beginning, whose answer is the rest; documents of one word are left out.

    The LM writes the whole rest, so a document ends before the word with which it would have more than `most` tokens.
    """
    from mac_rag.data.types import Document, QADataset, Question

    documents, questions = [], []
    for document in stream.documents:
        encoded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        text = document.text if len(spans) <= most else document.text[: spans[most][0]].rsplit(None, 1)[0]
        words = text.split()
        if len(words) < 2:
            continue
        count = max(1, round(BEGINNING * len(words)))
        documents.append(Document(document.id, text, {"date": "2000-01-01"}))
        rest = " ".join(words[count:])
        questions.append(Question(f"{document.id}-rest", " ".join(words[:count]), (rest,), document.id))
    return QADataset(stream.name, stream.split, tuple(documents), tuple(questions))


if __name__ == "__main__":
    run_command(main)
