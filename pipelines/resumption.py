"""What a training run has left in its folder, read before the run goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mac_rag.errors import DataError
from mac_rag.untrusted_files import ROW, MalformedError, lines_of, open_file, read_json

_LARGEST_STATE = 1 << 16  # bytes
_LOGGED = re.compile(rb'\{"kind": "\w+", "step": (\d{1,18})[,}]')


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        step: optimiser steps that are done.
        best: the best validation until then; None without one.
        passes: forward passes of one step over all processes.
        finished: True once the run has exported its last weights. Its checkpoint then holds nothing else.
    """

    step: int
    best: float | None
    passes: int
    finished: bool


def finished_steps(output: Path) -> int:
    """Steps of the run in a folder that its newest checkpoint holds; 0 without a checkpoint."""
    checkpoints = checkpoints_in(output / "checkpoints")
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return sorted(folder.glob("step-*"))


def progress_of(checkpoint: Path) -> Progress:
    """What a checkpoint says of its run.

    Raises:
        DataError: when it is damaged; names its file.
    """
    path = checkpoint / "trainer.json"
    try:
        state = read_json(path, _LARGEST_STATE)
        step, best, passes, finished = state["step"], state["best"], state["passes"], state.get("finished", False)
        if type(step) is not int or step < 0 or isinstance(best, bool) or not isinstance(best, int | float | None):
            raise MalformedError(f"step is {step!r:.40}, and best is {best!r:.40}")
        if type(passes) is not int or passes < 1 or type(finished) is not bool:
            raise MalformedError(f"passes is {passes!r:.40}, and finished is {finished!r:.40}")
        return Progress(step, best, passes, finished)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}; remove {checkpoint}, and the run starts anew") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def logged_until(log: Path, step: int) -> str:
    """The lines of a log until a step; a last line that a crash has cut is left out.

    Raises:
        DataError: when it is damaged; names its file and the line.
    """
    lines = []
    try:
        with open_file(log, follow=True) as file:
            for number, line in enumerate(lines_of(file, ROW), 1):
                if not line.endswith(b"\n"):
                    break
                begun = _LOGGED.match(line)  # its figures are copied, and may be NaN, which is no JSON
                if begun is None:
                    raise MalformedError(f"line {number} names no step")
                if int(begun[1]) > step:
                    break
                lines.append(line.decode())
    except ValueError as error:
        raise DataError(f"{log} is damaged: {error}; remove it, and the run goes on with a new one") from None
    return "".join(lines)
