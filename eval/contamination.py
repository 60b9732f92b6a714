"""What a test stream shares with training, and answers without it: `python -m eval.contamination --help`."""

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
    ngram: Annotated[int, typer.Option(min=1, help="Words of the n-grams that are looked for.")] = 13,
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Check the test stream for what the model may have known before.

    First what the stream shares with the training split: whole documents, titles, questions and n-grams, after SQuAD's
    normalisation. Then, as in the paper's table 10, how well the LM answers without the documents, alone and behind
    five examples, and how well with the memory of them.
    """
    from eval.harness.results import result_path

    path = result_path(output, "contamination")
    setup = SCALES[scale]["contamination"].override(model=model, documents=documents, questions=questions)
    test, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    training = open_stream(data, "train", setup.training_documents, seed=seed, scale=scale)[0]
    shared = overlap_row(training, test, ngram)
    from eval.baselines.options import open_factory
    from eval.harness.protocol import samples
    from eval.harness.systems import ask

    factory = open_factory(setup, path, scale=scale, data=data, seed=seed, device=device, batch_size=batch_size)
    rows, verdicts = [shared], {}
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
    """How much of a test stream stands in the training split, in percent.

    Titles count where the data set has them; they may be shared without harm, as two articles on one subject do.

    Args:
        training, test: two splits.
        size: words of an n-gram.
    """
    from eval.harness.results import Row
    from mac_rag.data.metrics import normalize

    def titles(dataset: QADataset) -> list[str]:
        return [normalize(str(d.metadata["title"])) for d in dataset.documents if d.metadata.get("title")]

    known = set(ngrams((document.text for document in training.documents), size))
    mine = [set(ngrams([document.text], size)) for document in test.documents]
    distinct = set().union(*mine)
    pairs = {
        "documents": [[normalize(document.text) for document in dataset.documents] for dataset in (training, test)],
        "questions": [[normalize(question.question) for question in dataset.questions] for dataset in (training, test)],
        "titles": [titles(training), titles(test)],
    }
    measures = {
        f"{what}_shared_percent": 100 * shared(theirs, ours)
        for what, (theirs, ours) in pairs.items()
        if theirs and ours
    }
    return Row(
        name="shared with training",
        settings={"training_documents": len(training.documents), "ngram": size},
        measures={
            **measures,
            "ngrams_shared_percent": 100 * len(distinct & known) / max(1, len(distinct)),
            "documents_with_ngram_percent": 100 * sum(bool(grams & known) for grams in mine) / len(mine),
        },
        documents=len(test.documents),
    )


def shared(theirs: Sequence[str], ours: Sequence[str]) -> float:
    """Share of our texts that are among theirs."""
    known = set(theirs)
    return sum(text in known for text in ours) / len(ours)


def ngrams(texts: Iterable[str], size: int) -> Iterator[bytes]:
    """A digest of every run of `size` normalised words of each text, short so that many fit into memory."""
    from mac_rag.data.metrics import normalize

    for text in texts:
        words = normalize(text).split()
        for first in range(len(words) - size + 1):
            yield hashlib.blake2b(" ".join(words[first : first + size]).encode(), digest_size=8).digest()


if __name__ == "__main__":
    run_command(main)
