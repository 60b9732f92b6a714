"""Time that a CPU saves by reading a few prompts at a time.

python -m benchmarks.reading --help
"""

from __future__ import annotations

from typing import Annotated

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the test stream, from its beginning.")] = 1665,
    questions: Annotated[int, typer.Option(min=1, help="Questions of one batch, drawn from all.")] = 32,
    k: Annotated[int, typer.Option("--k", min=1, help="Paragraphs that BM25 retrieves for each question.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each, in turns; the median counts.")] = 3,
    seed: SeedOption = 0,
) -> None:
    """Time the LM behind retrieved paragraphs on a CPU: it reads a few prompts at a time, or all at once."""
    from unittest.mock import patch

    from benchmarks.measure import medians
    from eval.harness.streams import open_stream
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.retrieval.bm25 import BM25Retriever

    engine = MACEngine(MACModel.from_pretrained(model, device="cpu"))
    stream, _ = open_stream(data, "test", documents, questions, seed=seed, scale="tiny")
    retriever = BM25Retriever()
    retriever.add(stream.documents)
    texts = [question.question for question in stream.questions]
    contexts = [[hit.text for hit in hits] for hits in retriever.retrieve(texts, k)]

    def few() -> list[str]:
        answers = engine.answer(texts, contexts=contexts, use_memory=False, overflow="truncate", batch_size=len(texts))
        return [answer.text for answer in answers]

    def at_once() -> list[str]:
        with patch.object(engine.model, "cpu_batch_tokens", float("inf")):
            return few()

    same = sum(ours == theirs for ours, theirs in zip(few(), at_once(), strict=True))
    fast, slow = medians(few, at_once, rounds)
    say(f"{len(texts)} questions behind {k} paragraphs of {stream.name}, {model}:")
    say(f"  all at once   {slow:.2f} s")
    say(f"  few           {fast:.2f} s, {slow / fast:.1f} times as fast, {same} answers the same")


if __name__ == "__main__":
    run_command(main)
