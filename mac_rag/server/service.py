"""The parts of a server, without HTTP: the model, banks, threads, jobs, keys and logs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal

from mac_rag.atomic_files import make_writable_folder, private
from mac_rag.bank.database import WriterLock
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, MACError, ModelLoadError
from mac_rag.model import MACModel
from mac_rag.server.api_errors import APIError, closing, error_of, no_such_bank, unexpected
from mac_rag.server.asking import Asking
from mac_rag.server.catalog import BankCatalog, ServedBank
from mac_rag.server.keys import KeyStore, Principal
from mac_rag.server.metrics import Metrics
from mac_rag.server.replicas import ReplicatedAsking
from mac_rag.server.workers import Workers

if TYPE_CHECKING:
    from mac_rag.retrieval.dense import Encoder
    from mac_rag.server.replicas import Replicas

_log = logging.getLogger(__name__)

KEYS = "keys.json"
# Longest time in seconds between two questions of one crowd, whose clients read an answer and then ask again.
BETWEEN_QUESTIONS = 0.02


@dataclass(frozen=True)
class Limits:
    """Bounds of requests. A request that exceeds one of them is refused before anything is computed.

    Attributes:
        body_bytes: largest body of a request.
        body_seconds: longest time for a client to send a body.
        question_characters: longest question, text of a prompt or search.
        document_characters: longest document.
        documents: most documents in the body of one request; uploaded files may hold more.
        answer_tokens: longest answer.
        pending: most questions that wait or are answered at a time; one more is refused with 429.
        writes: most changes of banks that wait or run at a time.
        jobs: most jobs that wait or run at a time.
        question_seconds: longest time for a question to wait and be answered.
        requests_per_minute: most requests a minute of one key; 0 for any number.
    """

    body_bytes: int = 64 << 20
    body_seconds: float = 120.0
    question_characters: int = 20_000
    document_characters: int = 4_000_000
    documents: int = 1_000
    answer_tokens: int = 512
    pending: int = 64
    writes: int = 16
    jobs: int = 16
    question_seconds: float = 60.0
    requests_per_minute: int = 1_200


# The name under which `/v1/embeddings` serves the sentence encoder.
EMBEDDING_MODEL = "all-MiniLM-L6-v2"


class Service:
    """One server's state.

    Args:
        folder: the server's folder, which one process at a time can serve.
        model: the model.
        model_name: the API's name of the model.
        limits: bounds of requests; None for the defaults.
        replicas: processes that answer questions, as many as a new bank has shards; None to answer in this process.

    Raises:
        BankError: if another process serves the folder; its uploads and banks stay as they are.
        ConfigError: for an empty name, or one with a colon, which separates model and bank; for a folder that cannot be
            written.
    """

    def __init__(
        self,
        folder: Path,
        model: MACModel,
        model_name: str,
        limits: Limits | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        if ":" in model_name or not model_name:
            raise ConfigError(f"{model_name!r} cannot name a model here; give a name without a colon: --model-name")
        make_writable_folder(folder)
        self._lock = WriterLock(folder / "serve", wait=0)
        self.limits = limits or Limits()
        self.model = model
        self.model_name = model_name
        self.keys = KeyStore(folder / KEYS)
        self.audit = AuditLog(folder / "audit.jsonl")
        self.uploads = folder / "uploads"
        shutil.rmtree(self.uploads, ignore_errors=True)  # left by jobs of a killed process
        self.catalog = BankCatalog(folder, model, None if replicas is None else replicas.count)
        self.metrics = Metrics(self.catalog)
        for bank in self.catalog.served():
            bank.engine.on_batch = self.metrics.batch
        alone = MACEngine(model)
        alone.on_batch = self.metrics.batch
        alone.wait_for_crowds(BETWEEN_QUESTIONS)
        self._replicas = replicas
        if replicas is None:
            self.asking = Asking(alone, self.metrics)
        else:
            self.asking = ReplicatedAsking(alone, self.metrics, replicas, self.catalog)
        self.questions = Workers("questions", self.limits.pending, self.limits.question_seconds)
        self.writes = Workers("writes", self.limits.writes)
        self.reads = Workers("reads", self.limits.pending, self.limits.question_seconds)
        self.jobs = Jobs(self.limits.jobs, self._note_job)
        for kind, workers in (("questions", self.questions), ("writes", self.writes), ("reads", self.reads)):
            self.metrics.pending.labels(kind).set_function(partial(getattr, workers, "pending"))
        self._encoder: Encoder | None = None
        self._encoder_lock = threading.Lock()
        self.ready = True

    def bank(self, name: str, who: Principal) -> ServedBank:
        """A bank that a principal may see.

        Raises:
            APIError: 404 for an unknown bank, and the same 404 for one that the principal may not see.
        """
        if not who.sees(name):
            raise no_such_bank(name)
        return self.catalog.get(name)

    def banks(self, who: Principal) -> list[ServedBank]:
        """The banks that a principal may see."""
        return [bank for bank in self.catalog.served() if who.sees(bank.name)]

    def create_bank(self, name: str, who: Principal, *, retriever: str, keep_texts: bool | None) -> ServedBank:
        """Makes a bank.

        Raises:
            APIError: 403 for a name that the key may not use; and as `BankCatalog.create`.
        """
        if not who.sees(name):
            raise APIError(
                403, f"this key may not make a bank {name!r:.80}; choose a name that matches {' or '.join(who.banks)}"
            )
        bank = self.catalog.create(name, retriever=retriever, keep_texts=keep_texts)
        bank.engine.on_batch = self.metrics.batch
        self.audit.note(who.name, "bank.create", name, retriever=retriever)
        return bank

    def checked_question(self, text: str) -> str:
        """Returns a question, prompt or search if it is not too long.

        Raises:
            APIError: 400 if it has more than `Limits.question_characters`.
        """
        most = self.limits.question_characters
        if len(text) > most:
            raise APIError(
                400, f"a text has {len(text):,} characters, and {most:,} are the most; shorten it", code="too_long"
            )
        return text

    def encoder(self) -> Encoder:
        """The sentence encoder, which the first call loads.

        Raises:
            APIError: 400 if its package is not installed.
        """
        with self._encoder_lock:
            if self._encoder is None:
                from mac_rag.retrieval.encoders import minilm

                try:
                    self._encoder = minilm()
                except ModelLoadError as error:
                    raise APIError(400, f"this server has no sentence encoder: {error}", param="model") from None
            return self._encoder

    def refuse_new_work(self) -> None:
        """Refuses questions and changes from now on; running ones are finished."""
        self.ready = False
        for workers in (self.questions, self.writes, self.reads):
            workers.refuse()

    def close(self) -> None:
        """Finishes running work, and closes all banks."""
        self.refuse_new_work()
        self.jobs.close()
        for workers in (self.questions, self.writes, self.reads):
            workers.close()
        self.catalog.close()
        if self._replicas is not None:
            self._replicas.close()
        self._lock.release()

    def _note_job(self, job: Job) -> None:
        if job.added or job.updated:
            details = {"job": job.id, "added": job.added, "updated": job.updated, "state": job.state}
            self.audit.note(job.owner, "documents.put", job.bank, **details)


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class AuditLog:
    """Appends one line of JSON for each change, after the change is on the disk.

    Args:
        path: the file, created with the mode 0600. If it is moved away, a new one is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def note(self, who: str, action: str, bank: str, **details: Any) -> None:
        """Notes a change.

        Args:
            who: name of the key.
            action: the kind of change, such as `bank.create`.
            bank: name of the bank.
            details: numbers, and ids of documents.
        """
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": moment, "key": who, "action": action, "bank": bank, **details}
        line = json.dumps(record).encode() + b"\n"
        with self._lock, open(self._path, "ab", opener=lambda path, flags: private(path, flags | _NO_FOLLOW)) as file:
            file.write(line)


# Jobs: adapting that takes longer than a request should wait. A job runs on after its client has gone.

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
        listed: the first of them, with the reasons, and what is left out of files.
    """

    def __init__(self) -> None:
        self.number = 0
        self.listed: list[dict[str, str]] = []

    def add(self, what: str, why: str) -> None:
        """Notes a document or file, and why it is left out."""
        self.number += 1
        self.add_part(what, why)

    def add_part(self, what: str, why: str) -> None:
        """Notes what is left out of a file."""
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
                raise closing("the server is closing, so nothing was done")
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
