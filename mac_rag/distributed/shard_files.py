"""Files beside the shards' banks, which say to which bank the shards belong; and which document belongs to which shard.

    shards.json          in the bank's folder: number of shards, fingerprint, intent
    shard-<n>/           an ordinary bank
    shard-<n>/shard.json which shard of which bank it is

Both files are sealed by a checksum. `shards.json` is written last, so it exists only if all shards were made.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from mac_rag.atomic_files import sealed, sync_folder, unsealed, write_file
from mac_rag.bank.database import database_errors
from mac_rag.bank.interface import Intent
from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.shipped_models import describe
from mac_rag.untrusted_files import MalformedError, read_text_bytes

SHARDS = "shards.json"
MARK = "shard.json"
MOST_SHARDS = 4096
_LARGEST = 256 << 20

_BankName = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, Field(ge=1, le=MOST_SHARDS)]


def shard_of(document_id: str, shards: int) -> int:
    """The number of the shard that a document belongs to. Part of the format: it must never change."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % shards


def shards_of(id_hashes: Tensor, shards: int) -> Tensor:
    """`shard_of` for many documents, int64 `[n]`, from their hashes `[n]` (`mac_rag.data.document_ids.id_hash`)."""
    digests = id_hashes.numpy().view(np.uint64).byteswap()  # the same 8 bytes in the opposite order
    return torch.from_numpy((digests % np.uint64(shards)).astype(np.int64))


class _SealedFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        """Writes the file atomically: a crash leaves the old or the new one.

        Raises:
            BankError: if the disk refuses it.
        """
        with database_errors(path.parent, "written"):
            write_file(path, [sealed(self.model_dump(mode="json"))])
            sync_folder(path.parent)

    @classmethod
    def read(cls, path: Path, missing: str) -> Self:
        """Reads the file; `missing` is the error message if there is no such file.

        Raises:
            BankError: if the file is missing or cannot be read.
            DamageError: if it is not what was written.
        """
        try:
            with database_errors(path.parent, "read"):
                if not path.exists():
                    raise BankError(missing)
                return cls.model_validate(unsealed(read_text_bytes(path, _LARGEST)))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DamageError(
                f"{path} is damaged or of a later version: {place}: {first['msg']}; update mac_rag, or restore the "
                "bank from a backup"
            ) from None
        except MalformedError as error:
            raise DamageError(f"{path} is damaged: {error}; restore the bank from a backup") from None


class ShardsManifest(_SealedFile):
    """Manifest of a bank in shards.

    Attributes:
        name: random name of the bank, which its shards carry as well.
        routing: the rule that assigns documents to shards, see `shard_of`.
        intent: the change of bank and retriever that has begun and is not complete; empty if there is none.
    """

    format: Literal[1] = 1
    name: _BankName
    fingerprint: str
    shards: _Count
    routing: Literal["blake2b-64"] = "blake2b-64"
    intent: Intent = Intent()


class ShardMark(_SealedFile):
    """Identity of the shard in a folder.

    Attributes:
        format: version of this file.
        bank: name of the bank.
        number: number of the shard, from 0.
        shards: number of shards of the bank.
    """

    format: Literal[1] = 1
    bank: _BankName
    number: Annotated[int, Field(ge=0, lt=MOST_SHARDS)]
    shards: _Count

    def check(self, expected: ShardMark, folder: Path) -> None:
        """Refuses a folder that holds another shard.

        Raises:
            BankError: for another shard; the message says which one.
        """
        if self == expected:
            return
        if self.bank != expected.bank:
            found = "a shard of another bank"
        elif self.shards != expected.shards:
            found = f"shard {self.number} of {self.shards} shards, not of {expected.shards}"
        else:
            found = f"shard {self.number}"
        raise BankError(
            f"{folder} holds {found} instead of shard {expected.number}; put the folder of the right shard there"
        )


def read_mark(folder: Path) -> ShardMark:
    """The mark of a shard's folder.

    Raises:
        BankError: if the folder holds no shard, or a damaged mark.
    """
    return ShardMark.read(
        folder / MARK, f"{folder} holds no shard: it is lost or was moved; put it back, or restore it from a backup"
    )


def shard_folder(folder: Path, number: int) -> Path:
    """The folder of a shard's bank."""
    return folder / f"shard-{number}"


def check_fingerprint(folder: Path, writer: str, reader: str) -> None:
    """Refuses a model that did not write a bank.

    Raises:
        FingerprintError: if the fingerprints differ; the message names both.
    """
    if writer != reader:
        raise FingerprintError(
            f"{folder} was written by {describe(writer)} and cannot be read by {describe(reader)}; use the model that "
            "wrote it, or adapt a new bank with this one"
        )
