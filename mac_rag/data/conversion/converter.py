"""Starts the process that converts files, asks it for one text after the other, and ends it if one takes too long."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple

from mac_rag.errors import DataError
from mac_rag.untrusted_files import DOCUMENT, METADATA_DEPTH, MalformedError, parse_json

SUFFIXES = (".html", ".htm", ".xhtml", ".pdf", ".docx")
SECONDS = 120.0  # for one file
# A line of JSON in ASCII: six bytes for a character that is not.
_LONGEST_LINE = 6 * DOCUMENT + (1 << 20)


class Converted(NamedTuple):
    """The text of a file.

    Attributes:
        text: the text; paragraphs are lines.
        title: what the file calls itself; None if it does not.
    """

    text: str
    title: str | None


def is_converted(path: Path) -> bool:
    """True for a file whose name says that it has to be converted."""
    return path.suffix.lower() in SUFFIXES


def convert(path: Path, *, seconds: float = SECONDS) -> Converted:
    """The text of an HTML, PDF or DOCX file, by its name's ending.

    Args:
        path: the file.
        seconds: after that time, the file is refused.

    Raises:
        DataError: when what reads the format is not installed; for a file that is missing, malformed, encrypted, or
            without text, or that takes more time, memory or space than one document may; names the file and the remedy.
    """
    answer = _WORKER.ask(path, seconds)
    if "error" in answer:
        raise DataError(f"{path} {answer['error']}")
    return Converted(answer["text"], answer["title"])


class _Worker:
    """The process. It starts with the first file, goes on with further ones, and ends with this one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork does not talk to its parent's process

    def ask(self, path: Path, seconds: float) -> dict[str, Any]:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            late = False

            def end() -> None:
                nonlocal late
                late = True
                process.kill()

            timer = Timer(seconds, end)
            timer.daemon = True
            timer.start()
            answered = False
            try:
                process.stdin.write(json.dumps({"path": os.path.abspath(path)}).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(_LONGEST_LINE)
                answered = line.endswith(b"\n")
            except BrokenPipeError:
                line = b""
            finally:
                timer.cancel()
                if not answered:  # an interrupt, too: its answer must not be taken for that of the next file
                    self._end()
        if answered:
            try:
                answer: dict[str, Any] = parse_json(line, depth=METADATA_DEPTH)
            except MalformedError as error:
                raise DataError(f"{path} cannot be converted: {error}") from None
            return answer
        if late:
            return {"error": f"takes more than {seconds:g} s to convert; convert it to text by other means"}
        return {"error": "cannot be converted: what reads it has crashed; convert it to text by other means"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            # -P: no module is imported from the working directory, which may be full of somebody's files.
            paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mac_rag.data.conversion.worker"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the command, which ends this
            )
            self._owner = os.getpid()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()


_WORKER = _Worker()
atexit.register(_WORKER._end)
