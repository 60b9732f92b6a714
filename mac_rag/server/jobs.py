"""Jobs: adapting that takes longer than a request should wait. A job runs on after its client has gone."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Literal

from mac_rag.data.types import Document
from mac_rag.errors import MACError
from mac_rag.server.api_errors import APIError, error_of, unexpected
from mac_rag.server.served_bank import ServedBank

_log = logging.getLogger(__name__)

State = Literal["waiting", "running", "done", "failed", "cancelled"]
# Most documents in one commit. Progress is reported, and a job can be cancelled, after each commit.
_GROUP = 32
_GROUP_CHARACTERS = 100_000
_MOST_LISTED = 100  # left-out documents that are listed with their reasons
_FINISHED = 200  # finished jobs that are still listed


class LeftOut:
    """The documents and files that a job left out.

    Attributes:
        number: how many.
        listed: the first of them, with the reasons.
    """

    def __init__(self) -> None:
        self.number = 0
        self.listed: list[dict[str, str]] = []

    def add(self, what: str, why: str) -> None:
        """Notes a document or file, and why it is left out."""
        self.number += 1
        if len(self.listed) < _MOST_LISTED:
            self.listed.append({"document": what, "reason": why})


@dataclass(eq=False)
class Job:
    """One job.

    Attributes:
        id: its random name.
        bank: name of the bank.
        owner: name of the key that started it.
        state: its state.
        total: number of documents; None until all files have been read.
        finished: number of documents that are in the bank now, or were left out.
        added, updated, unchanged: numbers of documents.
        left_out: what could not be read or adapted.
        error: why the job failed; None if it did not.
        cancelled: set to end the job after its present commit.
    """

    id: str
    bank: str
    owner: str
    state: State = "waiting"
    total: int | None = None
    finished: int = 0
    added: int = 0
    updated: int = 0
    unchanged: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    error: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def described(self) -> dict[str, Any]:
        """The job as clients see it."""
        return {
            "id": self.id,
            "object": "job",
            "bank": self.bank,
            "state": self.state,
            "total": self.total,
            "finished": self.finished,
            "added": self.added,
            "updated": self.updated,
            "unchanged": self.unchanged,
            "left_out": list(self.left_out.listed),
            "left_out_count": self.left_out.number,
            "error": self.error,
        }


class Jobs:
    """Runs jobs, one after the other, in a thread of its own.

    Args:
        most: most jobs that wait or run at a time.
        on_end: called with each job when it has ended.
    """

    def __init__(self, most: int, on_end: Callable[[Job], object]) -> None:
        self._most = most
        self._on_end = on_end
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mac-rag-jobs")
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._closing = False

    def start(
        self, bank: ServedBank, owner: str, read: Callable[[LeftOut], Iterable[Document]], clean: Callable[[], object]
    ) -> Job:
        """Queues a job.

        Args:
            bank: the bank.
            owner: name of the key.
            read: reads the documents, and notes what it leaves out.
            clean: removes the uploaded files; called at the end of the job, also of a failed one.

        Raises:
            APIError: 429 if too many jobs wait; 503 if the server is closing.
        """
        job = Job(f"job-{token_hex(12)}", bank.name, owner)
        with self._lock:
            if self._closing:
                raise APIError(
                    503, "the server is closing, so nothing was done; try again", code="closing", retry_after=5
                )
            if sum(other.state in ("waiting", "running") for other in self._jobs.values()) >= self._most:
                raise APIError(429, f"{self._most} jobs wait or run; try again later", code="busy", retry_after=5)
            self._jobs[job.id] = job
            self._pool.submit(self._run, job, bank, read, clean)
            ended = [name for name, other in self._jobs.items() if other.state not in ("waiting", "running")]
            for name in ended[:-_FINISHED]:
                del self._jobs[name]
        return job

    def get(self, name: str) -> Job | None:
        """A job by its name; None for an unknown one."""
        with self._lock:
            return self._jobs.get(name)

    def all(self) -> list[Job]:
        """All jobs, the newest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    def close(self) -> None:
        """Lets the running job finish its present commit, and ends all others."""
        with self._lock:
            self._closing = True
            for job in self._jobs.values():
                job.cancelled.set()
        self._pool.shutdown(wait=True)

    def _run(
        self,
        job: Job,
        bank: ServedBank,
        read: Callable[[LeftOut], Iterable[Document]],
        clean: Callable[[], object],
    ) -> None:
        try:
            if not job.cancelled.is_set():
                job.state = "running"
                documents = _unique(read(job.left_out), job.left_out)
                job.total = len(documents) + job.left_out.number
                job.finished = job.left_out.number
                self._adapt(job, bank, documents)
            job.state = "cancelled" if job.cancelled.is_set() and job.finished != job.total else "done"
        except MACError as error:
            job.error, job.state = error_of(error).message, "failed"
            _log.warning("job %s on bank %s failed: %s", job.id, job.bank, type(error).__name__)
        except APIError as error:
            job.error, job.state = error.message, "failed"
        except Exception:
            _log.exception("job %s on bank %s failed", job.id, job.bank)
            job.error, job.state = unexpected().message, "failed"
        finally:
            try:
                clean()
                self._on_end(job)
            except Exception:
                _log.exception("cleaning up after job %s failed", job.id)

    def _adapt(self, job: Job, bank: ServedBank, documents: list[Document]) -> None:
        for group in _groups(documents):
            if job.cancelled.is_set():
                return
            report = bank.put(group, on_bad=lambda document, error: job.left_out.add(document.id, str(error)))
            job.added += report.added
            job.updated += report.updated
            job.unchanged += report.unchanged
            job.finished += len(group)


def _unique(documents: Iterable[Document], left_out: LeftOut) -> list[Document]:
    """The documents without those whose id an earlier document has, also across commits."""
    unique: dict[str, Document] = {}
    for document in documents:
        if document.id in unique:
            left_out.add(document.id, "another document before it has this id")
        else:
            unique[document.id] = document
    return list(unique.values())


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    for document in documents:
        group.append(document)
        if len(group) >= _GROUP or sum(len(one.text) for one in group) > _GROUP_CHARACTERS:
            yield group
            group = []
    if group:
        yield group
