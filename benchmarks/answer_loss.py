"""Loss of answers under a memory before and after training: `python -m benchmarks.answer_loss --help`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

    from mac_rag.data.types import QADataset, Question
    from mac_rag.model import AmortizedModel


def main(
    model: Annotated[str, typer.Option(help="The trained MAC model: a folder.")],
    recipe: Annotated[str, typer.Option(help="Its recipe of `pipelines.train`, for its first weights.")],
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the test stream, from its beginning.")] = 50,
    questions: Annotated[int, typer.Option(min=1, help="Questions, drawn from all.")] = 50,
    seed: SeedOption = 0,
) -> None:
    """Print the loss of gold answers, in nats a token.

    The LM reads the question alone; after the text of its document; after the memory tokens of its document, without
    aggregation; and after phi* of a bank of all documents. The memory is that of the recipe's networks with random
    maps (`init: pretrained`), of those that training starts with, and of the trained ones.
    """
    from eval.harness.streams import named_data, open_stream
    from mac_rag.model import AmortizedModel
    from pipelines.recipe import load_recipe
    from pipelines.tasks.train import TrainTask
    from pipelines.tasks.train_config import TrainConfig

    stream, _ = open_stream(data, "test", documents, questions, seed=seed, scale="tiny")
    overrides = [] if data is None else [f"data.path={named_data(data)[1]}"]
    config = load_recipe(TrainConfig, recipe, overrides)
    trained = AmortizedModel.from_pretrained(model, device="cpu")
    say(f"{len(stream.questions)} questions of {len(stream.documents)} documents of {stream.name}, {model}:")
    texts = {document.id: document.text for document in stream.documents}
    prompts = trained.base_lm.prompts
    bare = _loss(trained, stream.questions, [prompts.prompt(each.question) for each in stream.questions], None)
    open_book = [prompts.prompt(each.question, [texts[each.gold]]) for each in stream.questions]
    say(f"  the question alone                    {bare:.2f}")
    say(f"  the text                              {_loss(trained, stream.questions, open_book, None):.2f}")
    starts = dict.fromkeys(["pretrained", config.init])
    for init in starts:
        start = TrainTask(config.model_copy(update={"init": init})).model
        _report(f"init: {init}", start, stream)
    _report("trained", trained, stream)


def _report(name: str, model: AmortizedModel, stream: QADataset) -> None:
    from eval.harness.protocol import adapt
    from mac_rag.engine import MACEngine

    model.eval()
    questions = stream.questions
    texts = {document.id: document.text for document in stream.documents}
    prompts = [model.base_lm.prompts.prompt(each.question) for each in questions]
    own = _loss(model, questions, prompts, model.amortize([texts[each.gold] for each in questions]))
    engine = MACEngine(model)
    adapt(engine, stream.documents)
    bank = _loss(model, questions, prompts, cast(Tensor, engine.aggregate([each.question for each in questions])))
    say(f"  memory of its document, {name:<22}{own:.2f}")
    say(f"  memory of all documents, {name:<21}{bank:.2f}")


def _loss(
    model: AmortizedModel, questions: Sequence[Question], prompts: Sequence[Sequence[int]], phi: Tensor | None
) -> float:
    """The mean loss of a token of the answers after their prompts and phi* `[questions, T, D]`."""
    import torch

    answers = [model.base_lm.prompts.answer(each.answers[0]) for each in questions]
    with torch.no_grad():
        losses = [
            model.base_lm.answer_loss([prompt], [answer], None if phi is None else model.modulation(phi[i : i + 1]))
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    return float(torch.cat(losses).sum()) / sum(map(len, answers))


if __name__ == "__main__":
    run_command(main)
