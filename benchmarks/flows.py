"""What one sentence and one question run through: functions, files and commits. `python -m benchmarks.flows --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from mac_rag.cli.run import run_command


def main(
    model: Annotated[str, typer.Option(help="A shipped model, or the folder of a checkpoint.")] = "mac-tiny",
) -> None:
    """Count the functions and files of mac_rag that run when a document is adapted, and when a question is asked.

    The bank is on disk, with an index of BM25 in its file. Each is done once before, so that what happens only the
    first time does not count.
    """
    import sys
    import tempfile
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType
    from typing import Any

    from rich.console import Console
    from rich.table import Table

    import mac_rag
    from mac_rag import Document, MACEngine
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.bank.bm25 import BankBM25Retriever
    from mac_rag.model import MACModel

    root = str(Path(mac_rag.__file__).parent)

    def ran(action: Callable[[], object], bank: MemoryBank) -> tuple[int, int, int]:
        called: set[Any] = set()

        def watch(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(root):
                called.add(frame.f_code)

        before = bank.commits
        sys.setprofile(watch)
        try:
            action()
        finally:
            sys.setprofile(None)
        return len(called), len({code.co_filename for code in called}), bank.commits - before

    with tempfile.TemporaryDirectory() as folder:
        loaded = MACModel.from_pretrained(model)
        bank = MemoryBank.create(Path(folder) / "bank", loaded.fingerprint)
        engine = MACEngine(loaded, bank, BankBM25Retriever(bank))
        engine.adapt([Document("first", "Ada Voss was appointed head of the museum in Orsena in May 2024.")])
        engine.answer(["Who heads the museum?"])
        new = Document("second", "Lena Marsh opened a hall for Roman coins in Orsena in June 2024.")
        flows = {
            "adapt one sentence": lambda: engine.adapt([new]),
            "ask one question": lambda: engine.answer(["Who opened the hall for Roman coins?"]),
        }
        table = Table("", "functions", "files", "commits")
        for name, action in flows.items():
            table.add_row(name, *map(str, ran(action, bank)))
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
