"""Banks of codes: rows of varying length, in place of memory tokens of one shape."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.copies import backup
from mac_rag.bank.reduction import BoundedBank, ReductionMethod
from mac_rag.bank.rows import RowLayout
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.distributed.sharded_bank import ShardedBank
from mac_rag.errors import BankError, ConfigError, DamageError
from tests.bank.helpers import alter, alter_setting, fast_folder, files_of, memory
from tests.cli.helpers import run

BYTES = 24


def codes_of(seed: int, *lengths: int, width: int = BYTES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (n, width), dtype=torch.uint8, generator=generator) for n in lengths]


def is_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return [(one.dtype, one.tolist()) for one in found] == [(torch.uint8, one.tolist()) for one in expected]


def check(bank: Contents, expected: dict[str, list[Tensor]]) -> None:
    """Everything that a bank tells of its codes."""
    rows = [one for codes in expected.values() for one in codes]
    keys = bank.row_keys.tolist()
    assert is_same(bank.codes(keys), rows)
    assert is_same(bank.codes(keys[::-1] + keys[:1]), rows[::-1] + rows[:1])
    assert bank.token_counts(keys[::-1]) == [len(one) for one in rows][::-1]
    assert bank.document_ids == list(expected)
    found = bank.rows_of([*list(expected)[::-1], "nobody", "\ud800", *expected])
    assert list(found) == list(expected)[::-1]
    assert [key for name in expected for key in found[name]] == keys
    for entry in bank:
        assert is_same(entry.codes, expected[entry.document_id])
        assert entry.rows == len(expected[entry.document_id])
        assert is_same(bank.codes(found[entry.document_id]), entry.codes)
    assert bank.nbytes == sum(one.numel() for one in rows)
    assert bank.row_shape is None


def filled(path: Path | None = None, *, keep_texts: bool = False) -> tuple[MemoryBank, dict[str, list[Tensor]]]:
    """A bank with one commit, of three documents with four rows."""
    bank = MemoryBank("f00d", keep_texts=keep_texts)
    if path is not None:
        bank = MemoryBank.create(path, "f00d", keep_texts=keep_texts)
    expected = {"a": codes_of(1, 3), "b": codes_of(2, 5, 1), "c": codes_of(3, 400)}
    put(bank, expected)
    bank.commit()
    return bank, expected


def put(bank: MemoryBank, documents: dict[str, list[Tensor]]) -> None:
    rows = [one for codes in documents.values() for one in codes]
    bank.put([Document(name, f"text of {name}") for name in documents], rows, [len(one) for one in documents.values()])


class TestReading:
    def test_codes_are_read_from_a_file_that_is_opened_again(self, folder: Path) -> None:
        bank, expected = filled(folder / "bank", keep_texts=True)
        check(bank, expected)
        bank.close()
        for write in (False, True):
            with MemoryBank.open(folder / "bank", write=write) as bank:
                assert bank.layout == RowLayout(token_bytes=BYTES)
                check(bank, expected)
                assert bank["b"].texts == ("text of b",)
        backup(folder / "bank", folder / "copy")
        with MemoryBank.open(folder / "copy") as bank:
            check(bank, expected)
        assert verify(folder / "bank").clean

    def test_strided_codes_are_kept_as_they_look(self) -> None:
        bank = MemoryBank("f00d")
        wide = codes_of(1, 6, width=2 * BYTES)[0]
        bank.put([Document("a", ""), Document("b", "")], [wide[::2, ::2], wide[:, 1::2]])
        check(bank, {"a": [wide[::2, ::2]], "b": [wide[:, 1::2]]})

    def test_what_was_read_is_ones_own(self) -> None:
        bank, expected = filled()
        first, again = bank.codes(bank.rows_of(["a"])["a"] * 2)
        first.zero_()
        assert is_same([again], expected["a"])
        check(bank, expected)

    def test_many_documents(self) -> None:
        bank = MemoryBank("f00d")
        expected = {f"d{n}": codes_of(n, 1 + n % 3) for n in range(1203)}  # more than one query takes
        put(bank, expected)
        check(bank, expected)
        check(bank.snapshot(), expected)

    def test_counting_tokens_reads_no_codes(self, folder: Path) -> None:
        bank, _ = filled(folder / "bank")
        bank.close()
        alter(folder / "bank", "UPDATE row SET codes = zeroblob(length(codes))")
        with MemoryBank.open(folder / "bank") as bank:
            assert bank.token_counts(bank.row_keys.tolist()) == [3, 5, 1, 400]

    def test_rows_of_banks_of_memory_tokens(self) -> None:
        bank = MemoryBank("f00d")
        bank.put([Document(name, "") for name in "abc"], memory(6), [1, 2, 3])
        bank.merge(["a", "b"], memory(4))
        keys = bank.row_keys.tolist()
        # "c" came before the merged entry.
        assert bank.rows_of(["b", "x", "c", "a"]) == {"b": keys[3:], "c": keys[:3], "a": keys[3:]}
        assert bank.rows_of([]) == {}

    def test_nothing_of_an_empty_bank(self) -> None:
        bank = MemoryBank("f00d")
        assert (bank.codes([]), bank.token_counts([]), bank.rows_of(["a"]), bank.nbytes) == ([], [], {}, 0)
        assert bank.put([], []) == ()
        assert bank.layout == RowLayout()
        with pytest.raises(BankError):
            bank.codes([0])


class TestChanges:
    def test_replaced_deleted_and_rolled_back(self, folder: Path) -> None:
        bank, before = filled(folder / "bank")
        keys, entry = bank.row_keys.tolist(), bank["a"]
        put(bank, {"a": codes_of(7, 9, 2)})
        bank.delete("b")
        after = {"c": before["c"], "a": codes_of(7, 9, 2)}
        check(bank, after)
        for read in (lambda: bank.codes(keys[:1]), lambda: bank.token_counts(keys[:1]), lambda: entry.codes):
            with pytest.raises(BankError, match="codes were deleted") as found:
                read()
            assert not isinstance(found.value, DamageError)
        bank.rollback()
        check(bank, before)
        put(bank, {"a": codes_of(7, 9, 2)})
        bank.delete("b")
        bank.commit()
        bank.close()
        with MemoryBank.open(folder / "bank") as bank:
            check(bank, after)

    def test_the_first_put_is_rolled_back_with_its_layout(self, folder: Path) -> None:
        bank = MemoryBank.create(folder / "bank", "f00d")
        put(bank, {"a": codes_of(1, 3)})
        bank.rollback()
        assert bank.layout == RowLayout()
        bank.put([Document("a", "")], memory(1))
        assert bank.row_shape == memory(1).shape[1:]

    def test_a_failed_put_changes_nothing(self) -> None:
        bank, expected = filled()
        for documents, rows in (([Document("d", ""), Document("d", "")], None), ([Document("d", "")], [2])):
            with pytest.raises(BankError):
                bank.put(documents, codes_of(1, 1, 1, 1)[: 2 if rows is None else 1], rows)
        check(bank, expected)

    def test_an_emptied_bank_remains_one_of_codes(self, folder: Path) -> None:
        bank, expected = filled(folder / "bank")
        for name in expected:
            bank.delete(name)
        bank.commit()
        bank.close()
        with MemoryBank.open(folder / "bank", write=True) as bank:
            assert bank.nbytes == len(bank) == 0
            bank.keep_rows_as(RowLayout(dtype="bf16", summary=3))  # as an engine does
            assert bank.layout == RowLayout(token_bytes=BYTES)
            with pytest.raises(BankError, match="memory tokens of shape"):
                bank.put([Document("a", "")], memory(1))
            put(bank, expected)
            check(bank, expected)

    def test_a_layout_that_is_chosen_before_the_first_put(self) -> None:
        bank = MemoryBank("f00d")
        bank.keep_rows_as(RowLayout(token_bytes=BYTES))
        with pytest.raises(BankError, match="codes of 12 bytes a token do not fit"):
            put(bank, {"a": codes_of(1, 2, width=12)})
        put(bank, {"a": codes_of(1, 2)})
        check(bank, {"a": codes_of(1, 2)})

    def test_a_layout_for_memory_tokens_without_a_dtype_gives_way(self) -> None:
        bank = MemoryBank("f00d")
        bank.keep_rows_as(RowLayout(summary=5, lexical_vectors=1))
        put(bank, {"a": codes_of(1, 2)})
        assert bank.layout == RowLayout(token_bytes=BYTES)
        check(bank, {"a": codes_of(1, 2)})

    def test_readers_see_one_commit(self, folder: Path) -> None:
        bank, before = filled(folder / "bank")
        reader = MemoryBank.open(folder / "bank")
        snapshot = bank.snapshot()
        bank.delete("a")
        put(bank, {"c": codes_of(8, 2, 2)})
        after = {"b": before["b"], "c": codes_of(8, 2, 2)}
        uncommitted = bank.snapshot()
        check(uncommitted, after)
        check(reader, before)
        bank.commit()
        for contents in (reader, snapshot):
            check(contents, before)
        check(bank, after)
        assert reader.refresh()
        check(reader, after)
        check(snapshot, before)

    def test_a_reader_follows_the_first_codes(self, folder: Path) -> None:
        with MemoryBank.create(folder / "bank", "f00d") as bank:
            reader = MemoryBank.open(folder / "bank")
            put(bank, {"a": codes_of(1, 2)})
            bank.commit()
        assert reader.layout.token_bytes == 0
        assert reader.refresh()
        check(reader, {"a": codes_of(1, 2)})

    @pytest.mark.parametrize("way", ["delete", "replace", "compact"])
    def test_no_byte_of_deleted_codes_is_left_after_a_commit(self, folder: Path, way: str) -> None:
        bank, expected = filled(folder / "bank")
        secret = [expected["c"][0][:3].numpy().tobytes(), expected["c"][0][-3:].numpy().tobytes()]
        assert all(trace in files_of(folder / "bank") for trace in secret)
        if way == "replace":
            put(bank, {"c": codes_of(9, 1)})
        else:
            bank.delete("c")
        bank.compact() if way == "compact" else bank.commit()
        assert not [trace for trace in secret if trace in files_of(folder / "bank")]

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_any_order_of_changes(self, data: st.DataObject) -> None:
        lengths = st.lists(st.integers(1, 4), min_size=1, max_size=3)
        with fast_folder() as folder:
            bank, committed = filled(folder / "bank")
            expected = dict(committed)
            for step in range(data.draw(st.integers(1, 8))):
                kind = data.draw(st.sampled_from(["put", "delete", "commit", "rollback", "open"]))
                if kind == "put":
                    new = data.draw(st.dictionaries(st.sampled_from("abcdef"), lengths, min_size=1, max_size=3))
                    documents = {name: codes_of(step, *own) for name, own in new.items()}
                    put(bank, documents)
                    expected = {name: one for name, one in expected.items() if name not in new} | documents
                elif kind == "delete" and expected:
                    name = data.draw(st.sampled_from(sorted(expected)))
                    bank.delete(name)
                    del expected[name]
                elif kind == "commit":
                    bank.commit()
                    committed = dict(expected)
                elif kind in ("rollback", "open"):
                    bank.close() if kind == "open" else bank.rollback()
                    bank = MemoryBank.open(folder / "bank", write=True) if kind == "open" else bank
                    expected = dict(committed)
                check(bank, expected)
            bank.close()
            assert verify(folder / "bank").clean


# What is damaged of document "b", and what is said of it.
DAMAGES = {
    "a byte": (
        "UPDATE row SET codes = CAST(x'ff' || substr(codes, 2) AS BLOB)",
        "the codes of 'b': their checksum differs",
    ),
    "more tokens": ("UPDATE row SET tokens = 6", "the codes of 'b': 6 tokens of 24 bytes in 120 bytes"),
    "no tokens": ("UPDATE row SET tokens = 0", "the codes of 'b': 0 tokens"),
    "no codes": (f"UPDATE row SET codes = x'', tokens = 0, crc = {zlib.crc32(b'')}", "the codes of 'b': 0 tokens"),
    "part of a token": (
        f"UPDATE row SET codes = zeroblob(115), crc = {zlib.crc32(bytes(115))}",
        "the codes of 'b': 5 tokens of 24 bytes in 115 bytes",
    ),
    "a missing row": ("DELETE FROM row", "the codes of 'b': they are missing"),
}


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGES)
    def test_damaged_codes_are_named(self, folder: Path, kind: str) -> None:
        bank, expected = filled(folder / "bank")
        assert expected["b"][0][0, 0] != 255
        bank.close()
        statement, message = DAMAGES[kind]
        alter(folder / "bank", f"{statement} WHERE key = (SELECT key FROM document WHERE id = 'b')")
        with MemoryBank.open(folder / "bank") as bank:
            assert is_same(bank["a"].codes + bank["c"].codes, expected["a"] + expected["c"])
            keys = bank.rows_of(["b"])["b"]
            readings: list[Callable[[], Any]] = [lambda: bank.codes(keys), lambda: bank["b"].codes]
            if kind != "a byte":
                readings.append(lambda: bank.token_counts(keys))
            for read in readings:
                with pytest.raises(DamageError, match=message):
                    read()
        report = verify(folder / "bank")
        assert message in str(report)
        with MemoryBank.open(folder / "bank", write=True) as bank:
            bank.delete("b")
            bank.compact()
        assert verify(folder / "bank").clean

    @pytest.mark.parametrize("shape", ["[1, 23]", "[2, 24]", "null"])
    def test_settings_that_do_not_agree(self, folder: Path, shape: str) -> None:
        filled(folder / "bank")[0].close()
        alter_setting(folder / "bank", "shape", shape)
        with pytest.raises(DamageError, match="do not agree"):
            MemoryBank.open(folder / "bank")


MIXED: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "fp32"},
    "pq": {"dtype": "pq", "whole_tokens": 1, "code_bytes": 4},
    "lexical_vectors": {"lexical_vectors": 1},
}
UNFIT = {
    "int8": (torch.zeros(2, BYTES, dtype=torch.int8), r"row 1 of 2 rows of codes is torch.int8 \[2, 24\]; give uint8"),
    "float": (torch.zeros(2, BYTES), "torch.float32"),
    "one dimension": (torch.zeros(BYTES, dtype=torch.uint8), "row 1 of 2"),
    "three": (torch.zeros(1, 1, BYTES, dtype=torch.uint8), "row 1 of 2"),
    "no tokens": (torch.zeros(0, BYTES, dtype=torch.uint8), "row 1 of 2"),
    "no bytes": (torch.zeros(2, 0, dtype=torch.uint8), "row 1 of 2"),
    "another rate": (torch.zeros(2, 1152, dtype=torch.uint8), "codes of 24 and 1,152 bytes a token cannot be in one"),
    "too long": (torch.zeros(1, 1, dtype=torch.uint8).expand(1 << 25, BYTES), "805,306,368 bytes.*; split it"),
}


class TestRefusals:
    @pytest.mark.parametrize("kind", MIXED)
    def test_layouts_of_codes_and_memory_tokens(self, kind: str) -> None:
        RowLayout(**MIXED[kind])
        with pytest.raises(ValidationError, match="codes, of 24 bytes a token, have summaries only beside them"):
            RowLayout(token_bytes=BYTES, **MIXED[kind])

    @pytest.mark.parametrize("kind", UNFIT)
    @pytest.mark.parametrize("empty", [True, False])
    def test_tensors_that_are_no_codes(self, kind: str, empty: bool) -> None:
        bank, expected = (MemoryBank("f00d"), {}) if empty else filled()
        codes, message = UNFIT[kind]
        with pytest.raises(BankError, match=message):
            bank.put([Document("x", ""), Document("y", "")], [*codes_of(1, 2), codes])
        assert list(bank.document_ids) == list(expected)
        assert bank.layout.token_bytes == (0 if empty else BYTES)

    def test_codes_of_another_rate(self) -> None:
        bank = MemoryBank("f00d")
        put(bank, {"a": codes_of(1, 2, width=1152)})
        message = (
            "codes of 576 bytes a token do not fit this bank, whose rows have 1,152; make a new bank for this rate"
        )
        with pytest.raises(BankError, match=message):
            bank.put([Document("a", "")], codes_of(1, 2, width=576))
        check(bank, {"a": codes_of(1, 2, width=1152)})

    @pytest.mark.parametrize("rows", ["fp32", "bf16", "int8", "pq"])
    def test_codes_in_a_bank_with_a_dtype(self, rows: Any) -> None:
        bank = MemoryBank("f00d", rows=rows)
        with pytest.raises(BankError, match=f"codes of 24 bytes .* memory tokens in {rows}; make a new bank"):
            put(bank, {"a": codes_of(1, 2)})
        with pytest.raises(BankError, match=f"memory tokens in {rows}"):
            bank.keep_rows_as(RowLayout(token_bytes=BYTES))
        assert bank.layout == RowLayout(dtype=rows)

    def test_codes_and_memory_tokens_in_one_bank(self) -> None:
        bank = MemoryBank("f00d")
        bank.put([Document("a", "")], memory(1))
        with pytest.raises(BankError, match=r"codes of 24 bytes .* memory tokens in fp32"):
            put(bank, {"b": codes_of(1, 2)})
        for read in (lambda: bank.codes([0]), lambda: bank.token_counts([0]), lambda: bank["a"].codes):
            with pytest.raises(BankError, match="holds memory tokens and no codes; read them with phi"):
                read()
        bank, expected = filled()
        with pytest.raises(BankError, match=r"memory tokens of .* rows are codes of 24 bytes a token; make a new"):
            bank.put([Document("a", "")], memory(1))
        check(bank, expected)

    def test_memory_tokens_of_a_bank_of_codes(self) -> None:
        bank, _ = filled()
        readings: list[Callable[[], Tensor]] = [
            lambda: bank.phi,
            lambda: bank.take(torch.tensor([1])),
            lambda: bank["a"].phi,
        ]
        for read in readings:
            with pytest.raises(BankError, match="holds codes and no memory tokens; read them with codes"):
                read()

    def test_codes_are_not_averaged(self) -> None:
        bank, expected = filled()
        with pytest.raises(BankError, match="codes of keys and values cannot be averaged; use random-pruning"):
            bank.merge(["a", "b"], memory(1))
        methods: list[ReductionMethod] = ["random-averaging", "nearest-averaging"]
        for method in methods:
            message = f"codes of keys and values cannot be averaged, as {method} does; use random-pruning"
            with pytest.raises(ConfigError, match=message):
                BoundedBank(bank, 3, method)
            empty = MemoryBank("f00d")
            bounded = BoundedBank(empty, 3, method)
            with pytest.raises(ConfigError, match=message):
                bounded.put([Document("a", "")], codes_of(1, 2))
            assert empty.layout == RowLayout()
            put(empty, expected)
            with pytest.raises(ConfigError, match=message):
                bounded.put([], [])
        check(bank, expected)

    def test_shards_hold_no_codes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ShardedBank, "_check_changeable", lambda self: None)
        with pytest.raises(BankError, match="a bank in shards holds no codes"):
            ShardedBank.put(object.__new__(ShardedBank), [Document("a", "")], codes_of(1, 2))


def test_random_pruning() -> None:
    expected = {f"d{n}": codes_of(n, *range(1, 2 + n % 3)) for n in range(12)}
    documents = [Document(name, "") for name in expected]
    rows, counts = [one for codes in expected.values() for one in codes], list(map(len, expected.values()))
    at_once, one_by_one = (BoundedBank(MemoryBank("f00d"), 5, "random-pruning") for _ in range(2))
    forgotten = at_once.put(documents, rows, counts)
    for document in documents:
        own = expected[document.id]
        one_by_one.put([document], own, [len(own)])
    kept = {name: codes for name, codes in expected.items() if name not in forgotten}
    assert len(kept) == 5
    check(at_once.bank, kept)
    check(one_by_one.bank, kept)
    reduced, _ = filled()
    assert len(BoundedBank(reduced, 2, "random-pruning").put([], [])) == 1
    assert len(reduced) == 2


def test_commands(folder: Path) -> None:
    bank, expected = filled(folder / "bank", keep_texts=True)
    bank.close()
    shown = run("bank", "info", "--bank", folder / "bank").stdout
    assert "codes          409 tokens in 4 rows, 24 bytes a token\n" in shown
    assert "memory tokens" not in shown
    assert run("bank", "verify", "--bank", folder / "bank").exit_code == 0
    assert run("bank", "export", "--bank", folder / "bank", "--output", folder / "out").exit_code == 0
    exported = load_file(folder / "out" / "memory.safetensors")
    rows = [one for codes in expected.values() for one in codes]
    assert exported["tokens"].tolist() == [len(one) for one in rows]
    assert is_same(exported["codes"].split(exported["tokens"].tolist()), rows)
    with MemoryBank.create(folder / "empty", "f00d") as empty:
        empty.keep_rows_as(RowLayout(token_bytes=BYTES))
        empty.commit()
    shown = run("bank", "info", "--bank", folder / "empty").stdout
    assert "documents      0" in shown
    assert "codes" not in shown
