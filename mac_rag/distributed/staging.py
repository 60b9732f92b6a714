"""Memory tokens on their way into a bank: blocks on disk, written by workers and read by the process that commits.

A block's name holds a digest of its documents, model and settings, and one of its contents. So a later run finds the
blocks that an interrupted run has finished, and two writers cannot damage each other's blocks.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mac_rag.atomic_files import UNFINISHED, make_folder, sync_folder, write_file
from mac_rag.bank.database import PART_BITS, WriterLock
from mac_rag.errors import BankError, DamageError
from mac_rag.untrusted_files import MalformedError, read_file

_BLOCK = re.compile(r"block-(?P<key>[0-9a-f]{64})-(?P<digest>[0-9a-f]{64})\.safetensors")
_UNFINISHED_BLOCK = re.compile(rf"block-[0-9a-f]{{64}}-([0-9a-f]{{16}}({re.escape(UNFINISHED)})?|attempt-[0-9]+)")
_HEADER = 1 << 16  # largest size of a block's header in bytes


class Block(NamedTuple):
    """The memory tokens of a group of documents.

    Attributes:
        phi: `[rows, T, D]` in float32, row after row.
        rows: number of rows of each document.
    """

    phi: Tensor
    rows: list[int]


def write_block(folder: Path, key: str, block: Block) -> str:
    """Writes a block; safe beside other workers. Returns the name of its file."""
    data = save({"phi": block.phi.cpu().contiguous(), "rows": torch.tensor(block.rows)})
    unnamed = folder / f"block-{key}-{secrets.token_hex(8)}"
    digest = write_file(unnamed, [data])
    name = f"block-{key}-{digest}.safetensors"
    unnamed.replace(folder / name)
    sync_folder(folder)
    return name


def attempt_name(key: str, number: int) -> str:
    """Name of the file that records an attempt to make a block."""
    return f"block-{key}-attempt-{number}"


class Staging:
    """The folder of one bank's blocks, `<bank>.staging` beside it. Only one process at a time can use it.

    Leaving the context keeps finished blocks for a later run; `remove` removes them.

    Args:
        bank: file of the bank.

    Raises:
        BankError: if the folder cannot be made, or another process uses it.
    """

    def __init__(self, bank: Path) -> None:
        bank = bank.resolve()
        self.folder = bank.with_name(f"{bank.name}.staging")
        try:
            make_folder(self.folder)
            self._lock = WriterLock(self.folder, wait=0)
        except OSError as error:
            raise BankError(f"{self.folder}, for the blocks of {bank}, cannot be made: {error.strerror}") from error

    def finished(self) -> dict[str, str]:
        """The blocks that are there: key of the group -> name of the block."""
        found = (match for match in map(_BLOCK.fullmatch, sorted(_names(self.folder))) if match)
        return {match["key"]: match[0] for match in found}

    def read(self, name: str, documents: int, row_shape: tuple[int, int]) -> Block:
        """Reads a block.

        Args:
            name: its name.
            documents: number of its documents.
            row_shape: shape `(T, D)` of a row.

        Raises:
            DamageError: for a block that is missing, or is not what was written.
        """
        path, match = self.folder / name, _BLOCK.fullmatch(name)
        most = (documents << PART_BITS) * row_shape[0] * row_shape[1] * 4 + documents * 8 + _HEADER
        try:
            data = read_file(path, most)
            if match is None or hashlib.sha256(data).hexdigest() != match["digest"]:
                raise MalformedError("its checksum differs")
            tensors = load(data)
            phi, rows = tensors["phi"], tensors["rows"].tolist()
        except FileNotFoundError:
            raise DamageError(
                f"the block {path}, which a worker wrote, is missing; put the bank where all machines of the cluster "
                "see the same files under the same path"
            ) from None
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DamageError(f"the block {path} is damaged: {error}; remove it, and run the command again") from None
        if len(rows) != documents or sum(rows) != len(phi) or phi.shape[1:] != row_shape or min(rows) < 1:
            raise DamageError(f"the block {path} does not fit its documents; remove it, and run the command again")
        return Block(phi, rows)

    def discard(self, keep: Collection[str] = ()) -> None:
        """Removes all blocks except those in `keep`, and the leftovers of killed workers."""
        for name in _names(self.folder):
            if name not in keep and (_BLOCK.fullmatch(name) or _UNFINISHED_BLOCK.fullmatch(name)):
                self.drop(name)

    def drop(self, name: str) -> None:
        """Removes a block."""
        (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes all blocks, and the folder if nothing else is in it."""
        self.discard()
        self._lock.release()
        if not _names(self.folder):
            self.folder.rmdir()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder.exists() and not self.finished():
            self.remove()
        self._lock.release()


def _names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]
