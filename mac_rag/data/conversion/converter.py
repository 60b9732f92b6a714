"""Texts of other programs' files, read in a separate process within bounds of size, time and memory.

These formats are complicated, and a stranger may have made a file to exploit that. A file can slow, fill or crash only
that process, which runs no code that a file holds, and follows no reference out of a file.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any, BinaryIO, NamedTuple

from mac_rag.data.conversion.text import Notices, UnreadableError, check_size, cleaned, one_line
from mac_rag.errors import DataError
from mac_rag.untrusted_files import DOCUMENT, METADATA_DEPTH, MalformedError, open_file, parse_json

# Ending of the name -> pandoc's name of the format.
_PANDOC = {".docx": "docx", ".docm": "docx", ".odt": "odt", ".rtf": "rtf", ".tex": "latex", ".ipynb": "ipynb"}
SUFFIXES = (".html", ".htm", ".xhtml", ".pdf", ".epub", *_PANDOC)
_SECONDS = 120.0  # most time for one file
# Most bytes of an answer, which is a line of JSON in ASCII: up to six bytes for each character.
_LONGEST_LINE = 6 * DOCUMENT + (1 << 20)
# Most bytes of a file, most of which may be pictures.
LARGEST_FILE = 256 << 20
_MEMORY = 4 << 30  # bytes of address space; the libraries take some of it
_PRIVATE = re.compile(r"[\ue000-\uf8ff]+")


class Converted(NamedTuple):
    """The text of a file.

    Attributes:
        text: the text, with one line for each paragraph.
        title: the title that the file gives; None if it gives none.
        notices: a line for each kind of thing that is left out though a reader of the file sees it, with its places.
    """

    text: str
    title: str | None
    notices: tuple[str, ...]


def is_converted(path: Path) -> bool:
    """True for a file that must be converted, by the ending of its name."""
    return path.suffix.lower() in SUFFIXES


def convert(path: Path) -> Converted:
    """Reads the text of a file with one of the endings `SUFFIXES`, which tell the format.

    Raises:
        DataError: if pandoc, which reads some formats, is not installed; for a file that is missing, malformed,
            encrypted, or without text, or that takes more time, memory or space than one document may. Names the file
            and the remedy.
    """
    answer = _WORKER.ask(path, _SECONDS)
    if "error" in answer:
        raise DataError(f"{path} {answer['error']}")
    return Converted(answer["text"], answer["title"], tuple(answer["notices"]))


def interrupt() -> None:
    """Ends the conversion that another thread waits for, which gets an error; no effect without one."""
    _WORKER.interrupt()


class _Worker:
    """The process that converts files. It starts with the first file, is reused, and ends with the parent process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it; a fork must not use its parent's
        self._interrupted = False

    def ask(self, path: Path, seconds: float) -> dict[str, Any]:
        with self._lock:
            self._interrupted = False
            line, late = self._line(path, seconds)
            if not (line or late or self._interrupted):  # perhaps the file was not to blame: another program killed it
                line, late = self._line(path, seconds)
        if line:
            try:
                answer: dict[str, Any] = parse_json(line, depth=METADATA_DEPTH)
            except MalformedError as error:
                raise DataError(f"{path} cannot be converted: {error}; convert it to text by other means") from None
            return answer
        if late:
            return {"error": f"takes more than {seconds:g} s to convert; convert it to text by other means"}
        return {"error": "cannot be converted: its reader has crashed; convert it to text by other means"}

    def _line(self, path: Path, seconds: float) -> tuple[bytes, bool]:
        """The process' answer, empty if it has none; True if it took too long."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        late = False

        def end() -> None:
            nonlocal late
            late = True
            _kill(process)

        timer = Timer(seconds, end)
        timer.daemon = True
        timer.start()
        line = b""
        try:
            process.stdin.write(json.dumps({"path": os.path.abspath(path)}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(_LONGEST_LINE)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
            if not line.endswith(b"\n"):  # also after an interrupt: it must not be taken for that of the next file
                line = b""
                self._end()
        return line, late

    def interrupt(self) -> None:
        process = self._process
        if self._lock.locked():
            self._interrupted = True
            if process is not None and self._owner == os.getpid():
                _kill(process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            # -P: imports no module from the working directory, which may hold somebody else's files.
            paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from mac_rag.data.conversion.converter import main; main()"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C goes to the command only, which ends this process, and pandoc, a process of the same group.
                start_new_session=True,
            )
            self._owner = os.getpid()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            _kill(process)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_WORKER = _Worker()
atexit.register(_WORKER._end)


def converted(path: Path) -> dict[str, object]:
    """The answer for one file."""
    notices = Notices()
    try:
        with open_file(path, follow=True) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_FILE:
                raise UnreadableError(f"has more than {LARGEST_FILE:,} bytes; split it into files")
            text, title = _read(file, path.suffix.lower(), notices)
        text = cleaned(text)
        check_size(len(text.encode()))
        for letters in _PRIVATE.findall(text):
            notices.add("characters that have a meaning in their font alone are kept", letters)
        return {"text": text, "title": one_line(title or "") or None, "notices": notices.lines()}
    except UnreadableError as error:
        found = "; ".join(notices.lines())
        return {"error": f"{error} ({found})" if found else str(error)}
    except MalformedError as error:
        return {"error": f"cannot be read: {error}; give a file"}
    except OSError as error:
        return {"error": f"cannot be read: {error.strerror or error}; give a file that exists and is readable"}
    except MemoryError:
        return {"error": "takes too much memory to convert; convert it to text by other means"}


def _read(file: BinaryIO, suffix: str, notices: Notices) -> tuple[str, str | None]:
    """Text and title. The libraries are imported for the formats that need them, and in the process alone."""
    if suffix == ".pdf":
        from mac_rag.data.conversion.pdf import read_pdf

        return read_pdf(file, notices)
    if suffix == ".epub":
        from mac_rag.data.conversion.office import read_book

        return read_book(file, notices)
    if suffix in _PANDOC:
        from mac_rag.data.conversion.office import read_office

        return read_office(file, _PANDOC[suffix], notices)
    from mac_rag.data.conversion.html import read_html

    return read_html(file, notices, xhtml=suffix == ".xhtml")


def main() -> None:
    """The process that converts files: reads lines of JSON, `{"path": ...}`, and answers each with a text or an error.

    It ends when its standard input ends.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not be taken for an answer
    logging.disable()
    _bound_memory()
    for line in sys.stdin.buffer:
        answer = converted(Path(json.loads(line)["path"]))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _bound_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, OSError, ValueError):  # not every system has it; bounds of size and time still hold
        pass
