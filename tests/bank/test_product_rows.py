"""Rows as codes of a product quantizer: against plain numpy, on disk, from hostile files and through crashes."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_rag.bank.storage.commit_reader import check_consistency, read_commit
from mac_rag.bank.storage.repair import repair, verify
from safetensors.torch import load_file, save
from torch import Tensor

from mac_rag.atomic_files import sealed
from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.remote import pull, push
from mac_rag.bank.rows import RowLayout
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError
from mac_rag.nn.product_quantizer import ProductQuantizer
from tests.faults import faults

T, R, D, M = 4, 2, 6, 3
MODEL = "f00d" * 16
LAYOUT = RowLayout(lexical_vectors=R, summary=5, prior_keys=3)


def phi_of(rows: int, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    phi = size * torch.randn(rows, T + R, D, generator=generator)
    phi[:, T:] *= torch.rand(rows, R, D, generator=generator) < 0.3
    return phi


QUANTIZER = ProductQuantizer.fit(phi_of(200, 0)[:, :T], M, fingerprint=MODEL, whole=1)


def expected_of(phi: Tensor, quantizer: ProductQuantizer = QUANTIZER) -> Tensor:
    """What a bank gives back, by plain numpy: the nearest codeword of each group by its distance."""
    mean, rotation, words = (
        each.double().numpy() for each in (quantizer.mean, quantizer.rotation, quantizer.codewords)
    )
    kept = phi.to(torch.bfloat16).double().numpy()
    turned = (phi[:, 1:T].double().numpy() - mean) @ rotation
    for group in range(M):
        place = slice(group * D // M, (group + 1) * D // M)
        distance = np.square(turned[..., None, place] - words[group]).sum(-1)
        turned[..., place] = words[group][distance.argmin(-1)]
    kept[:, 1:T] = turned @ rotation.T + mean
    return torch.from_numpy(kept).float()


def put(bank: MemoryBank, names: str, seed: int, quantizer: ProductQuantizer | None = QUANTIZER) -> Tensor:
    """Puts documents with these names, as an engine does, and returns what should be kept of them."""
    phi = phi_of(len(names), seed)
    bank.keep_rows_as(LAYOUT, quantizer)
    bank.put([Document(name, name) for name in names], phi, summarise=lambda kept: kept[:, 0, :5])
    return expected_of(phi)


def made(folder: Path, **settings: Any) -> Tensor:
    """A bank of six documents in two segments, of which one document was deleted; and its rows."""
    with MemoryBank.create(folder, MODEL, rows="pq", **settings) as bank:
        kept = [put(bank, "abcd", 1)]
        bank.commit()
        kept.append(put(bank, "ef", 2))
        bank.commit()
        bank.delete("b")
        bank.commit()
    return torch.cat(kept)[[0, 2, 3, 4, 5]]


def assert_kept(bank: MemoryBank, expected: Tensor) -> None:
    torch.testing.assert_close(bank.phi, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(0, 999), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_each_group_becomes_its_nearest_codeword(rows: int, seed: int, size: float) -> None:
    layout = LAYOUT.quantized(QUANTIZER)
    phi = phi_of(rows, seed, size)
    encoded = layout.encode(phi, QUANTIZER)
    kept = layout.decode(encoded, QUANTIZER)
    torch.testing.assert_close(kept, expected_of(phi), rtol=1e-4, atol=1e-5)
    assert layout.row_shape(encoded) == (T, D)
    assert encoded.row_bytes * rows == sum(column.nbytes for column in encoded.columns.values())
    assert encoded.columns["product_codes"].shape == (rows, T - 1, M)
    # What was rounded once stays what it is, so a bank can be copied again and again.
    torch.testing.assert_close(layout.decode(layout.encode(kept, QUANTIZER), QUANTIZER), kept, rtol=1e-5, atol=1e-5)


def test_it_learns_what_varies_together() -> None:
    """Numbers that vary alike in pairs are far apart in a token: only a rotation brings them into one group."""
    generator = torch.Generator().manual_seed(1)
    causes = torch.randn(4000, 1, 8, generator=generator) * torch.tensor([9.0, 5, 3, 2, 1, 0.5, 0.1, 0.1])
    mixed = causes @ torch.linalg.qr(torch.randn(8, 8, generator=generator))[0] + 5
    quantizer = ProductQuantizer.fit(mixed[:3000], 4, fingerprint=MODEL)
    torch.testing.assert_close(quantizer.rotation.T @ quantizer.rotation, torch.eye(8), rtol=0, atol=1e-5)
    error = (quantizer.decode(quantizer.encode(mixed[3000:])) - mixed[3000:]).square().mean()
    assert error < 0.01 * mixed.var()  # 0.005; in the order of the numbers 0.03
    again = ProductQuantizer.fit(mixed[:3000], 4, fingerprint=MODEL)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in quantizer.tensors.items())


@pytest.mark.parametrize("secure", [False, True])
def test_a_bank_on_disk(tmp_path: Path, secure: bool) -> None:
    """Through commits, deletions, a new process, compaction, a copy and a backup."""
    expected = made(tmp_path / "bank", secure_delete=secure)
    opened = MemoryBank.open(tmp_path / "bank")
    assert opened.quantizer is not None
    assert opened.layout == LAYOUT.quantized(QUANTIZER)
    assert opened.row_shape == (T + R, D)
    assert_kept(opened, expected)
    torch.testing.assert_close(opened["d"].phi, expected[2:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(opened.take(torch.tensor([3, 0])), expected[[3, 0]], rtol=1e-5, atol=1e-5)
    for count, rows in opened.overview():
        assert rows.summaries.shape == (count, 5)
    summaries = torch.cat([rows.summaries for _, rows in opened.overview()])
    torch.testing.assert_close(summaries, expected[:, 0, :5], rtol=0, atol=0)  # of bf16, which has their numbers
    assert opened.nbytes <= 5 * (2 * 4 + 3 * 2 + 12 * 6 + 2 * D + (T - 1) * M)
    with MemoryBank.open(tmp_path / "bank", write=True) as bank:
        bank.compact()
        more = put(bank, "g", 3, quantizer=None)  # it has its codebooks
        bank.commit()
    assert opened.refresh()
    assert_kept(opened, torch.cat([expected, more]))
    opened.save(tmp_path / "copy")
    backup(tmp_path / "bank", tmp_path / "backup")
    for place in ("bank", "copy", "backup"):
        assert verify(tmp_path / place).clean
        assert_kept(MemoryBank.open(tmp_path / place), torch.cat([expected, more]))


def test_codebooks_come_with_the_first_rows(tmp_path: Path) -> None:
    with MemoryBank.create(tmp_path / "bank", MODEL, rows="pq") as bank:
        assert verify(tmp_path / "bank").clean
        with pytest.raises(BankError, match=r"takes its codebooks from the model: put documents with an engine"):
            bank.put([Document("a", "a")], phi_of(1, 1))
        with pytest.raises(BankError, match=r"model f00df00df00d has no codebooks to keep rows as 'pq'; fit them with"):
            put(bank, "a", 1, None)
        another = ProductQuantizer(MODEL[::-1], 1, QUANTIZER.mean, QUANTIZER.rotation, QUANTIZER.codewords)
        with pytest.raises(BankError, match=r"were fitted to the memory tokens of model d00fd00fd00f, not to those of"):
            put(bank, "a", 1, another)
        bank.keep_rows_as(LAYOUT, QUANTIZER)
        with pytest.raises(BankError, match=r"rows of 3 memory tokens of width 6 do not fit the bank's codebooks"):
            bank.put([Document("a", "a")], phi_of(1, 1)[:, 1:])
        put(bank, "a", 1)
        bank.rollback()
        assert bank.quantizer is None
        assert bank.layout == RowLayout(dtype="pq")
        expected = put(bank, "ab", 1)
        bank.commit()
        assert len(list((tmp_path / "bank").glob("codebook*"))) == 2
        bank.delete("a")
        bank.delete("b")
        bank.commit()
        assert MemoryBank.open(tmp_path / "bank").quantizer is not None
        put(bank, "ab", 1, another)  # it has its own
        bank.commit()
    assert_kept(MemoryBank.open(tmp_path / "bank"), expected)
    assert len(list((tmp_path / "bank").glob("codebook*"))) == 2


def test_damaged_codebooks_are_mended_from_their_copy(tmp_path: Path) -> None:
    expected = made(tmp_path / "bank")
    first = next(path for path in (tmp_path / "bank").glob("codebook*") if ".copy" not in path.name)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(DamageError, match=r"codebook-.*safetensors is damaged: its checksum differs"):
        MemoryBank.open(tmp_path / "bank")
    assert not verify(tmp_path / "bank").clean
    assert repair(tmp_path / "bank", tmp_path / "new").lost == ()
    assert_kept(MemoryBank.open(tmp_path / "new"), expected)
    assert repair(tmp_path / "bank").lost == ()
    assert_kept(MemoryBank.open(tmp_path / "bank"), expected)
    for path in (tmp_path / "bank").glob("codebook*"):
        path.unlink()
    with pytest.raises(BankError, match="without it no document can be read; restore a backup"):
        verify(tmp_path / "bank")


def forged(folder: Path, change: Any) -> None:
    """Changes the codebooks' tensors or the manifest, and makes all checksums fit again."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    paths = [folder / f"{manifest['codebook_name']}{copy}.safetensors" for copy in ("", ".copy")]
    tensors = load_file(paths[0])
    change(tensors, manifest)
    data = save(tensors)
    for path in paths:
        path.write_bytes(data)
    if manifest["codebook"] is not None:
        manifest["codebook"] = hashlib.sha256(data).hexdigest()
    for name in ("manifest.json", "manifest.copy.json"):
        (folder / name).write_bytes(sealed(manifest))


def _set(name: str, value: Any) -> Any:
    return lambda tensors, _: tensors.__setitem__(name, value)


def _layout(**sizes: int) -> Any:
    return lambda _, manifest: manifest["layout"].update(sizes)


HOSTILE = {
    "not finite": (
        _set("mean", torch.full((T - 1, D), torch.nan)),
        "mean is torch.float32, or has numbers that are not",
    ),
    "another dtype": (_set("codewords", QUANTIZER.codewords.double()), "codewords is torch.float64, or has"),
    "few codewords": (_set("codewords", torch.zeros(M, 255, D // M)), "parts do not fit together"),
    "another width": (_set("rotation", torch.eye(D + 1)), "parts do not fit together"),
    "none": (lambda tensors, _: tensors.pop("mean"), "codebooks with missing or unknown parts: mean"),
    "another model": (_set("fingerprint", torch.zeros(32, dtype=torch.uint8)), "codebooks are another model's"),
    "no token": (_set("whole", torch.tensor([-1])), "-1 whole tokens"),
    "a vector": (_set("whole", torch.tensor([1, 1])), r"whole is \[2\] in torch.int64"),
    "other rows": (
        _set("mean", torch.zeros(T, D)),
        "its codebooks are for rows of another shape than those of the bank",
    ),
    "bytes": (
        _layout(code_bytes=M + 3),
        "are for rows of another layout|it has .* bytes, and by the manifest",
    ),
    "whole": (_layout(whole_tokens=T), "its rows have no tokens beside 4 that have no codes"),
    "no codebook": (lambda _, manifest: manifest.update(codebook=None), "codes of memory tokens, without codebooks"),
    "keys": (_layout(prior_keys=6), "6 prior keys in a summary of 5 numbers"),
    "numbers": (lambda _, manifest: manifest["layout"].update(dtype="bf16"), "rows in bf16 have no codes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_codebooks_that_cannot_be(tmp_path: Path, name: str) -> None:
    made(tmp_path / "bank")
    change, message = HOSTILE[name]
    forged(tmp_path / "bank", change)
    with pytest.raises(DamageError, match=message):
        MemoryBank.open(tmp_path / "bank")
    try:
        found = str(verify(tmp_path / "bank"))
    except BankError as error:
        found = str(error)
    assert re.search(message, found)


def test_a_commit_of_the_first_codes_that_fails(tmp_path: Path) -> None:
    """At a sample of the calls to the file system: the bank is empty or whole, and a retry makes it whole."""
    for number in range(1, 400, 6):
        folder = tmp_path / str(number)
        with MemoryBank.create(folder, MODEL, rows="pq") as bank:
            put(bank, "abc", 1)
            with faults(folder) as fault, suppress(BankError, KeyboardInterrupt):
                fault.interrupt(number) if number % 12 == 1 else fault.at(number)
                bank.commit()
        assert verify(folder).clean
        with MemoryBank.open(folder, write=True) as bank:
            assert bank.document_ids in ([], ["a", "b", "c"])
            assert (bank.quantizer is None) == (len(bank) == 0)
            expected = put(bank, "abc", 1)
            bank.commit()
            assert_kept(bank, expected)
        assert len(list(folder.glob("codebook*"))) == 2
        if fault.failed is None:
            break
    else:
        pytest.fail("it never came to an end")
    assert number > 40  # calls


def test_a_bank_in_an_object_store(tmp_path: Path) -> None:
    expected = made(tmp_path / "bank")
    url = f"file://{tmp_path / 'store'}"
    push(tmp_path / "bank", url)
    pull(url, tmp_path / "copy")
    opened = MemoryBank.open(tmp_path / "copy")
    assert_kept(opened, expected)
    assert opened.quantizer is not None
    assert verify(tmp_path / "copy").clean


def test_a_backup_with_other_codebooks_is_not_put_back(tmp_path: Path) -> None:
    expected = made(tmp_path / "bank")
    other = ProductQuantizer(MODEL, 1, QUANTIZER.mean + 1, QUANTIZER.rotation, QUANTIZER.codewords)
    with MemoryBank.create(tmp_path / "other", MODEL) as bank:
        put(bank, "a", 1, other)
        bank.commit()
    with pytest.raises(BankError, match="have different codebooks; restore it into a new folder"):
        restore(tmp_path / "other", tmp_path / "bank", replace=True)
    assert_kept(MemoryBank.open(tmp_path / "bank"), expected)


def test_a_bank_that_takes_the_place_of_another_keeps_to_its_codebooks(tmp_path: Path) -> None:
    """What is known of the former commit is not read again, and is compared with the new one nevertheless."""
    made(tmp_path / "bank")
    commit = read_commit(tmp_path / "bank")
    check_consistency(tmp_path, *commit)
    longer = ProductQuantizer(MODEL, 1, torch.zeros(T, D), QUANTIZER.rotation, QUANTIZER.codewords)
    with pytest.raises(DamageError, match="contradicts itself: its codebooks are for rows of another shape"):
        check_consistency(tmp_path, commit.manifest, commit.segments, longer)
