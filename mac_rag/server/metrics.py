"""Metrics for Prometheus: durations of requests and their parts, sizes of batches and banks, jobs, memory, disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from mac_rag.server.catalog import BankCatalog

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server.

    Args:
        catalog: the server's banks, whose sizes are read at each scrape.
    """

    def __init__(self, catalog: BankCatalog) -> None:
        registry = self._registry = CollectorRegistry()
        seconds = partial(Histogram, buckets=_SECONDS, registry=registry)
        labels = ("method", "route", "status")
        self._requests = Counter("mac_rag_requests", "Requests by route and status.", labels, registry=registry)
        whole = "Seconds from a request to the end of its response."
        self._request_seconds = seconds("mac_rag_request_seconds", whole, ("route",))
        part = "Seconds of the parts of requests, waiting for a turn included."
        self._parts = seconds("mac_rag_part_seconds", part, ("part",))
        together, sizes = "Questions that were answered together.", (1, 2, 4, 8, 16, 32)
        self._batches = Histogram("mac_rag_batch_questions", together, buckets=sizes, registry=registry)
        self.pending = Gauge("mac_rag_pending", "Work that waits or runs.", ("kind",), registry=registry)
        self._registry.register(_BankCollector(catalog))
        ProcessCollector(registry=self._registry)  # memory, time and open files of the process

    def watch(self, folder: Path, jobs: Callable[[], Iterable[str]]) -> None:
        """Has each scrape measure the disk of a folder, and count jobs by their states."""
        room = Gauge("mac_rag_disk_free_bytes", "Free bytes of the disk with the data.", registry=self._registry)
        room.set_function(lambda: shutil.disk_usage(folder).free)
        by_state = Gauge("mac_rag_jobs", "Jobs by state.", ("state",), registry=self._registry)

        def count(state: str) -> int:
            return sum(other == state for other in jobs())

        for state in ("waiting", "running", "done", "failed", "cancelled", "interrupted"):
            by_state.labels(state).set_function(partial(count, state))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts a request."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures how long the block takes, as a part of a request."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts.labels(name).observe(time.perf_counter() - began)

    def batch(self, questions: int) -> None:
        """Counts a batch."""
        self._batches.observe(questions)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _BankCollector:
    """Collects the sizes of banks, and hits and misses of their caches."""

    def __init__(self, catalog: BankCatalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterable[Metric]:
        documents = GaugeMetricFamily("mac_rag_bank_documents", "Documents of a bank.", labels=("bank",))
        size = GaugeMetricFamily("mac_rag_bank_bytes", "Bytes of a bank's rows.", labels=("bank",))
        lookups = CounterMetricFamily(
            "mac_rag_question_cache", "Questions looked up in the cache of recent ones.", labels=("bank", "result")
        )
        for bank in self._catalog.served():
            hits, misses = bank.engine.recent_questions
            documents.add_metric([bank.name], len(bank))
            size.add_metric([bank.name], bank.bank.nbytes)
            lookups.add_metric([bank.name, "hit"], hits)
            lookups.add_metric([bank.name, "miss"], misses)
        return [documents, size, lookups]
