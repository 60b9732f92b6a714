"""Folders of shards that do not belong together, are damaged, or are there already, are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mac_rag.atomic_files import sealed, unsealed
from mac_rag.distributed.shard_files import shard_folder
from mac_rag.errors import BankError, ConfigError, DamageError, FingerprintError
from mac_rag.model import MACModel
from tests.bank.helpers import random_rows
from tests.distributed.local_shards import documents, made, opened


@pytest.fixture
def bank(loaded_tiny_model: MACModel, folder: Path) -> Path:
    for place in (folder, folder.with_name("other")):
        with made(place, loaded_tiny_model, 3) as bank:
            bank.put(documents(9), random_rows(loaded_tiny_model, 9, 0))
            bank.commit()
    return folder


def refused(model: MACModel, folder: Path, match: str, error: type[BankError] = BankError) -> None:
    with pytest.raises(error, match=match):
        opened(folder, model)


def test_folders_of_shards_are_told_apart(loaded_tiny_model: MACModel, bank: Path) -> None:
    first, second = shard_folder(bank, 0), shard_folder(bank, 1)
    first.rename(bank / "kept")
    refused(loaded_tiny_model, bank, rf"{first} holds no shard.*put it back")
    second.rename(first)
    (bank / "kept").rename(second)
    refused(loaded_tiny_model, bank, rf"{first} holds shard 1 instead of shard 0")
    shutil.rmtree(first)
    shutil.copytree(shard_folder(bank.with_name("other"), 0), first)
    refused(loaded_tiny_model, bank, "a shard of another bank")


def test_documents_of_another_shard_are_refused(loaded_tiny_model: MACModel, bank: Path) -> None:
    first, second = shard_folder(bank, 0), shard_folder(bank, 1)
    (first / "shard.json").replace(bank / "mark")
    shutil.rmtree(first)
    shutil.copytree(second, first)
    (bank / "mark").replace(first / "shard.json")
    refused(loaded_tiny_model, bank, r"is shard 0, but document 'text \d' belongs to shard 1")


def test_another_number_of_shards_is_refused(loaded_tiny_model: MACModel, bank: Path) -> None:
    four = bank.with_name("four")
    made(four, loaded_tiny_model, 4).close()
    manifest = (four / "shards.json").read_text()
    name = unsealed((bank / "shards.json").read_bytes())["name"]
    (bank / "shards.json").write_bytes(sealed({**unsealed(manifest.encode()), "name": name}))
    refused(loaded_tiny_model, bank, "shard 0 of 3 shards, not of 4")


def test_damaged_and_missing_files_are_named(loaded_tiny_model: MACModel, bank: Path) -> None:
    manifest = bank / "shards.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b'"shards":3', b'"shards":2'))
    refused(loaded_tiny_model, bank, rf"{manifest} is damaged", DamageError)
    manifest.unlink()
    refused(loaded_tiny_model, bank, "no bank in shards")
    manifest.write_bytes(content)
    (shard_folder(bank, 2) / "bank.mac").write_bytes(b"{}")
    refused(loaded_tiny_model, bank, "shard-2")


def test_a_folder_that_holds_a_bank_is_not_made_again(loaded_tiny_model: MACModel, bank: Path) -> None:
    with pytest.raises(BankError, match="already holds a bank"):
        made(bank, loaded_tiny_model, 3)
    (bank / "shards.json").unlink()
    with pytest.raises(BankError, match=r"shard-0.*holds a memory bank or another file"):
        made(bank, loaded_tiny_model, 3)
    with pytest.raises(ConfigError, match="shards is 0"):
        made(bank.with_name("none"), loaded_tiny_model, 0)


def test_another_model_is_refused(tiny_model: MACModel, bank: Path) -> None:
    with torch.no_grad():
        tiny_model.aggregation.blocks[0].to_out.bias += 1
    tiny_model.train().eval()
    refused(tiny_model, bank, "cannot be read by", FingerprintError)
