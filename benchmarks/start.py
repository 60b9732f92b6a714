"""Time from the start of `mac-rag ask` to its answer, beside the imports that any LM of transformers needs.

python -m benchmarks.start --help
"""

from __future__ import annotations

import sys
from typing import Annotated, NamedTuple

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

_IMPORTS = "import transformers.modeling_utils"
_DOCUMENT = "The town of Corvin has 12,000 people. Its mayor is Peter Hale."
_QUESTION = "Who is the mayor of Corvin?"


class Spent(NamedTuple):
    """Seconds of one process: by the clock, and on the CPU."""

    wall: float
    cpu: float


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    rounds: Annotated[int, typer.Option(min=1, help="How often each process is timed, behind one warm-up.")] = 5,
) -> None:
    """Time `mac-rag ask` on a bank of one document, in turns with the libraries' imports alone; medians.

    All run in processes of their own, as at a shell. The warm-up brings files into the page cache and writes bytecode.
    """
    import json
    import statistics
    import tempfile
    from pathlib import Path

    mac_rag = [sys.executable, "-c", "from mac_rag.cli.main import main; main()"]
    with tempfile.TemporaryDirectory() as folder:
        documents, bank = Path(folder) / "documents.jsonl", str(Path(folder) / "bank")
        documents.write_text(json.dumps({"id": "corvin", "text": _DOCUMENT}) + "\n")
        _spent([*mac_rag, "adapt", str(documents), "--bank", bank, "--model", model])
        commands = {
            "import torch": [sys.executable, "-c", "import torch"],
            _IMPORTS: [sys.executable, "-c", _IMPORTS],
            "mac-rag ask": [*mac_rag, "ask", _QUESTION, "--bank", bank, "--model", model],
        }
        spent: dict[str, list[Spent]] = {name: [] for name in commands}
        for turn in range(rounds + 1):
            for name, command in commands.items():
                seconds = _spent(command)
                if turn:
                    spent[name].append(seconds)
    say(f"{model}, {rounds} runs of each, medians:")
    for name, runs in spent.items():
        of_imports = statistics.median(run.cpu / base.cpu for run, base in zip(runs, spent[_IMPORTS], strict=True))
        say(
            f"  {name:36s} {statistics.median(run.wall for run in runs):6.2f} s, "
            f"{statistics.median(run.cpu for run in runs):6.2f} s on the CPU ({of_imports:.2f} of the imports')"
        )


def _spent(command: list[str]) -> Spent:
    """What a process takes that must end well; its output is dropped.

    Raises:
        subprocess.CalledProcessError: if it does not.
    """
    import os
    import subprocess
    from functools import partial

    from benchmarks.measure import timed

    # The bytecode of an installed package is there already; that of a checkout is written by the first run.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    wall, _ = timed(partial(subprocess.run, command, check=True, env=environment, **silent))
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return Spent(wall, cpu)


if __name__ == "__main__":
    run_command(main)
