"""Documents, questions and training steps a second, against the published code: `python -m benchmarks.throughput`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from mac_rag.cli.run import run_command


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-tiny",
    documents: Annotated[int, typer.Option(min=8, help="Documents to adapt to.")] = 128,
    bank: Annotated[int, typer.Option(min=8, help="Documents in the bank for the questions.")] = 512,
    questions: Annotated[int, typer.Option(min=1, help="Questions to answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each, in turns; the median counts.")] = 5,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
) -> None:
    """Compare throughput with a re-implementation of the published code.

    Documents are newswire stories joined to a mean length of about 150 tokens. Both implementations compute the same
    with the same networks; their memory tokens and losses are checked to be equal before anything is timed.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks import published
    from benchmarks.measure import medians
    from mac_rag.data.newswire.generate import generate
    from mac_rag.model import AmortizedModel
    from pipelines.objective import Batch, LossWeights, mac_loss

    mac = AmortizedModel.from_pretrained(model, device=device)
    stream = generate("test", 3 * max(documents, bank))
    texts = [" ".join(d.text for d in stream.documents[i : i + 3]) for i in range(0, len(stream.documents), 3)]
    question_texts = [question.question for question in stream.questions[:questions]]
    length = sum(len(mac.amortization.ids(text)) for text in texts[:documents]) / documents
    phi = mac.amortize(texts[:bank])
    projection = mac.project(phi)
    batch_size = 8
    batch = Batch(
        texts[:batch_size],
        question_texts[:batch_size],
        [question.answers[0] for question in stream.questions[:batch_size]],
        range(batch_size),
    )

    ours_phi, theirs_phi = mac.amortize(texts[:8]), published.adapt(mac, texts[:8], 8)
    torch.testing.assert_close(ours_phi, theirs_phi, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        mac_loss(mac, batch, LossWeights())[0]["loss"], published.loss(mac, batch), atol=1e-3, rtol=1e-3
    )

    def step(loss: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            mac.zero_grad()
            loss().backward()

        return run

    compared: list[tuple[str, int, Callable[[], Any], Callable[[], Any]]] = [
        (
            "documents adapted / s",
            documents,
            lambda: mac.amortize(texts[:documents]),
            lambda: published.adapt(mac, texts[:documents], 16),
        ),
        (
            "questions answered / s",
            questions,
            lambda: mac.generate(question_texts, modulation=mac.aggregate(question_texts, projection)),
            lambda: published.answer(mac, question_texts, phi),
        ),
        (
            "training steps / s",
            1,
            step(lambda: mac_loss(mac, batch, LossWeights())[0]["loss"]),
            step(lambda: published.loss(mac, batch)),
        ),
    ]
    table = Table("", "ours", "published", "ratio", title=f"{model}, mean document {length:.0f} tokens, {mac.device}")
    for name, count, ours, theirs in compared:
        fast, slow = medians(ours, theirs, rounds)
        table.add_row(name, f"{count / fast:.1f}", f"{count / slow:.1f}", f"{slow / fast:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
