"""Fits the confidence of a model's answers: `python -m pipelines.calibrate --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say


def main(
    model: Annotated[
        str, typer.Option(help="A checkpoint: a folder, whose calibration.json is written, or a shipped model.")
    ],
    data: Annotated[
        str, typer.Option(help="Data set for the fit, as NAME:PATH: squad:FOLDER, own:FILE, ...; or newswire.")
    ],
    split: Annotated[str, typer.Option(help="Split of the data set; not the one that is reported.")] = "val",
    documents: Annotated[int, typer.Option(min=2, help="Documents in the bank, the first ones of the stream.")] = 1000,
    questions: Annotated[int, typer.Option(min=20, help="Questions, half of them without their answers.")] = 400,
    retriever: Annotated[
        str, typer.Option(help="Fit answers after the documents of this retriever instead of those from memory alone.")
    ] = "none",
    k: Annotated[int, typer.Option(min=1, help="Retrieved documents before a question.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed of the questions.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions of one batch.")] = 32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...", show_default="a GPU if there is one")] = None,
) -> None:
    """Fit the calibration of a checkpoint, from which `Answer.confidence` is computed.

    Half of the questions are asked of a bank without the documents that hold their answers. A logistic model learns to
    tell right answers from wrong ones by the document prior, the LM's own probabilities, and whether the answer repeats
    the question; an answer is right if its F1 is at least 0.5. A fit holds only for the weights that it was made with,
    so fit again after training.
    """
    from mac_rag.data import load_dataset
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.model.checkpoint import find
    from mac_rag.retrieval.registry import make_retriever
    from pipelines.tasks.calibrate import fit, guesses

    name, _, path = data.partition(":")
    dataset = load_dataset(name, split, path or None, documents=documents)
    engine = MACEngine(MACModel.from_pretrained(model, device=device), retriever=make_retriever(retriever), k=k)
    found, evidence, mode = guesses(engine, dataset, questions, seed=seed, batch_size=batch_size)
    about = f"{name} ({split}), {len(dataset.documents)} documents"
    calibration = fit(engine, found, evidence, mode, about)
    calibration.write(find(model, None))
    right = sum(guess.right for guess in found)
    say(f"fitted on {len(found)} answers, {right} of them right: {about}; written to {find(model, None)}")
    for kind, weight in calibration.modes[mode].weights.items():
        say(f"{kind:31}{weight:+.3f}")


if __name__ == "__main__":
    run_command(main)
