"""Time of splitting long documents into rows, which is done before a bank is changed and while nobody waits.

python -m benchmarks.splitting --help
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from eval.harness.command import SeedOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    megabytes: Annotated[list[float] | None, typer.Option(min=0.001, help="Sizes of the texts, in UTF-8.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Time the splitting of one document: English news, Chinese without spaces, base64, and one word of one letter.

    If splitting is linear, seconds for each megabyte are the same for all sizes.
    """
    import base64
    import random
    from functools import partial

    from rich.console import Console
    from rich.table import Column, Table

    from benchmarks.measure import timed
    from mac_rag.data.newswire.generate import generate
    from mac_rag.model import MACModel

    sizes = megabytes or [1.0, 5.0, 20.0]
    encoder = MACModel.from_pretrained(model, device="cpu").amortization
    draw = random.Random(seed)
    news = "\n\n".join(document.text for document in generate("train", 2000).documents)

    def repeated(text: str, size: int) -> str:
        return text * (size // len(text.encode()) + 1)

    kinds: dict[str, Callable[[int], str]] = {
        "English news": lambda size: repeated(news, size),
        "Chinese without spaces": lambda size: "".join(chr(draw.randrange(0x4E00, 0x9FA5)) for _ in range(size // 3)),
        "base64": lambda size: base64.b64encode(draw.randbytes(size * 3 // 4)).decode(),
        "one letter": lambda size: "x" * size,
    }
    table = Table(
        Column("text"),
        *(Column(name, justify="right") for name in ("MB", "rows", "seconds", "seconds for each MB")),
        title=f"splitting, {model}",
    )
    for name, make in kinds.items():
        for size in sizes:
            text = make(round(size * 1e6)).encode()[: round(size * 1e6)].decode(errors="ignore")
            elapsed, rows = timed(partial(encoder.plan, text))
            table.add_row(name, f"{size:g}", f"{len(rows):,}", f"{elapsed:.1f}", f"{elapsed / size:.2f}")
            say(f"{name}, {size:g} MB: {elapsed:.1f} s")
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
