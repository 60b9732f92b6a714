"""Pairs ArchivalQA's questions with your copy of the articles: `python -m pipelines.prepare_archivalqa --help`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from mac_rag.data.types import Question
    from pipelines.corpora.nitf import Article

YEARS = {
    "qa_lt": range(1987, 1991),
    "qa_lt_val": range(1991, 1993),
    "train": range(1993, 2002),
    "val": range(2002, 2004),
    "test": range(2004, 2008),
}


def main(
    questions: Annotated[
        list[Path], typer.Option(help="A public question file such as ArchivalQA_val.csv; may be repeated.")
    ],
    corpus: Annotated[Path, typer.Option(help="Folder of the New York Times Annotated Corpus (LDC2008T19).")],
    output: Annotated[Path, typer.Option(help="Folder for train.csv, val.csv, test.csv, qa_lt.csv and qa_lt_val.csv.")],
) -> None:
    """Pair the public ArchivalQA questions with your own copy of the articles, split by year as in the paper.

    The question files need the columns question, answer and para_id; the paper's splits come from ArchivalQA_val.csv
    alone. The corpus is read as it ships, NITF XML in .tgz archives, or unpacked. Nothing is sent anywhere.
    """
    from mac_rag.errors import DataError

    public_questions = read_questions(questions)
    if not corpus.is_dir():
        raise DataError(f"{corpus} is not a folder; give the folder of the New York Times Annotated Corpus")
    articles = find_articles(corpus, public_questions)
    counts, unmatched = write_splits(public_questions, articles, output)
    if not counts:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in unmatched.items())
        raise DataError(f"none of the {len(public_questions):,} questions matches an article under {corpus}: {reasons}")
    for split, count in counts.items():
        say(f"{output / split}.csv: {count:,} questions")
    for reason, count in unmatched.items():
        say(f"left out: {count:,} questions, {reason}")


@dataclass(frozen=True, slots=True)
class PublicQuestion:
    """A public question, the article it was written from and the number of the paragraph, counted from 0."""

    question: Question
    article: str
    paragraph: int


def read_questions(files: Sequence[Path]) -> list[PublicQuestion]:
    """The public questions in the order of their files.

    A question without an `id` of its own is named by its file and row.

    Raises:
        DataError: for a missing column or a malformed row, a `para_id` that is not `<doc_id>_<paragraph number>`, or an
            `id` that comes twice.
    """
    from mac_rag.data.archivalqa import split_paragraph_id
    from mac_rag.data.table import read_table
    from mac_rag.data.types import Question

    public_questions: dict[str, PublicQuestion] = {}
    for file in files:
        for row in read_table(file, ("question", "answer", "para_id")):
            paragraph_id = row.filled("para_id").strip()
            place = split_paragraph_id(paragraph_id)
            if place is None:
                raise row.fault("para_id", f"{paragraph_id!r} is not <doc_id>_<paragraph number>, such as 1839755_20")
            name = row.values.get("id") or f"{file.stem}-{row.number}"
            if name in public_questions:
                raise row.fault("id", f"{name!r} is the id of another question further up, or in a file given twice")
            answers = (row.filled("answer").strip(),)
            question = Question(name, row.filled("question").strip(), answers, paragraph_id)
            public_questions[name] = PublicQuestion(question, *place)
    return list(public_questions.values())


def find_articles(corpus: Path, public_questions: Sequence[PublicQuestion]) -> dict[str, Article]:
    """The articles that the questions ask about, by id. Reading stops when all of them are found.

    Raises:
        DataError: see `pipelines.corpora.nitf.read_articles`.
    """
    from mac_rag.progress import progress_bar
    from pipelines.corpora.nitf import read_articles

    ids = {public.article for public in public_questions}
    articles: dict[str, Article] = {}
    with progress_bar("articles found", total=len(ids)) as bar:
        for number, article in enumerate(read_articles(corpus), 1):
            if article.id in ids and article.id not in articles:
                articles[article.id] = article
                bar.note(f"{number:,} read")
                bar.advance()
                if len(articles) == len(ids):
                    break
    return articles


def write_splits(
    public_questions: Sequence[PublicQuestion], articles: dict[str, Article], output: Path
) -> tuple[dict[str, int], Counter[str]]:
    """Writes one CSV file for each split, its rows in the order of the questions.

    Returns:
        The number of questions written for each split, and the number left out for each reason. If no question matches,
        the first is empty and no file is written.
    """
    from mac_rag.data.archivalqa import schema_row, write_rows
    from mac_rag.data.types import Document

    rows: dict[str, list[dict[str, str]]] = {split: [] for split in YEARS}
    unmatched: Counter[str] = Counter()
    for public in public_questions:
        article = articles.get(public.article)
        if article is None:
            unmatched["whose article is not in the corpus"] += 1
            continue
        if public.paragraph >= len(article.paragraphs) or not article.paragraphs[public.paragraph]:
            unmatched["whose article has no such paragraph"] += 1
            continue
        split = next((name for name, years in YEARS.items() if article.date and int(article.date[:4]) in years), None)
        if split is None or article.date is None:
            unmatched["whose article has no date from 1987 to 2007"] += 1
            continue
        metadata = {"title": article.title, "date": article.date}
        document = Document(public.question.gold, article.paragraphs[public.paragraph], metadata)
        rows[split].append(schema_row(public.question, document, article.paragraphs))
    if not any(rows.values()):
        return {}, unmatched
    for split, chosen in rows.items():
        write_rows(chosen, output / f"{split}.csv")
    return {split: len(chosen) for split, chosen in rows.items()}, unmatched


if __name__ == "__main__":
    run_command(main)
