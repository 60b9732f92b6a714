"""Overlap of a test stream with training, and answers without documents: `python -m eval.contamination --help`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from eval.harness.results import Row
    from mac_rag.data.types import QADataset

METHODS = ("zero-shot", "few-shot", "mac")


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    ngram: Annotated[int, typer.Option(min=1, help="Words of the n-grams to look for.")] = 13,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Check how much of the test stream the model may know from training.

    First the overlap of the stream with the training split: documents, titles, questions and n-grams, after SQuAD's
    normalisation. Then, as in the paper's table 10, the answers of the LM without the documents, zero-shot and behind
    five examples, and the answers with the memory of the documents.
    """
    from eval.harness.results import result_path

    path = result_path(output, "contamination")
    setup = SCALES[scale]["contamination"].override(model=model, documents=documents, questions=questions)
    test, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    training = open_stream(data, "train", setup.training_documents, seed=seed, scale=scale)[0]
    overlap = overlap_row(training, test, ngram)
    from eval.baselines.options import open_factory
    from eval.harness.protocol import samples
    from eval.harness.systems import ask

    factory = open_factory(setup, path, scale=scale, data=data, seed=seed, device=device, batch_size=batch_size)
    rows, verdicts = [overlap], {}
    for method in METHODS:
        system = factory.make(method)
        system.adapt(test.documents)
        row, verdicts[system.name] = ask(system.name, system, test.questions, len(test.documents))
        rows.append(row)
    report(
        path,
        experiment="contamination",
        options=setup.options(context.params),
        rows=rows,
        samples=samples(test.questions, verdicts),
        dataset=test,
        source=source,
        model=factory.model,
    )


def overlap_row(training: QADataset, test: QADataset, size: int) -> Row:
    """The percentage of a test stream's documents, questions, titles and n-grams that the training split has too.

    Shared titles may be harmless: two articles on one subject have the same title. Data sets without titles have no
    such figure.

    Args:
        training, test: two splits of one data set.
        size: words of an n-gram.
    """
    from eval.harness.results import Row
    from mac_rag.data.metrics import normalize

    def titles(dataset: QADataset) -> list[str]:
        return [normalize(str(d.metadata["title"])) for d in dataset.documents if d.metadata.get("title")]

    training_ngrams = set(ngrams((document.text for document in training.documents), size))
    by_document = [set(ngrams([document.text], size)) for document in test.documents]
    test_ngrams = set().union(*by_document)
    pairs = {
        "documents": [[normalize(document.text) for document in dataset.documents] for dataset in (training, test)],
        "questions": [[normalize(question.question) for question in dataset.questions] for dataset in (training, test)],
        "titles": [titles(training), titles(test)],
    }
    measures = {
        f"{what}_shared_percent": 100 * shared(training_texts, test_texts)
        for what, (training_texts, test_texts) in pairs.items()
        if training_texts and test_texts
    }
    return Row(
        name="shared with training",
        settings={"training_documents": len(training.documents), "ngram": size},
        measures={
            **measures,
            "ngrams_shared_percent": 100 * len(test_ngrams & training_ngrams) / max(1, len(test_ngrams)),
            "documents_with_ngram_percent": 100
            * sum(bool(grams & training_ngrams) for grams in by_document)
            / len(by_document),
        },
        documents=len(test.documents),
    )


def shared(training_texts: Sequence[str], test_texts: Sequence[str]) -> float:
    """The share of the test texts, 0 to 1, that are among the training texts."""
    distinct = set(training_texts)
    return sum(text in distinct for text in test_texts) / len(test_texts)


def ngrams(texts: Iterable[str], size: int) -> Iterator[bytes]:
    """An 8-byte digest of every n-gram of `size` normalised words of each text; short, so that many fit into memory."""
    from mac_rag.data.metrics import normalize

    for text in texts:
        words = normalize(text).split()
        for first in range(len(words) - size + 1):
            yield hashlib.blake2b(" ".join(words[first : first + size]).encode(), digest_size=8).digest()


if __name__ == "__main__":
    run_command(main)
