"""The parts of a server, without HTTP: the model, banks, threads, jobs, keys and logs."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mac_rag.atomic_files import make_writable_folder, private
from mac_rag.bank.database import WriterLock
from mac_rag.data.characters import fault_of
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model import MACModel
from mac_rag.server.api_errors import APIError, no_such_bank
from mac_rag.server.asking import Asking
from mac_rag.server.catalog import BankCatalog, ServedBank, broken_info
from mac_rag.server.jobs import Job, Jobs
from mac_rag.server.keys import KeyStore, Principal
from mac_rag.server.metrics import Metrics
from mac_rag.server.workers import Workers

if TYPE_CHECKING:
    from mac_rag.retrieval.dense import Encoder

_log = logging.getLogger(__name__)

KEYS = "keys.json"
# Longest time in seconds between two questions of one crowd, whose clients read an answer and then ask again.
BETWEEN_QUESTIONS = 0.02


@dataclass(frozen=True)
class Limits:
    """Bounds of requests. A request that exceeds one of them is refused before anything is computed.

    Attributes:
        body_bytes: largest body of a request. Only uploads and documents may have more than 1 MiB.
        bodies_bytes: most bytes of all bodies of one key at a time.
        body_seconds: longest time for a client to send a body.
        question_characters: longest question, text of a prompt or search.
        total_characters: most characters of all messages, or of all texts to embed, of a request.
        document_characters: longest document.
        id_characters: longest id of a document.
        metadata_characters: longest metadata of a document, as JSON.
        answer_tokens: longest answer.
        pending: most questions of one key that wait or are answered at a time; one more is refused with 429.
        writes: most changes of banks of one key that wait or run at a time.
        jobs: most jobs of one key that wait or run at a time.
        question_seconds: longest time for a question to wait and be answered.
        requests_per_minute: most requests a minute of one key; 0 for any number.
    """

    body_bytes: int = 64 << 20
    bodies_bytes: int = 128 << 20
    body_seconds: float = 120.0
    question_characters: int = 20_000
    total_characters: int = 200_000
    document_characters: int = 4_000_000
    id_characters: int = 1_000
    metadata_characters: int = 65_536
    answer_tokens: int = 512
    pending: int = 64
    writes: int = 16
    jobs: int = 16
    question_seconds: float = 60.0
    requests_per_minute: int = 1_200

    def fault_of(self, document: Document) -> str | None:
        """Says what of a document is too long; None if nothing is."""
        if len(document.text) > self.document_characters:
            return f"its text has more than {self.document_characters:,} characters; split it"
        if len(document.id) > self.id_characters:
            return f"its id has more than {self.id_characters:,} characters; give a shorter one"
        # In a valid document, metadata are JSON. `Member.of` refuses all others.
        if len(json.dumps(dict(document.metadata), default=str)) > self.metadata_characters:
            return f"its metadata have more than {self.metadata_characters:,} characters as JSON; leave some out"
        return None


# The name under which `/v1/embeddings` serves the sentence encoder.
EMBEDDING_MODEL = "all-MiniLM-L6-v2"


class Service:
    """One server's state.

    Args:
        folder: the server's folder, which one process at a time can serve.
        model: the model.
        model_name: the API's name of the model.
        limits: bounds of requests; None for the defaults.

    Raises:
        BankError: if another process serves the folder; its uploads and banks stay as they are.
        ConfigError: for an empty name, or one with a colon, which separates model and bank; for a folder that cannot be
            written.
    """

    def __init__(self, folder: Path, model: MACModel, model_name: str, limits: Limits | None = None) -> None:
        if ":" in model_name or not model_name:
            raise ConfigError(f"{model_name!r} cannot name a model here; give a name without a colon: --model-name")
        make_writable_folder(folder)
        self._lock = WriterLock(folder / "serve", wait=0)
        self.limits = limits or Limits()
        self.model = model
        self.model_name = model_name
        self.keys = KeyStore(folder / KEYS)
        self.audit = AuditLog(folder / "audit.jsonl")
        self.catalog = BankCatalog(folder, model)
        self.metrics = Metrics(self.catalog)
        for bank in self.catalog.served():
            bank.engine.on_batch = self.metrics.batch
        alone = MACEngine(model)
        alone.on_batch = self.metrics.batch
        alone.wait_for_crowds(BETWEEN_QUESTIONS)
        self.asking = Asking(alone, self.metrics)
        self.questions = Workers("questions", self.limits.pending, self.limits.question_seconds)
        self.writes = Workers("writes", self.limits.writes)
        # Two at a time, because they compute in Python, where one thread holds up the others.
        self.reads = Workers("reads", self.limits.pending, self.limits.question_seconds, running=2)
        self.jobs = Jobs(folder, self.limits.jobs, self.limits.fault_of, self.catalog.get, self._note_job)
        self.metrics.watch(folder, lambda: [job.state for job in self.jobs.all()])
        for kind, workers in (("questions", self.questions), ("writes", self.writes), ("reads", self.reads)):
            self.metrics.pending.labels(kind).set_function(partial(getattr, workers, "pending"))
        self._encoder: Encoder | None = None
        self._encoder_lock = threading.Lock()
        self.ready = True
        self.stopping = threading.Event()  # set once running changes are to be taken back

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

    def infos(self, who: Principal) -> list[dict[str, Any]]:
        """The banks that a principal may see as clients see them, also those that could not be opened."""
        broken = [name for name in sorted(self.catalog.unavailable) if who.sees(name)]
        return [bank.info() for bank in self.banks(who)] + [broken_info(name) for name in broken]

    def create_bank(self, name: str, who: Principal, *, retriever: str, keep_texts: bool) -> ServedBank:
        """Makes a bank.

        Raises:
            APIError: 403 for a name that the key may not use; and as `BankCatalog.create`.
        """
        self._check_name(name, who)
        bank = self.catalog.create(name, retriever=retriever, keep_texts=keep_texts)
        bank.engine.on_batch = self.metrics.batch
        self.audit.note(who.name, "bank.create", name, retriever=retriever)
        return bank

    def rename_bank(self, name: str, new: str, who: Principal) -> ServedBank:
        """Gives a bank another name.

        Raises:
            APIError: 404 for a bank that the key may not see; 403 for a new name that it may not use; 409 if a job
                waits or runs on the bank; and as `BankCatalog.rename`.
        """
        self.bank(name, who)
        self._check_name(new, who)
        if any(job.bank == name and job.is_open for job in self.jobs.all()):
            raise APIError(409, f"a job waits or runs on bank {name}; wait for its end, or cancel it", code="busy")
        bank = self.catalog.rename(name, new)
        bank.engine.on_batch = self.metrics.batch
        self.audit.note(who.name, "bank.rename", name, new=new)
        return bank

    def forget(self, name: str, document_ids: Sequence[str], who: Principal) -> list[str]:
        """Deletes documents of a bank that the principal may see; as `ServedBank.forget`."""
        gone = self.bank(name, who).forget(document_ids)
        if gone:
            self.audit.note(who.name, "documents.delete", name, ids=gone)
        return gone

    def _check_name(self, name: str, who: Principal) -> None:
        if not who.sees(name):
            raise APIError(
                403, f"this key may not name a bank {name!r:.80}; choose a name that matches {' or '.join(who.banks)}"
            )

    def checked_question(self, text: str) -> str:
        """Returns a question, prompt or search if it is a text, and not too long.

        Raises:
            APIError: 400 if it has more than `Limits.question_characters`, or a character that is none.
        """
        most = self.limits.question_characters
        if len(text) > most:
            raise APIError(
                400, f"a text has {len(text):,} characters, and {most:,} are the most; shorten it", code="too_long"
            )
        fault = fault_of(text)
        if fault is not None:
            raise APIError(400, f"in a text, {fault}", code="not_a_text")
        return text

    def check_total(self, texts: Iterable[str]) -> None:
        """Refuses texts that are too long together.

        Raises:
            APIError: 400 if they have more than `Limits.total_characters`.
        """
        total, most = sum(map(len, texts)), self.limits.total_characters
        if total > most:
            raise APIError(
                400,
                f"all texts together have {total:,} characters, and {most:,} are the most; send fewer",
                code="too_long",
            )

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
        """Refuses questions and changes from now on. Running ones are finished; jobs go on at the next start."""
        self.ready = False
        self.jobs.stop()
        for workers in (self.questions, self.writes, self.reads):
            workers.refuse()

    def give_up(self) -> None:
        """Ends what is still running: questions get an error, changes are taken back."""
        self.stopping.set()
        self.questions.give_up()
        self.reads.give_up()

    def close(self, seconds: float = 3600.0) -> bool:
        """Finishes running work, but waits no longer than that, and closes all banks. Returns False if some goes on."""
        end = time.monotonic() + seconds
        self.refuse_new_work()
        ended = [
            part.close(max(0.0, end - time.monotonic()))
            for part in (self.jobs, self.questions, self.writes, self.reads, self.catalog)
        ]
        if not all(ended):
            _log.warning("some work is not finished; what it has not committed is taken back")
        self._lock.release()
        return all(ended)

    def _note_job(self, job: Job) -> None:
        if job.added or job.updated:
            details = {"job": job.id, "added": job.added, "updated": job.updated, "state": job.state}
            self.audit.note(job.owner, "documents.put", job.bank, **details)


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class AuditLog:
    """Appends one line of JSON for each change, after the change is on the disk. If that fails, the log gets the line.

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
        try:
            with self._lock, open(self._path, "ab", opener=_appending) as file:
                file.write(line)
        except OSError as error:
            _log.error("the audit log cannot be written (%s): %s", error.strerror, line.decode().rstrip())


def _appending(path: str, flags: int) -> int:
    return private(path, flags | _NO_FOLLOW)
