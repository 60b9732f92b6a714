"""Rows as a bank keeps them: memory tokens in few bits, lexical vectors as the few numbers that are not zero.

A row stands for one text. It has some of these columns, which are kept as three blobs and its places and weights:

    codes      scales         [n, T] float32       the factor of each memory token, with dtype int8
               phi            [n, T, D]            memory tokens; with dtype pq the first V of them, [n, V, D]
               product_codes  [n, T - V, M] uint8  the others, with dtype pq (`mac_rag.nn.product_quantizer`)
    summary    prior_keys     [n, P] bf16          the first numbers of the summary
               summaries      [n, S - P] float32   what the model wants to know of every row at once, or zeros
    places     places         [n, W] int32         where the lexical vectors are not zero, ascending
    weights    weights        [n, W]               the numbers at those places; zeros fill short rows up

W is the largest number of places of a row here; the blobs of a row have only as many places as the row needs.

A bank of codes keeps something else: the keys and values of a language model, as a codec has written them. The codes of
a row are then uint8 `[n, B]`, B bytes for each of its n tokens. Beside them it may have a summary, and no other column.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from mac_rag.errors import BankError
from mac_rag.nn.prior import Postings
from mac_rag.nn.product_quantizer import ProductQuantizer

RowDtype: TypeAlias = Literal["fp32", "bf16", "int8", "pq"]

# What `MemoryBank.put` takes: memory tokens `[N, T, D]`, or the codes of each row, uint8 `[n, B]`.
NewRows: TypeAlias = Tensor | Sequence[Tensor]

_PHI: dict[RowDtype | None, torch.dtype] = {
    None: torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "pq": torch.bfloat16,
}
_CODES = ("scales", "phi", "product_codes")
_SUMMARY = ("prior_keys", "summaries")
_NAMES = {
    "prior_keys": "a summary",
    "summaries": "a summary",
    "scales": "a scale",
    "weights": "a lexical vector",
    "phi": "a memory token",
}


class PackedRow(NamedTuple):
    """The bytes of a row; see the module."""

    codes: bytes
    summary: bytes
    places: bytes
    weights: bytes

    @property
    def crcs(self) -> tuple[int, int]:
        """Checksums of the codes, and of the rest."""
        return zlib.crc32(self.codes), overview_crc(self.summary, self.places, self.weights)


def overview_crc(summary: bytes, places: bytes, weights: bytes) -> int:
    """Checksum of what is read of every row before the first question."""
    return zlib.crc32(weights, zlib.crc32(places, zlib.crc32(summary)))


class Summaries(NamedTuple):
    """What is read of n rows before the first question.

    Attributes:
        summaries: `[n, S]` float32.
        counts: int32 `[n]`, the number of places of each row.
        places: int32 `[sum of counts]`.
        weights: `[sum of counts]`.
        postings: the lexical vectors place by place (`mac_rag.nn.prior.postings_of`), where they are known.
    """

    summaries: Tensor
    counts: Tensor
    places: Tensor
    weights: Tensor
    postings: Postings | None = None

    @classmethod
    def cat(cls, parts: Sequence[Summaries]) -> Summaries:
        """Those of several parts, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        summaries, counts, places, weights, _ = zip(*parts)
        return cls(torch.cat(summaries), torch.cat(counts), torch.cat(places), torch.cat(weights))


class RowLayout(BaseModel):
    """How a bank keeps its rows.

    Examples:
        >>> layout = RowLayout(dtype="bf16", lexical_vectors=8)
        >>> rows = layout.encode(torch.zeros(2, 104, 384))  # 96 memory tokens and 8 lexical vectors
        >>> rows.columns["phi"].shape, rows.columns["places"].shape  # no word of these texts is known
        (torch.Size([2, 96, 384]), torch.Size([2, 0]))

    Attributes:
        dtype: numbers of memory tokens. `fp32` keeps them as they are, `bf16` rounds them to 8 bits of precision,
            `int8` to whole multiples of the 127th part of each token's largest number, `pq` replaces them by codes of
            a product quantizer. None keeps them as they are, too, and leaves the choice to whoever puts the first row.
        lexical_vectors: R, vectors at the end of each row that are kept as the numbers that are not zero.
        summary: S, numbers of a row's summary.
        prior_keys: P, the first numbers of a summary, which are rounded to bf16; the others are float32.
        whole_tokens: V, with dtype pq a row's first tokens, which are kept in bf16.
        code_bytes: M, with dtype pq the bytes of each other token; 0 in a bank whose codebooks are not known yet.
        token_bytes: B, in a bank of codes the bytes of each token; 0 for memory tokens. Beside them, such rows have
            summaries only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: RowDtype | None = None
    lexical_vectors: int = Field(0, ge=0, lt=1 << 31)
    summary: int = Field(0, ge=0, lt=1 << 31)
    prior_keys: int = Field(0, ge=0, lt=1 << 31)
    whole_tokens: int = Field(0, ge=0, lt=1 << 31)
    code_bytes: int = Field(0, ge=0, lt=1 << 31)
    token_bytes: int = Field(0, ge=0, lt=1 << 31)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prior_keys > self.summary:
            raise ValueError(f"{self.prior_keys:,} prior keys in a summary of {self.summary:,} numbers: that cannot be")
        if self.dtype != "pq" and (self.whole_tokens or self.code_bytes):
            raise ValueError(f"rows in {self.dtype} have no codes")
        if self.token_bytes and (self.dtype is not None or self.lexical_vectors):
            raise ValueError(f"rows of codes, of {self.token_bytes:,} bytes a token, have summaries only beside them")
        return self

    @property
    def name(self) -> str:
        """What rows are kept in, for people."""
        return "codes" if self.token_bytes else self.dtype or "fp32"

    def quantized(self, quantizer: ProductQuantizer) -> RowLayout:
        """The same with dtype pq and the codes of a quantizer."""
        sizes = {"dtype": "pq", "whole_tokens": quantizer.whole, "code_bytes": quantizer.code_bytes}
        return self.model_copy(update=sizes)

    def row_shape(self, rows: Rows | CodedRows) -> tuple[int, int]:
        """`(T, D)` of rows; `(1, B)` of codes, whose rows have one token or more."""
        if isinstance(rows, CodedRows):
            return 1, self.token_bytes
        tokens, width = rows.columns["phi"].shape[1:]
        return (tokens + rows.columns["product_codes"].shape[1] if self.dtype == "pq" else tokens), width

    def _shapes(self, tokens: int, width: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of a row's columns, for `[tokens, width]` memory tokens; not of its lexical vectors."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if self.dtype == "int8":
            found["scales"] = torch.float32, (tokens,)
        dtype = torch.uint8 if self.token_bytes else _PHI[self.dtype]
        found["phi"] = dtype, (self.whole_tokens if self.dtype == "pq" else tokens, width)
        if self.dtype == "pq":
            found["product_codes"] = torch.uint8, (tokens - self.whole_tokens, self.code_bytes)
        if self.prior_keys:
            found["prior_keys"] = torch.bfloat16, (self.prior_keys,)
        if self.summary:
            found["summaries"] = torch.float32, (self.summary - self.prior_keys,)
        return found

    def row_bytes(self, tokens: int, width: int) -> int:
        """Bytes of a row of `[tokens, width]` memory tokens, without its lexical vectors."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._shapes(tokens, width).values())

    def pack(self, rows: Rows | CodedRows) -> list[PackedRow]:
        """The bytes of each row."""
        if isinstance(rows, CodedRows):
            columns = self._summary_columns(rows.summaries) if self.summary else {}
            summaries = _side_by_side([columns[name] for name in _SUMMARY if name in columns], len(rows.codes))
            return [PackedRow(_bytes(one), beside, b"", b"") for one, beside in zip(rows.codes, summaries, strict=True)]
        count = len(rows)
        codes, summary = (
            _side_by_side([rows.columns[name] for name in names if name in rows.columns], count)
            for names in (_CODES, _SUMMARY)
        )
        places = weights = [b""] * count
        if "places" in rows.columns:
            filled = rows.columns["weights"] != 0
            places, weights = (
                [column[here].numpy().tobytes() for column, here in zip(rows.columns["places"], filled)],
                [_bytes(column[here]) for column, here in zip(rows.columns["weights"], filled)],
            )
        return [PackedRow(*each) for each in zip(codes, summary, places, weights, strict=True)]

    def unpack(
        self, codes: Sequence[bytes], places: Sequence[bytes], weights: Sequence[bytes], tokens: int, width: int
    ) -> Rows:
        """Rows without their summaries, from their bytes.

        Args:
            codes, places, weights: of each row.
            tokens, width: shape of a row's memory tokens.

        Raises:
            ValueError: for bytes that are not rows of this layout.
        """
        shapes = self._shapes(tokens, width)
        columns = _apart(codes, {name: shapes[name] for name in _CODES if name in shapes})
        if self.lexical_vectors:
            counts, places_of_all, weights_of_all = self._lexical(places, weights, width)
            width_of_all = int(counts.max()) if len(counts) else 0
            within = torch.arange(width_of_all) < counts[:, None]
            for name, flat in (("places", places_of_all), ("weights", weights_of_all)):
                columns[name] = flat.new_zeros(len(counts), width_of_all)
                columns[name][within] = flat
        return Rows(columns)

    def unpack_summaries(
        self, summary: Sequence[bytes], places: Sequence[bytes], weights: Sequence[bytes], tokens: int, width: int
    ) -> Summaries:
        """What is read of rows before the first question, from their bytes; see `unpack`.

        Raises:
            ValueError: for bytes that are not those of such rows.
        """
        shapes = self._shapes(tokens, width)
        columns = _apart(summary, {name: shapes[name] for name in _SUMMARY if name in shapes})
        if not all(column.isfinite().all() for column in columns.values()):
            raise ValueError("a number of a summary is not finite")
        parts = [columns[name].float() for name in _SUMMARY if name in columns]
        summaries = torch.cat(parts, 1) if parts else torch.empty(len(summary), 0)
        return Summaries(summaries, *self._lexical(places, weights, width))

    def _lexical(self, places: Sequence[bytes], weights: Sequence[bytes], width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, places and weights of lexical vectors, side by side."""
        counts = torch.tensor([len(each) for each in places], dtype=torch.int32) // 4
        found = _from_bytes(bytearray().join(places), torch.int32)
        size = self._weights.itemsize
        lengths = torch.tensor([len(each) for each in weights], dtype=torch.int32)
        if not torch.equal(lengths, size * counts):
            raise ValueError("places and numbers of a lexical vector do not agree")
        numbers = _from_bytes(bytearray().join(weights), self._weights)
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < self.lexical_vectors * width:
            raise ValueError("a place is outside of the lexical vectors")
        if not numbers.isfinite().all() or (numbers == 0).any():
            raise ValueError("a number of a lexical vector is not finite, or zero")
        return counts, found, numbers

    @property
    def _weights(self) -> torch.dtype:
        return torch.float32 if self.dtype in (None, "fp32") else torch.bfloat16

    def encode(self, phi: Tensor, quantizer: ProductQuantizer | None = None) -> Rows:
        """Rows of memory tokens and lexical vectors `[n, T + R, D]` in float32, without their summaries.

        Args:
            phi: the rows.
            quantizer: with dtype pq the quantizer.

        Raises:
            BankError: for numbers that are finite only in float32.
        """
        tokens = phi[:, : phi.shape[1] - self.lexical_vectors]
        columns = {}
        if self.dtype == "int8":
            scales = tokens.abs().amax(-1) / 127
            columns["scales"] = scales
            tokens = (tokens / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
        if self.dtype == "pq":
            assert quantizer is not None
            columns["product_codes"] = quantizer.encode(tokens[:, self.whole_tokens :])
            tokens = tokens[:, : self.whole_tokens]
        columns["phi"] = tokens.to(_PHI[self.dtype], copy=True, memory_format=torch.contiguous_format)
        if self.summary:
            columns |= self._summary_columns(phi.new_zeros(len(phi), self.summary))
        if self.lexical_vectors:
            columns |= self._sparse(phi[:, phi.shape[1] - self.lexical_vectors :].flatten(1))
        rows = Rows(columns)
        if (fault := rows.fault()) is not None:
            raise BankError(f"{fault} in {self.dtype}; use dtype fp32 for the rows of this bank")
        return rows

    def summarised(self, rows: Rows, summaries: Tensor) -> Rows:
        """The same rows with their summaries `[n, S]`.

        Raises:
            BankError: for numbers that are finite only in float32.
        """
        summarised = Rows(rows.columns | self._summary_columns(summaries))
        if not all(summarised.columns[name].isfinite().all() for name in _SUMMARY if name in summarised.columns):
            raise BankError(f"a summary is not finite in {self.dtype}; use dtype fp32 for the rows of this bank")
        return summarised

    def _summary_columns(self, summaries: Tensor) -> dict[str, Tensor]:
        kept = {"summaries": summaries[:, self.prior_keys :].contiguous()}
        if self.prior_keys:
            kept["prior_keys"] = summaries[:, : self.prior_keys].to(torch.bfloat16)
        return kept

    def _sparse(self, lexical: Tensor) -> dict[str, Tensor]:
        """Places and weights `[n, W]` of lexical vectors `[n, R D]`."""
        lexical = lexical.to(self._weights)
        filled = lexical != 0
        row, place = filled.nonzero(as_tuple=True)
        slot = (filled.long().cumsum(1) - 1)[row, place]
        width = int(filled.sum(1).max()) if len(lexical) else 0
        places, weights = torch.zeros(len(lexical), width, dtype=torch.int32), lexical.new_zeros(len(lexical), width)
        places[row, slot], weights[row, slot] = place.int(), lexical[row, place]
        return {"places": places, "weights": weights}

    def decode(self, rows: Rows, quantizer: ProductQuantizer | None = None) -> Tensor:
        """Memory tokens and lexical vectors `[n, T + R, D]` in float32; see `encode` for the quantizer."""
        phi = rows.columns["phi"].float()
        if self.dtype == "int8":
            phi = phi * rows.columns["scales"][..., None]
        if self.dtype == "pq":
            assert quantizer is not None
            phi = torch.cat([phi, quantizer.decode(rows.columns["product_codes"])], 1)
        if not self.lexical_vectors:
            return phi
        lexical = phi.new_zeros(len(phi), self.lexical_vectors * phi.shape[2])
        lexical.scatter_add_(1, rows.columns["places"].long(), rows.columns["weights"].float())
        return torch.cat([phi, lexical.view(len(phi), self.lexical_vectors, phi.shape[2])], 1)


class CodedRows(NamedTuple):
    """n rows of a bank of codes.

    Attributes:
        codes: of each row, uint8 `[n, B]`.
        summaries: `[n, S]` float32.
    """

    codes: list[Tensor]
    summaries: Tensor


class Rows:
    """n rows of a bank of memory tokens.

    Args:
        columns: tensors by name; see the module.

    Attributes:
        columns: the same.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        """n."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Tensor | slice) -> Rows:
        """Some of the rows; views where possible."""
        return Rows({name: column[index] for name, column in self.columns.items()})

    def fault(self) -> str | None:
        """What is wrong with these numbers; None if nothing is."""
        for name, column in self.columns.items():
            if column.is_floating_point() and not column.isfinite().all():
                return f"a number of {_NAMES[name]} is not finite"
        return None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _from_bytes(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _side_by_side(columns: Sequence[Tensor], count: int) -> list[bytes]:
    """The bytes of each of some rows, of all their columns."""
    flat = [
        column.contiguous().flatten(1).view(torch.uint8).numpy()
        for column in columns
        if column[:1].numel() or not count
    ]
    if not flat or not count:
        return [b""] * count
    return [row.tobytes() for row in (np.concatenate(flat, 1) if len(flat) > 1 else flat[0])]


def _apart(rows: Sequence[bytes], shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The columns of rows, from their bytes.

    Raises:
        ValueError: for rows of another length.
    """
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values()]
    if any(len(row) != sum(sizes) for row in rows):
        raise ValueError(f"a row does not have {sum(sizes):,} bytes")
    whole = _from_bytes(bytearray().join(rows), torch.uint8).view(len(rows), sum(sizes))
    # A copy of each begins where its numbers are aligned.
    parts = [whole] if len(sizes) == 1 else [part.clone() for part in whole.split(sizes, 1)]
    return {
        name: part.flatten().view(dtype).view(len(rows), *shape)
        for (name, (dtype, shape)), part in zip(shapes.items(), parts)
    }
