"""What a training run has left in its folder, read before the run goes on."""

from __future__ import annotations

import re
from pathlib import Path

from mac_rag.errors import DataError
from mac_rag.untrusted_files import ROW, MalformedError, lines_of, open_file, read_json

_LARGEST_STATE = 1 << 16  # bytes
_LOGGED = re.compile(rb'\{"kind": "\w+", "step": (\d{1,18})[,}]')


def finished_steps(output: Path) -> int:
    """Steps of the run in a folder that its newest checkpoint holds; 0 without a checkpoint."""
    checkpoints = checkpoints_in(output / "checkpoints")
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return sorted(folder.glob("step-*"))


def progress_of(checkpoint: Path) -> tuple[int, float | None]:
    """The step at which a checkpoint was written, and the best validation until then.

    Raises:
        DataError: when it is damaged; names its file.
    """
    path = checkpoint / "trainer.json"
    try:
        state = read_json(path, _LARGEST_STATE)
        step, best = state["step"], state["best"]
        if type(step) is not int or step < 0 or isinstance(best, bool) or not isinstance(best, int | float | None):
            raise MalformedError(f"step is {step!r:.40}, and best is {best!r:.40}")
        return step, best
    except (ValueError, KeyError, TypeError) as error:
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
