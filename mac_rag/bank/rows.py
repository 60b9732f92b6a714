"""Rows as a bank keeps them: memory tokens in few bits, lexical vectors as the few numbers that are not zero.

A row stands for one text. It has some of these columns, which are kept as three blobs and its places and weights:

    codes      scales         [n, T] float32       the factor of each memory token, with dtype int8
               phi            [n, T, D]            memory tokens; with dtype pq the first V of them, [n, V, D]
               product_codes  [n, T - V, M] uint8  the others, with dtype pq (`mac_rag.nn.product_quantizer`)
    summary    prior_keys     [n, P] bf16          the first numbers of the summary
               summaries      [n, S - P] float32   what the model wants to know of every row at once, or zeros
    places     places         [sum of c] int32     where the lexical vectors are not zero, ascending; row after row;
                                                   in 16 bits if all places fit into them
    weights    weights        [sum of c]           the numbers at those places

c are the numbers of places of the rows, the column `counts` `[n]`, which the lengths of the blobs tell.

A bank of codes keeps something else: the keys and values of a language model, as a codec has written them. The codes of
a row are then uint8 `[t, B]`, B bytes for each of its t tokens. Beside them it may have a summary. Its columns:

    codes      codes          [sum of t, B] uint8  row after row
    tokens     tokens         [n]                  t of each row
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias

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
_BYTES = {torch.float32: "<f4", torch.bfloat16: "<i2", torch.int8: "i1", torch.uint8: "u1"}  # numpy has no bfloat16
_CODES = ("scales", "phi", "product_codes")
_SUMMARY = ("prior_keys", "summaries")
_NAMES = {
    "prior_keys": "a summary",
    "summaries": "a summary",
    "scales": "a scale",
    "weights": "a lexical vector",
    "phi": "a memory token",
}
Rows: TypeAlias = dict[str, Tensor]  # rows of a bank: columns by name, as the module says


class PackedRow(NamedTuple):
    """The number of tokens of a row, and its bytes; see the module."""

    tokens: int
    summary: bytes
    places: bytes
    weights: bytes
    codes: bytes


def row_crc(first: bytes, places: bytes, weights: bytes) -> int:
    """Checksum of what is read together: the codes of a row or its summary, and its lexical vectors."""
    return zlib.crc32(weights, zlib.crc32(places, zlib.crc32(first)))


class Summaries(NamedTuple):
    """What is read of n rows before the first question.

    Attributes:
        summaries: `[n, S]` float32.
        lexical: the lexical vectors, place by place.
    """

    summaries: Tensor
    lexical: Postings

    @classmethod
    def cat(cls, parts: Sequence[Summaries]) -> Summaries:
        """Those of several parts, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        summaries, lexical = zip(*parts, strict=True)
        return cls(torch.cat(summaries), Postings.cat(lexical, list(map(len, summaries))))

    def kept(self, mask: Tensor) -> Summaries:
        """Those of the rows where `mask` `[n]` is True; the same object if these are all."""
        if mask.all():
            return self
        return Summaries(self.summaries[mask], self.lexical.kept(mask))


class RowLayout(BaseModel):
    """How a bank keeps its rows.

    Examples:
        >>> layout = RowLayout(dtype="bf16", lexical_vectors=8)
        >>> rows = layout.encode(torch.zeros(2, 104, 384))  # 96 memory tokens and 8 lexical vectors
        >>> rows["phi"].shape, rows["places"].shape  # no word of these texts is known
        (torch.Size([2, 96, 384]), torch.Size([0]))

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

    def row_shape(self, rows: Rows) -> tuple[int, int]:
        """`(T, D)` of rows; `(1, B)` of codes, whose rows have one token or more."""
        if "codes" in rows:
            return 1, rows["codes"].shape[1]
        tokens, width = rows["phi"].shape[1:]
        return (tokens + rows["product_codes"].shape[1] if self.dtype == "pq" else tokens), width

    def _columns(self, tokens: int, width: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The columns of a row of `[tokens, width]` memory tokens, without lexical vectors: type and shape of each."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        if self.dtype == "int8":
            found["scales"] = "<f4", (tokens,)
        dtype = torch.uint8 if self.token_bytes else _PHI[self.dtype]
        found["phi"] = _BYTES[dtype], (self.whole_tokens if self.dtype == "pq" else tokens, width)
        if self.dtype == "pq":
            found["product_codes"] = "u1", (tokens - self.whole_tokens, self.code_bytes)
        if self.prior_keys:
            found["prior_keys"] = "<i2", (self.prior_keys,)
        if self.summary:
            found["summaries"] = "<f4", (self.summary - self.prior_keys,)
        return found

    def _dtype(self, names: Collection[str], tokens: int, width: int) -> np.dtype[np.void]:
        """The columns of a row that are in one blob, as numpy names their bytes."""
        return np.dtype([(name, *column) for name, column in self._columns(tokens, width).items() if name in names])

    def row_bytes(self, tokens: int, width: int) -> int:
        """Bytes of a row of `[tokens, width]` memory tokens, without its lexical vectors."""
        return sum(np.dtype(one).itemsize * math.prod(shape) for one, shape in self._columns(tokens, width).values())

    def pack(self, rows: Rows) -> list[PackedRow]:
        """The bytes of each row."""
        summary = self._packed(rows, _SUMMARY)
        if "codes" in rows:
            tokens: list[int] = rows["tokens"].tolist()
            codes = list(map(_bytes, rows["codes"].split(tokens)))
        else:
            tokens, codes = [self.row_shape(rows)[0]] * len(summary), self._packed(rows, _CODES)
        places = weights = [b""] * len(summary)
        if self.lexical_vectors:
            counts = rows["counts"].tolist()
            kept = torch.from_numpy(rows["places"].numpy().astype(self._places(rows["phi"].shape[2])))
            places, weights = (list(map(_bytes, part.split(counts))) for part in (kept, rows["weights"]))
        return [PackedRow(*each) for each in zip(tokens, summary, places, weights, codes, strict=True)]

    def _packed(self, rows: Rows, names: Collection[str]) -> list[bytes]:
        """The bytes of each row, of some of its columns."""
        packed = np.empty(len(rows["summaries"]), self._dtype(names, *self.row_shape(rows)))
        for name in packed.dtype.names or ():
            column = rows[name]
            packed[name] = column.view(torch.int16) if column.dtype == torch.bfloat16 else column
        return [row.tobytes() for row in packed]

    def _unpacked(self, blobs: Sequence[bytes], names: Collection[str], tokens: int, width: int) -> Rows:
        """The columns of rows that are in one blob, from their bytes."""
        dtype = self._dtype(names, tokens, width)
        if not {dtype.itemsize}.issuperset(map(len, blobs)):
            raise ValueError(f"a row does not have {dtype.itemsize:,} bytes")
        found = np.frombuffer(bytearray().join(blobs), dtype) if dtype.itemsize else np.empty(len(blobs), dtype)
        names = dtype.names or ()
        # Where a row has several columns, a copy of each begins where its numbers are aligned.
        columns = {name: torch.from_numpy(found[name].copy() if len(names) > 1 else found[name]) for name in names}
        return {
            name: column.view(torch.bfloat16) if column.dtype == torch.int16 else column
            for name, column in columns.items()
        }

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
        columns = self._unpacked(codes, _CODES, tokens, width)
        if self.lexical_vectors:
            columns["counts"], columns["places"], columns["weights"] = self._lexical(places, weights, width)
        return columns

    def unpack_summaries(
        self, summary: Sequence[bytes], places: Sequence[bytes], weights: Sequence[bytes], tokens: int, width: int
    ) -> Summaries:
        """What is read of rows before the first question, from their bytes; see `unpack`.

        Raises:
            ValueError: for bytes that are not those of such rows.
        """
        columns = self._unpacked(summary, _SUMMARY, tokens, width)
        if not all(column.isfinite().all() for column in columns.values()):
            raise ValueError("a number of a summary is not finite")
        summaries = torch.cat([torch.empty(len(summary), 0), *(column.float() for column in columns.values())], 1)
        lexical = Postings.of(*self._lexical(places, weights, width), self.lexical_vectors * width)
        return Summaries(summaries, lexical)

    def _lexical(self, places: Sequence[bytes], weights: Sequence[bytes], width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, places and weights of lexical vectors, side by side."""
        dtype = self._places(width)
        counts = np.fromiter(map(len, places), np.int32, len(places)) // dtype.itemsize
        sizes = np.fromiter(map(len, weights), np.int32, len(weights))
        found, numbers = bytearray().join(places), bytearray().join(weights)
        if len(found) != dtype.itemsize * counts.sum() or not np.array_equal(sizes, self._weights.itemsize * counts):
            raise ValueError("places and numbers of a lexical vector do not agree")
        if not found:
            return torch.from_numpy(counts), torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=self._weights)
        where, values = np.frombuffer(found, dtype).astype(np.int32), torch.frombuffer(numbers, dtype=self._weights)
        if not 0 <= where.min() <= where.max() < self.lexical_vectors * width:
            raise ValueError("a place is outside of the lexical vectors")
        if not values.isfinite().all() or not values.all():
            raise ValueError("a number of a lexical vector is not finite, or zero")
        return torch.from_numpy(counts), torch.from_numpy(where), values

    def _places(self, width: int) -> np.dtype[Any]:
        """The numbers that places are kept in."""
        return np.dtype("<u2" if self.lexical_vectors * width <= 1 << 16 else "<i4")

    @property
    def _weights(self) -> torch.dtype:
        return torch.float32 if self.dtype in (None, "fp32") else torch.bfloat16

    def encode(self, phi: Tensor, quantizer: ProductQuantizer | None = None) -> Rows:
        """Rows of memory tokens and lexical vectors `[n, T + R, D]` in float32, with zeros as their summaries.

        Args:
            phi: the rows.
            quantizer: with dtype pq the quantizer.

        Raises:
            BankError: for numbers that are finite only in float32.
        """
        tokens = phi[:, : phi.shape[1] - self.lexical_vectors]
        rows = {}
        if self.dtype == "int8":
            scales = tokens.abs().amax(-1) / 127
            rows["scales"] = scales
            tokens = (tokens / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
        if self.dtype == "pq":
            assert quantizer is not None
            rows["product_codes"] = quantizer.encode(tokens[:, self.whole_tokens :])
            tokens = tokens[:, : self.whole_tokens]
        rows["phi"] = tokens.to(_PHI[self.dtype], copy=True, memory_format=torch.contiguous_format)
        if self.lexical_vectors:
            lexical = phi[:, phi.shape[1] - self.lexical_vectors :].flatten(1).to(self._weights)
            filled = lexical != 0
            rows |= {"counts": filled.sum(1), "places": filled.nonzero()[:, 1].int(), "weights": lexical[filled]}
        return self.summarised(rows, phi.new_zeros(len(phi), self.summary))

    def summarised(self, rows: Rows, summaries: Tensor) -> Rows:
        """The same rows with their summaries `[n, S]`.

        Raises:
            BankError: for numbers that are finite only in float32.
        """
        rows = rows | {"summaries": summaries[:, self.prior_keys :].contiguous()}
        if self.prior_keys:
            rows["prior_keys"] = summaries[:, : self.prior_keys].to(torch.bfloat16)
        for name, column in rows.items():
            if column.is_floating_point() and not column.isfinite().all():
                raise BankError(
                    f"a number of {_NAMES[name]} is not finite in {self.name}; use dtype fp32 for the rows of this bank"
                )
        return rows

    def decode(self, rows: Rows, quantizer: ProductQuantizer | None = None, *, out: Tensor | None = None) -> Tensor:
        """Memory tokens and lexical vectors `[n, T + R, D]` in float32.

        Args:
            rows: the rows.
            quantizer: with dtype pq the quantizer.
            out: where they are written, contiguous; None for new memory.
        """
        tokens, width = self.row_shape(rows)
        phi = rows["phi"]
        whole = phi.shape[1]
        if out is None:
            out = torch.empty(len(phi), tokens + self.lexical_vectors, width)
        out[:, :whole] = phi
        if self.dtype == "int8":
            out[:, :whole] *= rows["scales"][..., None]
        if self.dtype == "pq":
            assert quantizer is not None
            out[:, whole:tokens] = quantizer.decode(rows["product_codes"])
        if self.lexical_vectors:
            out[:, tokens:] = 0
            starts = torch.arange(len(phi)) * out[:1].numel() + tokens * width
            places = starts.repeat_interleave(rows["counts"]) + rows["places"]
            out.view(-1).scatter_(0, places, rows["weights"].float())
        return out


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
