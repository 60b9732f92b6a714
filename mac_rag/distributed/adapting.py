"""Amortization on Ray: many processes encode, and the calling one reads, commits, and keeps everything in order.

Passes of the model do not depend on each other. So the windows of token rows that `mac_rag.adapting` would encode one
after another go to actors, a few at a time, and their results come back in the order of the windows. Everything else,
such as commits and the retriever, is that of `MACEngine.adapt`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mac_rag.adapting import Written
from mac_rag.distributed.cluster import connected_ray
from mac_rag.distributed.messages import Array, to_array
from mac_rag.errors import FingerprintError, MACError, WorkerError

if TYPE_CHECKING:
    from mac_rag.model import MACModel

_CPUS = 1  # of an actor, and so its threads: the bits of memory tokens can depend on the number of threads
_DEATHS = 3  # of an actor, and of a window's actors, that are made good
_AHEAD = 2  # windows for each actor that are sent before their results are wanted


class Amortizer:
    """An actor that encodes token rows with its own copy of the model.

    Args:
        model: name or path of the model.
        fingerprint: fingerprint of the model in the calling process.
    """

    def __init__(self, model: str, fingerprint: str) -> None:
        self._name = model
        self._fingerprint = fingerprint

    def amortize(self, rows: Sequence[Sequence[int]]) -> Array | list[Array]:
        """What `MACModel.amortize_rows` makes of rows, as arrays.

        Raises:
            FingerprintError: if another model than in the calling process has this name here.
        """
        made = self._model.amortize_rows(rows)
        return to_array(made) if isinstance(made, Tensor) else [to_array(row) for row in made]

    @cached_property
    def _model(self) -> MACModel:  # not loaded by `__init__`, whose errors Ray reports as the death of the actor
        from mac_rag.model import MACModel

        torch.set_num_threads(_CPUS)
        model = MACModel.from_pretrained(self._name)
        if model.fingerprint != self._fingerprint:
            raise FingerprintError(
                f"{self._name} is another model here than where the command was called; install the same model on all "
                "machines of the cluster"
            )
        return model


class RayWorkers:
    """Encodes windows of token rows on a Ray cluster; `MACEngine` takes it as `workers`.

    The bank has the same rows as without it; they are equal bit by bit if both use the same kind of processor, versions
    of libraries and number of threads (an actor has one thread). An actor that dies is replaced, and its window is
    encoded again.

    Args:
        model: the model of the engine, on any device.
        name: name or path by which actors load the same model; all machines must have it there.
        actors: largest number of actors; None for one per GPU of the cluster, or per CPU if there are no GPUs.

    Raises:
        ConfigError: if Ray is missing, or its cluster cannot be reached.
    """

    def __init__(self, model: MACModel, name: str, actors: int | None = None) -> None:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's core repairs its errors by itself
        self._ray = connected_ray()
        resources = self._ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self._most = actors or max(1, gpus or int(resources.get("CPU", 1)) // _CPUS)
        options = {
            "num_cpus": _CPUS,
            "num_gpus": 1 if gpus else 0,
            "max_restarts": _DEATHS,
            "max_task_retries": _DEATHS,
        }
        place = str(Path(name).resolve()) if Path(name).is_dir() else name
        self._start: Callable[[], Any] = lambda: self._ray.remote(**options)(Amortizer).remote(place, model.fingerprint)

    def __call__(
        self, windows: Iterable[Sequence[Sequence[int]]], advance: Callable[[int], object] | None
    ) -> Iterator[Written | None]:
        """Yields what the model makes of each window, in their order; None for a window without rows.

        Args:
            windows: rows of token ids; read a little ahead of the results.
            advance: called after each window, with its number of rows.

        Raises:
            MACError: as `MACModel.amortize_rows`; from `Amortizer.amortize`.
            WorkerError: if actors die repeatedly, or an actor fails with an error that is no `MACError`.
        """
        actors: list[Any] = []
        sent: deque[tuple[Any, int]] = deque()
        try:
            for rows in windows:
                if not rows:
                    sent.append((None, 0))
                else:
                    actors.append(self._start() if len(actors) < self._most else actors.pop(0))  # each has its turn
                    sent.append((actors[-1].amortize.remote(rows), len(rows)))
                if len(sent) > _AHEAD * self._most:
                    yield self._received(*sent.popleft(), advance)
            while sent:
                yield self._received(*sent.popleft(), advance)
        finally:
            for actor in actors:
                self._ray.kill(actor)

    def _received(self, reference: Any, rows: int, advance: Callable[[int], object] | None) -> Written | None:
        if reference is None:
            return None
        errors = self._ray.exceptions
        try:
            made = self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, MACError):
                raise error.cause from None
            cause = error.cause or error
            raise WorkerError(
                f"a worker failed: {type(cause).__name__}: {cause}; what was committed is kept, so remove the cause, "
                "and run the command again"
            ) from error
        except errors.RayError as error:
            raise WorkerError(
                f"workers have died repeatedly over {rows:,} rows of documents; if they ran out of memory, take fewer "
                f"actors (--actors); what was committed is kept ({str(error).strip().splitlines()[0][:200]})"
            ) from error
        if advance is not None:
            advance(rows)
        return torch.tensor(made) if not isinstance(made, list) else [torch.tensor(row) for row in made]
