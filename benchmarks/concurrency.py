"""Throughput of questions that arrive together, against the same questions one by one.

python -m benchmarks.concurrency --help
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
    documents: Annotated[int, typer.Option(min=1, help="Documents of the bank.")] = 300,
    together: Annotated[int, typer.Option(min=2, help="Questions that arrive together.")] = 16,
    k: Annotated[int, typer.Option("--k", min=0, help="Documents that BM25 puts in front; 0 for memory alone.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with new questions; the median counts.")] = 5,
    seed: SeedOption = 0,
) -> None:
    """Time questions one by one, from as many threads, from asyncio through MACLLM, and in one call, in turns."""
    import asyncio
    import statistics
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    import torch

    from benchmarks.measure import timed
    from eval.harness.streams import open_stream
    from mac_rag.engine import MACEngine
    from mac_rag.integrations.llama_index import MACLLM
    from mac_rag.model import MACModel
    from mac_rag.retrieval.bm25 import BM25Retriever

    stream, _ = open_stream(data, "test", documents, together * (rounds + 1), seed=seed, scale="tiny")
    first = MACEngine(MACModel.from_pretrained(model), retriever=BM25Retriever() if k else None, k=k)
    first.adapt(stream.documents, progress=True)
    # An engine remembers recent questions, so each way of asking has an engine of its own.
    engines = [MACEngine(first.model, first.bank, first.retriever, k=k) for _ in range(4)]
    llm = MACLLM(engine=engines[2])
    pool = ThreadPoolExecutor(together)

    def one_by_one(questions: list[str]) -> list[str]:
        return [engines[0].answer([question])[0].text for question in questions]

    def threads(questions: list[str]) -> list[str]:
        return list(pool.map(lambda question: engines[1].answer([question])[0].text, questions))

    def tasks(questions: list[str]) -> list[str]:
        async def gather() -> list[str]:
            return [done.text for done in await asyncio.gather(*map(llm.acomplete, questions))]

        return asyncio.run(gather())

    def one_call(questions: list[str]) -> list[str]:
        return [answer.text for answer in engines[3].answer(questions)]

    ways = {"one by one": one_by_one, "threads": threads, "MACLLM.acomplete": tasks, "one call": one_call}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same = dict.fromkeys(ways, 0)
    for turn in range(rounds + 1):
        questions = [question.question for question in stream.questions[turn * together :][:together]]
        answers = {}
        for name, ask in ways.items():
            elapsed, answers[name] = timed(partial(ask, questions))
            if turn:  # the first round warms up
                seconds[name].append(elapsed)
        for name in ways:
            same[name] += sum(a == b for a, b in zip(answers[name], answers["one by one"], strict=True))
    say(
        f"{together} questions, {len(first.bank)} documents of {stream.name}, k={k}, {model}, "
        f"{first.model.device.type}, {torch.get_num_threads()} threads of torch:"
    )
    for name in ways:
        ratios = [slow / fast for slow, fast in zip(seconds["one by one"], seconds[name], strict=True)]
        say(
            f"  {name:17s} {statistics.median(seconds[name]):6.2f} s, {statistics.median(ratios):4.2f} times as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {same[name]} of {together * (rounds + 1)} answers the same"
        )


if __name__ == "__main__":
    run_command(main)
