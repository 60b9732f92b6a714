"""Every call of the file system fails once, in each of several ways, during every change.

A change that one engine makes leaves bank and retriever as they were, in memory and on disk, or for a change of several
commits as after one of them; the same call then succeeds. A change that is a process of its own leaves a folder where
it can be made again.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import Document as IndexDocument

from mac_rag.bank import MemoryBank
from mac_rag.bank.verify import verify
from mac_rag.config import BoundConfig
from mac_rag.engine import MACEngine
from mac_rag.errors import MACError
from mac_rag.integrations.llama_index import MemoryWriter
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever, DenseRetriever
from tests.retrieval.helpers import WordEncoder
from tests.torture.changes import CHANGED, CHANGES, STREAM, Interrupted, bank_state, small_model
from tests.torture.changes import state_of as _state_of
from tests.torture.mutations import copy
from tests.torture.part import Lost, Part
from tests.torture.system import FAIL_ONE, FAIL_SPACE, INTERRUPT, System, watching

HOWS = {
    "EIO": (FAIL_ONE, errno.EIO),
    "EACCES": (FAIL_ONE, errno.EACCES),
    "a full disk": (FAIL_SPACE, errno.ENOSPC),
    "a quota": (FAIL_SPACE, errno.EDQUOT),
    "Ctrl-C": (INTERRUPT, 0),
}
STOPPED = (MACError, KeyboardInterrupt)


class Example:
    """A folder, and a change that is made in it while calls fail.

    Args:
        place: an empty folder.
        model: the model.

    Attributes:
        folder: the folder before the change.
        calls: the number of calls that concern the folder while nothing fails.
    """

    folder: Path
    calls: int

    def fail(self, folder: Path, how: str, number: int) -> bool:
        """Makes the change in a copy of the folder while a call fails, and checks what is left.

        Args:
            folder: the copy.
            how: one of `HOWS`.
            number: the number of the call.

        Returns:
            True if a call has failed.
        """
        raise NotImplementedError


class EngineChange(Example):
    """A change that an open engine makes."""

    def __init__(self, name: str, place: Path, model: MACModel) -> None:
        self.folder, self.name, self._model = place / "example", name, model
        self._kind, _, variant = name.partition(", ")
        self.folder.mkdir(parents=True)
        with MemoryBank.create(self.folder / "bank", model.fingerprint, keep_texts=variant == "texts") as bank:
            engine = MACEngine(model, bank)
            engine.adapt(STREAM[:5])
            engine.adapt(STREAM[5:7])
            engine.forget(STREAM[6].id)
        with self._opened(copy(self.folder, place / "whole")) as (engine, system):
            _state(engine)  # as before a change that is to fail, so that the same is cached
            before = system.calls
            self._run(engine)
            self.calls = system.calls - before
            self._expected = _state(engine)

    @contextmanager
    def _opened(self, folder: Path) -> Iterator[tuple[MACEngine, System]]:
        """An engine and the retriever that its bank was adapted to; for `reconcile`, what it should become."""
        held = BM25Retriever()
        held.add(STREAM[:6])
        if self.name == "reconcile":
            held.delete(STREAM[0].id)
            held.put([CHANGED, STREAM[8]])
        bound = BoundConfig(maximum=8, method="nearest-averaging") if self.name == "adapt, bounded" else None
        with watching(folder) as system, MemoryBank.open(folder / "bank", write=True) as bank:
            yield MACEngine(self._model, bank, held, bound=bound), system

    def _run(self, engine: MACEngine) -> None:
        new = [CHANGED, *STREAM[6:12]]
        match self._kind:
            case "forget":
                engine.forget(STREAM[0].id)
            case "reconcile":
                engine.reconcile()
            case "compact":
                engine.compact()
            case "LlamaIndex":
                nodes = [IndexDocument(id_=each.id, text=each.text, metadata=dict(each.metadata)) for each in new]
                IngestionPipeline(transformations=[MemoryWriter(engine)], disable_cache=True).run(documents=nodes)
            case _:
                engine.adapt(new)

    def fail(self, folder: Path, how: str, number: int) -> bool:
        has_steps = self._kind in ("reconcile", "compact")
        with self._opened(folder) as (engine, system):
            was, files = _state(engine), _names(folder)
            kind, error = HOWS[how]
            system.fault(kind, system.calls + number, error)
            try:
                self._run(engine)
                failed = False
            except STOPPED:
                failed = True
            system.heal()
            if failed:
                is_done = kind == INTERRUPT and _state(engine) == self._expected  # it came when all was done
                if not has_steps and not is_done:
                    _same(_state(engine), was, "something has changed")
                    assert _names(folder) == files
                _same(_state_of(folder / "bank"), bank_state(engine.bank), "on disk")
                _same(bank_state(engine.snapshot), bank_state(engine.bank), "in the snapshot")
                assert verify(folder / "bank").clean
                if not is_done:
                    self._run(engine)
            _same(_state(engine), self._expected, "made again")
            assert not engine.bank.intent
            failures = system.failures
        _same(_state_of(folder / "bank"), self._expected[0], "made again, on disk")
        assert verify(folder / "bank").clean
        return failures > 0


class ProcessChange(Example):
    """A change that opens everything, as a process of its own does."""

    def __init__(self, name: str, place: Path, model: MACModel) -> None:
        self._change = Interrupted(name, place, model)
        self.folder = self._change.example
        folder = copy(self.folder, place / "counted")
        with watching(folder) as system:
            self._change.run(folder)
            self.calls = system.calls

    def fail(self, folder: Path, how: str, number: int) -> bool:
        with watching(folder) as system:
            kind, error = HOWS[how]
            system.fault(kind, number, error)
            try:
                self._change.run(folder)
                done = True
            except STOPPED:
                done = False
            failures = system.failures
        self._change.check(folder, done=done)
        return failures > 0


class SavedVectors(Example):
    """A dense retriever that encodes into its folder, and is saved there."""

    def __init__(self, name: str, place: Path, model: MACModel) -> None:
        self.folder = place / "example"
        self._make(self.folder, 4)
        folder = copy(self.folder, place / "counted")
        with watching(folder) as system:
            self._make(folder, 9)
            self.calls = system.calls

    def _make(self, folder: Path, count: int) -> None:
        retriever = DenseRetriever(WordEncoder(), folder=folder)
        retriever.put(STREAM[:count])
        retriever.save(folder)

    def fail(self, folder: Path, how: str, number: int) -> bool:
        with watching(folder) as system:
            kind, error = HOWS[how]
            system.fault(kind, number, error)
            try:
                self._make(folder, 9)
                possible = [9]
            except STOPPED:
                possible = [4, 9]
            failures = system.failures
        for counts in (possible, [9]):
            held = DenseRetriever.load(folder, WordEncoder())
            if held.documents(list(held.content_hashes())) not in [list(STREAM[:count]) for count in counts]:
                raise Lost(f"{len(held)} documents")
            self._make(folder, 9)
        assert len(_names(folder)) == 2
        return failures > 0


_ENGINE = (
    "adapt", "adapt, texts", "adapt, bounded", "LlamaIndex", "forget", "reconcile", "compact",
)  # fmt: skip
EXAMPLES: dict[str, Callable[[str, Path, MACModel], Example]] = {
    **dict.fromkeys(_ENGINE, EngineChange),
    "vectors": SavedVectors,
    **{f"process: {name}": lambda name, *arguments: ProcessChange(name[9:], *arguments) for name in CHANGES},
}


class Torture(Part):
    """Every call of every change, in each way."""

    def __init__(self, place: Path) -> None:
        model = small_model(place)
        self._copy = place / "copy"
        self._trials: list[tuple[str, Example, str, int]] = []
        for number, (name, make) in enumerate(EXAMPLES.items()):
            example = make(name, place / str(number), model)
            self._trials += [(name, example, how, call) for how in HOWS for call in range(1, example.calls + 1)]
        random.Random(0).shuffle(self._trials)  # so that a part of a run says something of every change
        self.goal = len(self._trials)

    def kind(self, seed: int) -> str:
        return self._trials[seed][0]

    def trial(self, seed: int) -> None:
        _, example, how, number = self._trials[seed]
        try:
            failed = example.fail(copy(example.folder, self._copy), how, number)
        except BaseException as error:
            error.add_note(f"{how} at call {number}")
            raise
        # A full disk refuses only what needs space, and a later call that does may not come.
        assert failed or how in ("a full disk", "a quota"), "no call has failed"


def _state(engine: MACEngine) -> Any:
    """What must be as it was: documents and memory tokens, and the retriever's texts."""
    held = engine.retriever
    assert held is not None
    return bank_state(engine.bank), {each.id: each for each in held.documents(list(held.content_hashes()))}


def _same(found: Any, expected: Any, message: str) -> None:
    if found != expected:
        raise Lost(message)


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}
