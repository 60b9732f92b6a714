"""Jobs: adapting that takes longer than a request should wait. They outlive their client, and the server's process."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, Literal

from mac_rag.atomic_files import make_folder, private
from mac_rag.data.conversion import converter
from mac_rag.data.readers import ROWS, read_good_documents
from mac_rag.data.types import Document
from mac_rag.errors import CancelledError, ConfigError, DataError, FullDiskError, MACError
from mac_rag.server.api_errors import APIError, closing, error_of, unexpected
from mac_rag.server.catalog import ServedBank

_log = logging.getLogger(__name__)

State = Literal["waiting", "running", "done", "failed", "cancelled", "interrupted"]
# Most documents in one commit. Progress is reported after each commit.
_GROUP = 32
_GROUP_CHARACTERS = 100_000
_TURN = 1.0  # seconds of reading after which another key's job may go on
_MOST_LISTED = 100  # left-out documents that are listed with their reasons
_FINISHED = 200  # jobs of each key that are still listed after their end
_PIECE = 1 << 20
# Endings that `mac_rag.data.readers` tells apart; a file with any other ending is read as text.
_ENDINGS = (*ROWS, ".json", *converter.SUFFIXES)
_DOCUMENTS = "documents"  # the file of documents that came as JSON


class Upload:
    """The folder of a job's files. Files have names of the server's choice there.

    Args:
        root: the server's folder of uploads.

    Attributes:
        name: the folder's name, which is the job's id.
        names: the client's name of each file.
    """

    def __init__(self, root: Path) -> None:
        make_folder(root)
        self.name = f"job-{token_hex(12)}"
        self._folder = root / self.name
        make_folder(self._folder)
        self.names: dict[str, str] = {}

    def add_file(self, name: str, read: Callable[[int], bytes]) -> None:
        """Keeps a file."""
        shown = PurePosixPath(name.replace("\\", "/")).name or "unnamed"
        ending = PurePosixPath(shown).suffix.lower()
        own = f"{len(self.names)}{ending if ending in _ENDINGS else '.txt'}"
        self._write(own, iter(lambda: read(_PIECE), b""))
        self.names[own] = shown

    def add_documents(self, documents: list[Document]) -> None:
        """Keeps documents."""
        lines = (json.dumps([one.id, one.text, dict(one.metadata)]).encode() + b"\n" for one in documents)
        self._write(_DOCUMENTS, lines)
        self.names[_DOCUMENTS] = _DOCUMENTS

    def _write(self, name: str, pieces: Iterator[bytes]) -> None:
        with open(self._folder / name, "xb", opener=private) as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Removes the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(eq=False)
class Job:
    """One job.

    Attributes:
        id: its random name.
        bank: name of the bank.
        owner: name of the key that started it.
        created: when it was started, in ISO 8601.
        state: its state; `interrupted` if the server ended and the job cannot go on.
        total: number of documents; None until all files have been read.
        finished: number of documents that are in the bank now, or were left out.
        added, updated, unchanged: numbers of documents. A job that goes on after the server's end counts anew, so what
            it had written before is unchanged.
        left_out_count: number of files and documents that could not be read or adapted.
        left_out: the first of them, with the reasons.
        error: why the job failed or was interrupted; None if it was not.
        names: the server's name of each file -> the client's.
        cancelled: set to end the job.
    """

    id: str
    bank: str
    owner: str
    created: str
    state: State = "waiting"
    total: int | None = None
    finished: int = 0
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    left_out_count: int = 0
    left_out: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def is_open(self) -> bool:
        """True if it has not ended."""
        return self.state in ("waiting", "running")

    def described(self) -> dict[str, Any]:
        """The job as clients see it."""
        own = {name: value for name, value in vars(self).items() if name not in ("names", "cancelled")}
        return {"id": own.pop("id"), "object": "job", **own, "left_out": list(self.left_out)}

    def leave_out(self, what: str, why: str) -> None:
        """Notes a document or file that is left out, and why."""
        self.finished += 1
        self.left_out_count += 1
        self.leave_out_part(what, why)

    def leave_out_part(self, what: str, why: str) -> None:
        """Notes what is left out of a file."""
        if len(self.left_out) < _MOST_LISTED:
            self.left_out.append({"document": what, "reason": why})


class _Store:
    """The jobs in a SQLite database, each as one JSON object.

    Raises:
        ConfigError: for a file that is no such database.
        FullDiskError: from each method if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "ab", opener=private):
            pass
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        with self._errors():
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("CREATE TABLE IF NOT EXISTS job (id TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")

    def load(self) -> dict[str, Job]:
        """All jobs, the oldest first."""
        with self._errors():
            rows = self._database.execute("SELECT value FROM job ORDER BY rowid").fetchall()
            return {job.id: job for job in (Job(**json.loads(value)) for (value,) in rows)}

    def save(self, job: Job) -> None:
        values = {name: value for name, value in vars(job).items() if name != "cancelled"}
        with self._errors():
            self._database.execute(
                "INSERT INTO job VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET value = ?2",
                (job.id, json.dumps(values)),
            )

    def delete(self, job: Job) -> None:
        with self._errors():
            self._database.execute("DELETE FROM job WHERE id = ?", (job.id,))

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise FullDiskError(f"{self._path} cannot be written, because the disk is full") from None
            raise ConfigError(f"{self._path} cannot be used: {error}; remove it, and all jobs are forgotten") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._path} holds no jobs: {error}; remove it, and all jobs are forgotten") from None


class Jobs:
    """Runs jobs in a thread of its own. Keys share its time, and each key's jobs run one after the other.

    What a stopped or killed server has not finished goes on at the next start, from the files that were kept.

    Args:
        folder: the server's folder.
        most: most jobs of one key that wait or run at a time.
        fault_of: says what of a document is too long; None if nothing is.
        bank: returns a bank by its name.
        on_end: called with each job when it has ended.
    """

    def __init__(
        self,
        folder: Path,
        most: int,
        fault_of: Callable[[Document], str | None],
        bank: Callable[[str], ServedBank],
        on_end: Callable[[Job], object],
    ) -> None:
        self.uploads = folder / "uploads"
        self._most = most
        self._fault_of = fault_of
        self._bank = bank
        self._on_end = on_end
        self._changed = threading.Condition()
        self._store = _Store(folder / "jobs.sqlite")
        self._jobs = self._store.load()
        self._steps: dict[str, Iterator[None]] = {}  # of the jobs that have begun
        self._used: dict[str, float] = {}  # seconds that each key's jobs have taken
        self._current: Job | None = None  # the one that is being worked on now
        self._closing = False
        self._go_on()
        self._thread = threading.Thread(target=self._work, name="mac-rag-jobs", daemon=True)
        self._thread.start()

    def start(self, bank: ServedBank, owner: str, upload: Upload) -> Job:
        """Queues a job, which is on the disk when the call returns.

        Raises:
            APIError: 429 if too many jobs of the key wait; 503 if the server is closing.
        """
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        job = Job(upload.name, bank.name, owner, created, names=upload.names)
        with self._changed:
            if self._closing:
                raise closing("the server is closing, so nothing was done")
            mine = [other for other in self._jobs.values() if other.owner == owner]
            if sum(other.is_open for other in mine) >= self._most:
                raise APIError(429, f"{self._most} jobs wait or run; try again later", code="busy", retry_after=5)
            self._store.save(job)
            self._jobs[job.id] = job
            for other in [other for other in mine if not other.is_open][:-_FINISHED]:
                self._store.delete(self._jobs.pop(other.id))
            if not any(other.is_open for other in mine):  # who was away does not save time up
                others = [self._used.get(other.owner, 0.0) for other in self._open() if other is not job]
                self._used[owner] = max(self._used.get(owner, 0.0), min(others, default=0.0))
            self._changed.notify_all()
        return job

    def get(self, name: str) -> Job | None:
        """A job by its name; None for an unknown one."""
        with self._changed:
            return self._jobs.get(name)

    def all(self) -> list[Job]:
        """All jobs, the newest first."""
        with self._changed:
            return list(reversed(self._jobs.values()))

    def cancel(self, job: Job) -> None:
        """Ends a job; documents that are in the bank stay there. What is being converted or computed is given up."""
        with self._changed:
            job.cancelled.set()
            if job is self._current:
                converter.interrupt()
            elif job.is_open:
                job.state = "cancelled"
                self._end(job)

    def cancel_all_of(self, bank: str) -> None:
        """Ends the jobs of a bank that is deleted."""
        for job in self.all():
            if job.bank == bank:
                self.cancel(job)

    def stop(self) -> None:
        """Interrupts all jobs; they go on at the next start."""
        with self._changed:
            if not self._closing:
                self._closing = True
                converter.interrupt()
                self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """As `stop`; waits so long for the present step. Returns False if that goes on."""
        self.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._store.close()
        return True

    def _open(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.is_open]

    def _go_on(self) -> None:
        """Has the jobs of the process before go on, and removes files that belong to no job."""
        for job in self._open():
            missing = [name for name in job.names if not (self.uploads / job.id / name).exists()]
            if missing:
                job.state, job.error = "interrupted", "the server ended, and the job's files are gone; send them again"
            else:
                job.state, job.total, job.finished, job.added, job.updated, job.unchanged = "waiting", None, 0, 0, 0, 0
                job.left_out_count, job.left_out = 0, []
            self._store.save(job)
        kept = {job.id for job in self._open()}
        with suppress(FileNotFoundError):
            for folder in self.uploads.iterdir():
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _work(self) -> None:
        while job := self._next():
            began = time.monotonic()
            has_ended = self._has_ended(job)
            with self._changed:
                self._current = None
                self._used[job.owner] = self._used.get(job.owner, 0.0) + time.monotonic() - began
                if job.cancelled.is_set() and job.is_open:
                    job.state, has_ended = "cancelled", True
                if has_ended:
                    self._end(job)
                elif not self._closing:
                    self._save(job)

    def _next(self) -> Job | None:
        """The job that goes on next; None if the server is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._open())
            if self._closing:
                return None
            self._current = min(self._open(), key=lambda job: self._used.get(job.owner, 0.0))
            return self._current

    def _has_ended(self, job: Job) -> bool:
        """Lets a job go on for a while. Returns True at its end, and sets its state then."""
        try:
            if job.id not in self._steps:
                job.state = "running"
                self._steps[job.id] = self._run(job, self._bank(job.bank))
            if next(self._steps[job.id], job) is not job:
                return False
            job.state, job.total = "done", job.finished
        except (MACError, APIError) as error:
            if job.cancelled.is_set():
                job.state = "cancelled"
            elif isinstance(error, CancelledError):
                return False  # the server is closing
            else:
                job.error, job.state = error_of(error).message, "failed"
                _log.warning("job %s on bank %s failed: %s", job.id, job.bank, type(error).__name__)
        except Exception:
            _log.exception("job %s on bank %s failed", job.id, job.bank)
            job.error, job.state = unexpected().message, "failed"
        return True

    def _end(self, job: Job) -> None:
        self._save(job)
        self._steps.pop(job.id, None)
        shutil.rmtree(self.uploads / job.id, ignore_errors=True)
        self._on_end(job)

    def _save(self, job: Job) -> None:
        """Saves the state of a job that goes on even if that fails."""
        try:
            self._store.save(job)
        except MACError:
            _log.exception("the state of job %s was not saved", job.id)

    def _is_over(self, job: Job) -> bool:
        return self._closing or job.cancelled.is_set()

    def _run(self, job: Job, bank: ServedBank) -> Iterator[None]:
        """Adapts the bank to the job's documents; yields when another job may go on."""
        group: list[Document] = []
        size, seen, began = 0, set[str](), time.monotonic()

        def put() -> None:
            left_out = job.left_out_count
            report = bank.put(
                group,
                on_bad=lambda document, error: job.leave_out(document.id, str(error)),
                cancelled=lambda: self._is_over(job),
            )
            job.added += report.added
            job.updated += report.updated
            job.unchanged += report.unchanged
            job.finished += len(group) - (job.left_out_count - left_out)

        for document in self._documents(job):
            if self._is_over(job):
                raise CancelledError("the job was cancelled")
            if document.id in seen:
                job.leave_out(document.id, "another document before it has this id")
            else:
                seen.add(document.id)
                group.append(document)
                size += len(document.text)
            if len(group) >= _GROUP or size > _GROUP_CHARACTERS:
                put()
                group, size = [], 0
                yield
                began = time.monotonic()
            elif time.monotonic() - began > _TURN:
                yield
                began = time.monotonic()
        if self._is_over(job):
            raise CancelledError("the job was cancelled")
        if group:
            put()

    def _documents(self, job: Job) -> Iterator[Document]:
        """The documents of a job's files. What cannot be read is left out under the client's name of the file."""
        for own, name in job.names.items():
            if self._is_over(job):
                return
            path = self.uploads / job.id / own
            if own == _DOCUMENTS:
                with path.open("rb") as lines:
                    yield from (Document(*json.loads(line)) for line in lines)
                continue

            def refuse(error: DataError, path: Path = path, name: str = name) -> None:
                if self._is_over(job):
                    raise CancelledError("the job was cancelled")
                job.leave_out(name, str(error).replace(str(path), name))

            def notify(_: Path, notice: str, name: str = name) -> None:
                job.leave_out_part(name, notice)

            for _, document in read_good_documents([path], refuse, notify=notify):
                if path.suffix not in ROWS:
                    document = Document(name, document.text, document.metadata)
                fault = self._fault_of(document)
                if fault is None:
                    yield document
                else:
                    job.leave_out(document.id[:1_000], fault)
