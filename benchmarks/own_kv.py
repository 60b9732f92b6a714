"""A memory of an LM's own keys and values against the same documents as text.

python -m benchmarks.own_kv loss --lm smollm2-135m --data FOLDER
python -m benchmarks.own_kv time --lm smollm2-135m --data FOLDER
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.command import whole_numbers
from mac_rag.cli.run import run_app
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mac_rag.model import OwnKVModel

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
LMOption = Annotated[str, typer.Option(help="The LM, in bf16: a folder, a name on the Hub or of `mac-rag fetch`.")]
DataOption = Annotated[str, typer.Option(help="Folder of SQuAD v1.1.")]
AdapterOption = Annotated[str | None, typer.Option(help="Folder best or last of pipelines.tune_reading.")]
_FITTED = 150  # paragraphs of the training split, which hold about 20,000 tokens


def _around(lm: str, data: str, adapter: str | None) -> tuple[OwnKVModel, Sequence[str]]:
    """The model without a codec, and texts to fit one to."""
    from mac_rag.config import BaseLMConfig
    from mac_rag.data.squad import read_squad
    from mac_rag.model import MACModel, OwnKVModel

    model = MACModel.around(
        BaseLMConfig(name=lm, dtype="bf16"), compression=None, adapter=adapter, sentence_encoder=None
    )
    assert isinstance(model, OwnKVModel)
    documents = read_squad(data, "qa_lt_val").documents
    return model, [document.text for document in documents[:: len(documents) // _FITTED]]


@app.command()
def loss(
    lm: LMOption,
    data: DataOption,
    adapter: AdapterOption = None,
    questions: Annotated[int, typer.Option(min=1)] = 200,
    compression: Annotated[str, typer.Option(help="Compressions, separated by commas.")] = "20,40,80",
    split: Annotated[str, typer.Option(help="A split of SQuAD.")] = "val",
) -> None:
    """Loss and F1 with the right document: nothing, its text, its keys and values as they are, and coded.

    The loss is in nats a token of the first accepted answer with its end. The 95 % interval is that of the difference
    from the text, question by question.
    """
    import statistics

    from rich.console import Console
    from rich.table import Table

    from mac_rag.data.metrics import best_over, f1
    from mac_rag.data.squad import read_squad
    from mac_rag.model import ReadRow, ReadRows

    raw, texts = _around(lm, data, adapter)
    stream = read_squad(data, split)
    asked = stream.questions[:: len(stream.questions) // questions][:questions]
    documents = {document.id: document.text for document in stream.documents}
    answers = [raw.blocks.answer(question.answers[0]) for question in asked]
    table = Table("in front of the question", "bytes a token", "loss", "beside text", "F1")
    losses: dict[str, list[float]] = {}

    def row(name: str, model: OwnKVModel, memory: bool, text: bool, size: str) -> None:
        own, scores = [], []
        for question, answer in zip(asked, answers, strict=True):
            document = documents[question.gold]
            prompt = model.fit_to_window(question.question, [document] if text else [])
            phi = None
            if memory:
                [codes] = model.amortize_rows(model.plan(document)[:1])
                phi = ReadRows([[ReadRow(model.decode(codes), 0.0)]])
            own.append(float(model._losses([prompt], [answer], phi)[0].mean()))
            [said] = model.generate([prompt], modulation=phi, max_new_tokens=16)
            scores.append(best_over(f1, said, question.answers))
        losses[name] = own
        beside = ""
        if "text" in losses:
            differences = [mine - its for mine, its in zip(own, losses["text"], strict=True)]
            margin = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
            beside = f"{statistics.mean(differences):+.3f} ± {margin:.3f}"
        figures = f"{statistics.mean(own):.3f}", beside, f"{100 * statistics.mean(scores):.1f}"
        table.add_row(name, size, *figures)
        say(" ".join((name, size, *figures)), err=True)

    row("nothing", raw, memory=False, text=False, size="0")
    row("text", raw, memory=False, text=True, size=f"{raw.raw_bytes:,}")
    row("keys and values", raw, memory=True, text=False, size=f"{raw.raw_bytes:,}")
    for factor in whole_numbers("--compression", compression):
        coded = raw.compressed(texts, factor)
        size = f"{coded.config.bytes_per_token:,}"
        row(f"coded, {factor} times smaller", coded, memory=True, text=False, size=size)
    Console().print(table)


@app.command("time")
def time_first_token(
    lm: LMOption,
    data: DataOption,
    compression: Annotated[int, typer.Option(min=1)] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Questions that are timed in each way, in turns.")] = 20,
    sizes: Annotated[
        str, typer.Option(help="Documents and tokens of each, as 3x128, separated by commas.")
    ] = "3x128,5x512,10x512",
) -> None:
    """Time to the first token: documents as text, in memory and decoded for the question, and kept decoded."""
    import statistics
    from functools import partial

    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import timed
    from mac_rag.model import ReadRow, ReadRows

    raw, texts = _around(lm, data, None)
    model = raw.compressed(texts, compression)
    parameters = sum(parameter.numel() for parameter in model.base_lm.model.base_model.parameters())
    ids = [token for text in texts for token in model.plan(text)[0]]
    ask = "Who is named first in the context?"
    after = model.fit_to_window(ask).after_memory
    table = Table("documents", "way", "median, s", "of text", "tokens read", "GFLOP", "bytes of memory")
    for size in sizes.split(","):
        count, length = map(int, size.split("x"))
        rows = [ids[place * length : (place + 1) * length] for place in range(count)]
        codes = model.amortize_rows(rows)
        kept = ReadRows([[ReadRow(model.decode(one), -0.1 * place) for place, one in enumerate(codes)]])

        def text(rows: list[list[int]] = rows) -> None:
            prompt = [*model.blocks.opening, *(token for row in rows for token in row), *after]
            model.base_lm.generate([prompt], None, max_new_tokens=1)

        def memory(rows: ReadRows) -> None:
            model.base_lm.generate([after], model._modulation(rows), max_new_tokens=1)

        def cold(codes: list[torch.Tensor] = codes) -> None:
            memory(ReadRows([[ReadRow(model.decode(one), -0.1 * place) for place, one in enumerate(codes)]]))

        ways: dict[str, Callable[[], None]] = {
            "text": text,
            "memory, cold rows": cold,
            "memory, kept rows": partial(memory, kept),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, run in ways.items():
                elapsed, _ = timed(run)
                if turn:  # the first one warms up
                    seconds[name].append(elapsed)
        tokens = {"text": len(model.blocks.opening) + count * length + len(after)}
        assert model.codec is not None
        allocation = model.codec.allocation(codes[0].shape[1])
        decoding = 2 * count * length * sum(basis.numel() for basis in allocation.bases)
        for name in ways:
            read = tokens.get(name, len(after))
            flops = 2 * parameters * read + (decoding if name == "memory, cold rows" else 0)
            stored = 0 if name == "text" else sum(one.numel() for one in codes)
            if name == "memory, kept rows":
                stored = sum(row.keys_values.nbytes for row in kept.rows[0])
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["text"], strict=True))
            table.add_row(
                size, name, f"{statistics.median(seconds[name]):.3f}", f"{ratio:.3f}", f"{read:,}",
                f"{flops / 1e9:,.0f}", f"{stored:,}",
            )  # fmt: skip
    say(f"{lm}, bf16, {torch.get_num_threads()} threads of torch; each way {rounds} times, in turns")
    Console().print(table)


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
