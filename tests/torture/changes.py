"""Changes of a bank and of the retriever beside it, each as a process of its own makes it, to be interrupted.

A change opens what is in a folder, does its work and closes everything. Made again after an interruption, it does the
rest. The folder has the bank in `bank`, its retriever in `texts`, an older copy of the bank in `saved`, and the new
documents in `rows.jsonl`.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import typer
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.verify import verify
from mac_rag.cli.main import app
from mac_rag.config import BoundConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from mac_rag.sync import difference
from tests.helpers import mac_config, save_llama
from tests.torture.part import Lost

STREAM = generate("val", 16).documents
CHANGED = Document(STREAM[1].id, "Something else happened.")
NEW = [CHANGED, *STREAM[6:13]]

_COMMAND = typer.main.get_command(app)

State: TypeAlias = Any  # what a bank holds, or a retriever


def small_model(place: Path) -> MACModel:
    """A model that encodes each group of texts once: what becomes of memory tokens is tried, and not their making."""
    model = MACModel.from_config(mac_config(save_llama(place / "lm"), max_new_tokens=4), device="cpu")
    encode, known = model.amortize_rows, dict[tuple[tuple[int, ...], ...], Tensor]()

    def remembered(rows: Sequence[Sequence[int]], **options: Any) -> Tensor:
        key = tuple(map(tuple, rows))
        if key not in known:
            known[key] = encode(rows, **options)
        return known[key].clone()

    model.amortize_rows = remembered
    return model


class SavedBM25(BM25Retriever):
    """A BM25 index that is on disk after each change, as a server's is."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> SavedBM25:
        retriever = cls.load(folder)
        assert isinstance(retriever, SavedBM25)
        retriever.folder = folder
        return retriever

    def put(self, documents: Sequence[Document]) -> None:
        super().put(documents)
        self.save(self.folder)

    def delete(self, document_id: str) -> None:
        super().delete(document_id)
        self.save(self.folder)


def prepare(folder: Path, model: MACModel, *, keep_texts: bool = False) -> None:
    """A bank of seven documents in two segments, one of them deleted, its retriever, and an older copy."""
    folder.mkdir(parents=True)
    held = BM25Retriever()
    with MemoryBank.create(folder / "bank", model.fingerprint, keep_texts=keep_texts) as bank:
        engine = MACEngine(model, bank, held)
        engine.adapt(STREAM[:4])
        backup(folder / "bank", folder / "saved")
        engine.adapt(STREAM[4:7])
        engine.forget(STREAM[6].id)
    held.save(folder / "texts")
    rows = ({"id": each.id, "text": each.text, **each.metadata} for each in NEW)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def _engine(folder: Path, model: MACModel, **options: Any) -> Iterator[MACEngine]:
    with MemoryBank.open(folder / "bank", write=True) as bank:
        yield MACEngine(model, bank, SavedBM25.at(folder / "texts"), **options)


def _adapt(folder: Path, model: MACModel) -> None:
    with _engine(folder, model) as engine:
        engine.adapt(NEW)


def _bounded(folder: Path, model: MACModel) -> None:
    with _engine(folder, model, bound=BoundConfig(maximum=8, method="nearest-averaging")) as engine:
        engine.adapt(NEW)


def _forget(folder: Path, model: MACModel) -> None:
    with _engine(folder, model) as engine:
        for document in STREAM[:2]:
            assert engine.retriever is not None
            if document.id in engine.bank or document.id in engine.retriever:
                engine.forget(document.id)


def _reconcile(folder: Path, model: MACModel) -> None:
    """With a retriever that somebody else has changed."""
    texts = SavedBM25.at(folder / "texts")
    if STREAM[0].id in texts:
        texts.delete(STREAM[0].id)
    texts.put(NEW)
    with _engine(folder, model) as engine:
        engine.reconcile()


def _compact(folder: Path, model: MACModel) -> None:
    with MemoryBank.open(folder / "bank", write=True) as bank:
        bank.compact()


def _backup(folder: Path, model: MACModel) -> None:
    if not MemoryBank.exists(folder / "copy"):
        backup(folder / "bank", folder / "copy")


def _restore(folder: Path, model: MACModel) -> None:
    restore(folder / "saved", folder / "bank", replace=True)


def _command(folder: Path, model: MACModel) -> None:
    arguments = ["adapt", str(folder / "rows.jsonl"), "--bank", str(folder / "bank")]
    arguments += ["--retriever", "bm25", "--model", "patched"]  # the index of BM25 is in the bank's file
    with patch.object(MACModel, "from_pretrained", lambda *_, **__: model):
        if _COMMAND.main(arguments, standalone_mode=False):  # the exit code of Ctrl-C
            raise KeyboardInterrupt


CHANGES: dict[str, Callable[[Path, MACModel], None]] = {
    "adapt": _adapt,
    "adapt, bounded": _bounded,
    "adapt, by command": _command,
    "forget": _forget,
    "reconcile": _reconcile,
    "compact": _compact,
    "backup": _backup,
    "restore": _restore,
}
# Where bank and retriever agree as soon as an engine has opened both.
_AGREE = {"adapt", "adapt, bounded", "forget"}


@contextmanager
def after_commits(act: Callable[[MemoryBank], object]) -> Iterator[None]:
    """Does something with a bank whenever it has committed."""
    commit = MemoryBank.commit

    def followed(bank: MemoryBank, *arguments: Any, **options: Any) -> None:
        commit(bank, *arguments, **options)
        act(bank)

    with patch.object(MemoryBank, "commit", followed):
        yield


def bank_state(bank: MemoryBank) -> State:
    """Everything that a bank holds."""
    return {
        tuple(member.document_id for member in entry.members): (
            tuple(member.content_hash for member in entry.members),
            entry.phi.tolist(),
            entry.texts,
        )
        for entry in bank
    }


def leftovers(bank: Path) -> set[str]:
    """Files beside a bank that is open nowhere; there should be none, but the lock of one that was killed."""
    gc.collect()  # an interrupt may have left connections in a circle of references
    return {file.name for file in bank.parent.glob(f"{bank.name}-*")} - {f"{bank.name}-lock"}


def state_of(path: Path) -> State:
    """Everything that a bank on disk holds."""
    with MemoryBank.open(path) as bank:
        return bank_state(bank)


def _members(state: State) -> list[Any]:
    """The documents of a bank. Which of them a bounded bank averages depends on the groups that they come in."""
    return sorted((name, digest) for names, (digests, *_) in state.items() for name, digest in zip(names, digests))


def _texts_state(folder: Path) -> State:
    held = BM25Retriever.load(folder)
    return {each.id: each for each in held.documents(list(held.content_hashes()))}


class Interrupted:
    """A change that is to be interrupted: its example, and what may be found afterwards.

    Args:
        name: one of `CHANGES`.
        place: an empty folder.
        model: the model.

    Attributes:
        example: the folder before the change.
        commits: the number of commits that the change makes.
    """

    def __init__(self, name: str, place: Path, model: MACModel) -> None:
        self.name, self.example, self._model = name, place / "example", model
        self._run = CHANGES[name]
        prepare(self.example, model, keep_texts=name in ("adapt", "restore"))
        whole = place / "whole"
        shutil.copytree(self.example, whole)
        self._states = [state_of(whole / "bank")]  # at each commit
        with after_commits(lambda bank: self._states.append(bank_state(bank))):
            self.run(whole)
        self._states.append(state_of(whole / "bank"))
        self.commits = len(self._states) - 1
        self._texts = _texts_state(self.example / "texts"), _texts_state(whole / "texts")

    def run(self, folder: Path) -> None:
        """Makes the change, in groups of three documents."""
        with patch("mac_rag.adapting.GROUP", 3), patch("mac_rag.engine.GROUP", 3):
            self._run(folder, self._model)

    def check(self, folder: Path, *, done: bool, commits: int = 0) -> None:
        """Checks what an interruption has left, and that the change, made again, does the rest.

        Args:
            folder: the folder after the interruption.
            done: True if the change was acknowledged.
            commits: the number of its commits that were acknowledged.
        """
        self._check_bank(folder, self._states[-1:] if done else self._states[commits:])
        before, after = self._texts
        for name, text in _texts_state(folder / "texts").items():
            if text not in ((after.get(name),) if done else (before.get(name), after.get(name))):
                raise Lost(f"{name!r} of the retriever is {text}")
        if self.name in _AGREE:
            with _engine(folder, self._model) as engine:
                assert engine.retriever is not None
                assert not (found := difference(engine.bank, engine.retriever)), found
        self.run(folder)
        self._check_bank(folder, self._states[-1:])
        if self.name == "adapt, by command":
            with MemoryBank.open(folder / "bank") as bank:
                assert set(BankBM25Retriever(bank).content_hashes()) == {each.id for each in NEW}
        if _texts_state(folder / "texts") != after:
            raise Lost("the retriever, made again, is another")
        with MemoryBank.open(folder / "bank") as bank:
            assert not bank.intent
        assert not (left := leftovers(folder / "bank")), f"files are left over: {left}"

    def _check_bank(self, folder: Path, possible: Sequence[State]) -> None:
        if (folder / "saved").read_bytes() != (self.example / "saved").read_bytes():
            raise Lost("the older copy is another")
        copy = folder / "copy"
        has_copy = self.name == "backup" and copy.exists()
        for place in [folder / "bank", copy] if has_copy else [folder / "bank"]:
            report = verify(place)
            if not report.clean:
                raise Lost(str(report))
        found = state_of(folder / "bank")
        if found not in possible and not (self.name == "adapt, bounded" and _members(found) == _members(possible[-1])):
            raise Lost("the bank holds what it held after no commit")
        if has_copy and state_of(copy) not in possible:
            raise Lost("the backup holds what the bank held after no commit")
