"""Pairs ArchivalQA's questions with your copy of the articles: `python -m pipelines.prepare_archivalqa --help`."""

from __future__ import annotations

import datetime
import gzip
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say
from mac_rag.errors import DataError

if TYPE_CHECKING:
    from mac_rag.data.types import Question

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
    """The articles of the questions, by id. Reading stops as soon as all of them are found.

    Raises:
        DataError: see `read_articles`.
    """
    from mac_rag.progress import progress_bar

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


@dataclass(frozen=True, slots=True)
class Article:
    """One news article: its number in the corpus, its title or "", its date as `YYYY-MM-DD`, and its paragraphs.

    Empty paragraphs are kept, because questions name paragraphs by their position.
    """

    id: str
    title: str
    date: str | None
    paragraphs: tuple[str, ...]


def read_articles(folder: Path) -> Iterator[Article]:
    """Yields every article below a folder, from .xml files and from .xml members of .tgz archives, in order of name.

    The articles are in NITF XML, as the New York Times Annotated Corpus ships them. XML files without an article's id
    are skipped. Nothing is unpacked to disk.

    Raises:
        DataError: for a folder without such files, a damaged archive, or XML that is ill-formed or declares entities.
    """
    has_documents = False
    for source, content in _documents(folder):
        has_documents = True
        article = parse_article(content, source)
        if article is not None:
            yield article
    if not has_documents:
        raise DataError(f"{folder} holds no .xml file and no .tgz archive with one; give the folder of the corpus")


def parse_article(content: bytes, source: str) -> Article | None:
    """Reads one NITF document; None if it has no `doc-id`.

    Raises:
        DataError: for ill-formed XML, entity declarations, or references to undeclared entities; names `source`.
    """
    root = _parse_xml(content, source)
    number = root.find(".//doc-id[@id-string]")
    if number is None:
        return None
    title = root.find("head/title")
    block = root.find(".//block[@class='full_text']")
    paragraphs = () if block is None else tuple(_text(paragraph) for paragraph in block.iterfind(".//p"))
    return Article(number.attrib["id-string"], "" if title is None else _text(title), _date(root), paragraphs)


def _documents(folder: Path) -> Iterator[tuple[str, bytes]]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if name.endswith(".xml"):
                yield str(path), path.read_bytes()
            elif name.endswith((".tgz", ".tar.gz")):
                yield from _members(path)


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.name.endswith(".xml") else None
                    if file is not None:
                        yield f"{path}:{member.name}", file.read()
            # tarfile does not notice a truncated archive; reading on to the gzip trailer does.
            while stream.read(1 << 20):
                pass
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole .tgz archive: {error}") from None


def _parse_xml(content: bytes, source: str) -> Element:
    """Parses XML, but no entity declarations: entities could expand without bound or read other files."""

    def refuse(name: str, *_: object) -> None:
        raise DataError(
            f"{source} is refused: it declares or uses the XML entity {name!r}, as no article of the corpus does"
        )

    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise DataError(f"{source} is not well-formed XML: {error}") from None
    return builder.close()


def _text(element: Element) -> str:
    return "".join(element.itertext()).strip()


def _date(root: Element) -> str | None:
    parts = []
    for name in ("year", "month", "day_of_month"):
        meta = root.find(f"head/meta[@name='publication_{name}']")
        parts.append("" if meta is None else meta.get("content", ""))
    try:
        return datetime.date(*map(int, parts)).isoformat()
    except ValueError:
        return None


if __name__ == "__main__":
    run_command(main)
