"""Time to the first token, from memory and from documents: `python -m benchmarks.first_token --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from eval.harness.command import SeedOption, whole_numbers
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the bank.")] = 300,
    k: Annotated[
        str,
        typer.Option("--k", help="Documents that BM25 puts before a question; several numbers separated by commas."),
    ] = "1,3",
    questions: Annotated[int, typer.Option(min=1, help="Questions that are timed, each once in each way.")] = 30,
    seed: SeedOption = 0,
) -> None:
    """Time single questions until the first token of the answer: from memory, from BM25's documents, and from both.

    The time is the engine's: retrieval, reading the question and the bank, and the LM's pass over the prompt. Keys and
    values of the bank are projected before.
    """
    import statistics
    from functools import partial

    import torch

    from benchmarks.measure import timed
    from eval.harness.costs import Costs
    from eval.harness.streams import open_stream
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.retrieval.bm25 import BM25Retriever

    ks = whole_numbers("--k", k)
    stream, _ = open_stream(data, "test", documents, questions + 1, seed=seed, scale="tiny")
    first = MACEngine(MACModel.from_pretrained(model), retriever=BM25Retriever())
    first.adapt(stream.documents, progress=True)
    loaded, retriever = first.model, first.retriever
    assert retriever is not None
    texts = [question.question for question in stream.questions]
    ways: dict[str, tuple[int, bool]] = {"memory": (0, True)}
    for count in ks:
        ways[f"BM25, top {count}"] = (count, False)
        ways[f"BM25, top {count} + memory"] = (count, True)
    # An engine remembers recent questions, so each way of asking has an engine of its own.
    engines = {name: MACEngine(loaded, first.bank, retriever, k=count or 1) for name, (count, _) in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}

    def ask(name: str, question: str) -> None:
        count, use_memory = ways[name]
        engines[name].answer(
            [question], use_memory=use_memory, use_retriever=count > 0, overflow="truncate", max_new_tokens=1
        )

    for question in texts:  # all of them, so that the rows which they attend to are projected
        for name, (_, use_memory) in ways.items():
            if use_memory:
                engines[name].aggregate([f"{question} "])
    for turn, question in enumerate(texts):
        for name in ways:
            elapsed, _ = timed(partial(ask, name, question))
            if turn:  # the first one warms up
                seconds[name].append(elapsed)
    costs = Costs(first, texts)
    say(
        f"{len(texts) - 1} questions, {len(first.bank)} documents of {stream.name}, {model}, {loaded.device.type}, "
        f"{torch.get_num_threads()} threads of torch; medians:"
    )
    for name, (count, use_memory) in ways.items():
        hits = retriever.retrieve(texts, count) if count else [[] for _ in texts]
        prompts = [
            loaded.fit_to_window(question, [hit.text for hit in row], overflow="truncate")
            for question, row in zip(texts, hits, strict=True)
        ]
        cost = costs.measures(prompts, loaded.config.memory_weight if use_memory else None)
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["memory"], strict=True))
        say(
            f"  {name:20s} {1000 * statistics.median(seconds[name]):7.1f} ms ({ratio:.2f} of memory's), "
            f"{cost['lm_tokens']:6.1f} tokens, {cost['gflop']:6.2f} GFLOP"
        )


if __name__ == "__main__":
    run_command(main)
