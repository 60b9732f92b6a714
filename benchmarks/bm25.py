"""BM25: time of questions and changes, ours against rank_bm25: `python -m benchmarks.bm25 --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command


def main(
    documents: Annotated[list[int] | None, typer.Option(min=10, help="Corpus sizes.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions for each size.")] = 50,
    k: Annotated[int, typer.Option(min=1, help="Documents for each question.")] = 10,
    seed: Annotated[int, typer.Option(help="Random seed of corpus and questions.")] = 0,
) -> None:
    """Time our incremental BM25 against rank_bm25, one question at a time.

    Documents have 60 words on average and questions 8, drawn by Zipf's law from 50,000 words, without the 100 most
    frequent words, which stand for stop words. Both get the same terms. Milliseconds are medians; rank_bm25 gets at
    most 20 questions. "allowed" is a question of which 90 % of the documents are allowed; rank_bm25 gets at most 3,
    because it indexes the allowed documents again.
    """
    import statistics
    import time

    import numpy as np
    from rich.console import Console
    from rich.table import Column, Table

    from mac_rag.data.types import Document
    from mac_rag.retrieval.bm25 import BM25Retriever, Engine, Tokenizer

    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(101, 50_101)
    weights /= weights.sum()

    def text(words: int) -> str:
        return " ".join(f"w{word}" for word in generator.choice(50_000, words, p=weights))

    def timed(retriever: BM25Retriever, questions: list[str], *, allowed: set[str] | None = None) -> float:
        """The median of the milliseconds of questions that are asked one at a time."""
        times = []
        for question in questions:
            began = time.perf_counter()
            retriever.retrieve([question], k, allowed=allowed)
            times.append(time.perf_counter() - began)
        return 1000 * statistics.median(times)

    plain = Tokenizer(stemmer=None, stopwords=())
    engines: tuple[Engine, ...] = ("incremental", "rank_bm25")
    columns = ("first question / s", "question / ms", "allowed / ms", "change / ms", "")
    table = Table("documents", Column("engine", no_wrap=True), *columns)
    for size in documents or [1_000, 10_000, 100_000]:
        corpus = [Document(f"d{i}", text(length)) for i, length in enumerate(generator.poisson(60, size))]
        texts = [text(8) for _ in range(questions)]
        allowed = {document.id for i, document in enumerate(corpus) if i % 10}
        rows: dict[str, tuple[float, float, float, float]] = {}
        for engine in engines:
            retriever = BM25Retriever(engine, tokenizer=plain)
            began = time.perf_counter()
            retriever.add(corpus)
            retriever.retrieve(texts[:1], k)
            first = time.perf_counter() - began
            question_ms = timed(retriever, texts[: 20 if engine == "rank_bm25" else None])
            allowed_ms = timed(retriever, texts[: None if engine == "incremental" else 3], allowed=allowed)
            began = time.perf_counter()
            retriever.delete("d0")
            retriever.add([Document("new", corpus[0].text)])
            retriever.retrieve(texts[:1], k)
            change = time.perf_counter() - began
            rows[engine] = first, question_ms, allowed_ms, 1000 * change
        for name, (first, question_ms, allowed_ms, change_ms) in rows.items():
            times = f"{first:.2f}", f"{question_ms:.3f}", f"{allowed_ms:.3f}", f"{change_ms:.2f}"
            table.add_row(f"{size:,}", name, *times, f"{rows['rank_bm25'][1] / question_ms:.0f}x")
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
