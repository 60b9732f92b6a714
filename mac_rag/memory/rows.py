"""Rows as a bank keeps them: memory tokens in few bits, lexical vectors as the few numbers that are not zero.

A row stands for one text. It has some of these columns:

    summaries       [n, S - P] float32   what the model wants to know of every row at once; zeros where it is not known
    places          [n, W] int32         where the lexical vectors are not zero, ascending
    scales          [n, T] float32       the factor of each memory token, with dtype int8
    weights         [n, W]               the numbers at those places; zeros fill short rows up
    prior_keys      [n, P] bf16          the first numbers of the summary
    phi             [n, T, D]            memory tokens; with dtype pq the first V of them, [n, V, D]
    product_codes   [n, T - V, M] uint8  the others, with dtype pq (`mac_rag.nn.product_quantizer`)

W is the largest number of places of a row here, and says nothing about the rows: each collection has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, Self, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from mac_rag.errors import BankError
from mac_rag.nn.product_quantizer import ProductQuantizer

RowDtype: TypeAlias = Literal["fp32", "bf16", "int8", "pq"]

_PHI: dict[RowDtype | None, torch.dtype] = {
    None: torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "pq": torch.bfloat16,
}
# Columns in the order of their files: each begins where its numbers are aligned, whatever stands before it.
COLUMNS = ("summaries", "places", "scales", "weights", "prior_keys", "phi", "product_codes")
_RAGGED = ("places", "weights")
OVERVIEW = ("summaries", *_RAGGED, "prior_keys")  # what is read of every row before the first question


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
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: RowDtype | None = None
    lexical_vectors: int = Field(0, ge=0, lt=1 << 31)
    summary: int = Field(0, ge=0, lt=1 << 31)
    prior_keys: int = Field(0, ge=0, lt=1 << 31)
    whole_tokens: int = Field(0, ge=0, lt=1 << 31)
    code_bytes: int = Field(0, ge=0, lt=1 << 31)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prior_keys > self.summary:
            raise ValueError(f"{self.prior_keys:,} prior keys in a summary of {self.summary:,} numbers: that cannot be")
        if self.dtype != "pq" and (self.whole_tokens or self.code_bytes):
            raise ValueError(f"rows in {self.dtype} have no codes")
        return self

    def quantized(self, quantizer: ProductQuantizer) -> RowLayout:
        """The same with dtype pq and the codes of a quantizer."""
        sizes = {"dtype": "pq", "whole_tokens": quantizer.whole, "code_bytes": quantizer.code_bytes}
        return self.model_copy(update=sizes)

    def row_shape(self, rows: Rows) -> tuple[int, int]:
        """`(T, D)` of rows."""
        tokens, width = rows.columns["phi"].shape[1:]
        return (tokens + rows.columns["product_codes"].shape[1] if self.dtype == "pq" else tokens), width

    def columns(self, shape: Sequence[int], places: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each column.

        Args:
            shape: `[n, T, D]` of memory tokens.
            places: W.
        """
        count, tokens, width = shape
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if self.summary:
            found["summaries"] = torch.float32, (count, self.summary - self.prior_keys)
        if self.prior_keys:
            found["prior_keys"] = torch.bfloat16, (count, self.prior_keys)
        if self.lexical_vectors:
            found |= {"places": (torch.int32, (count, places)), "weights": (self._weights, (count, places))}
        if self.dtype == "pq":
            found["phi"] = _PHI["pq"], (count, self.whole_tokens, width)
            found["product_codes"] = torch.uint8, (count, tokens - self.whole_tokens, self.code_bytes)
        else:
            found["phi"] = _PHI[self.dtype], tuple(shape)
            if self.dtype == "int8":
                found["scales"] = torch.float32, (count, tokens)
        return {name: found[name] for name in COLUMNS if name in found}

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
        if (fault := rows.fault(self, phi.shape[2])) is not None:
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


class Rows:
    """n rows of a bank.

    Args:
        columns: tensors by name; see the module.

    Attributes:
        columns: the same, in a fixed order.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = {name: columns[name] for name in COLUMNS if name in columns}

    def __len__(self) -> int:
        """n."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Tensor | slice) -> Rows:
        """Some of the rows; views where possible."""
        return Rows({name: column[index] for name, column in self.columns.items()})

    @property
    def summaries(self) -> Tensor:
        """Summaries `[n, S]` in float32."""
        own = self.columns["summaries"]
        return torch.cat([self.columns["prior_keys"].float(), own], 1) if "prior_keys" in self.columns else own

    @property
    def places(self) -> int:
        """W; 0 without lexical vectors."""
        return self.columns["places"].shape[1] if "places" in self.columns else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(column[:1].nbytes if len(column) else 0 for column in self.columns.values())

    @classmethod
    def cat(cls, parts: Sequence[Rows]) -> Rows:
        """Rows of several parts with the same columns, one part after the other; W is the largest of them."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.places for part in parts)
        wide = [part.resized(width).columns for part in parts]
        return cls({name: torch.cat([columns[name] for columns in wide]) for name in wide[0]})

    @property
    def needed_places(self) -> int:
        """The smallest W that these rows can have."""
        return int((self.columns["weights"] != 0).sum(1).max()) if self.places and len(self) else 0

    def resized(self, places: int) -> Rows:
        """The same rows with W = `places`, which must not be too small for them."""
        if "places" not in self.columns or places == self.places:
            return self
        more = (0, places - self.places)
        return Rows(self.columns | {name: torch.nn.functional.pad(self.columns[name], more) for name in _RAGGED})

    @property
    def overview(self) -> Rows:
        """What is read of every row before the first question: summaries and lexical vectors."""
        return Rows({name: column for name, column in self.columns.items() if name in OVERVIEW})

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of all columns, one column after the other."""
        yield from map(_bytes, self.columns.values())

    def digest(self) -> str:
        """Sha256 of the bytes of all columns."""
        return _sha256(self.pieces())

    def checksum(self) -> str:
        """Sha256 of what these rows say, whatever W is."""
        if "places" not in self.columns:
            return self.digest()
        filled = self.columns["weights"] != 0
        rest = Rows({name: column for name, column in self.columns.items() if name not in _RAGGED})
        counts = filled.sum(1, dtype=torch.int32)
        ragged = (_bytes(column) for column in (counts, *(self.columns[name][filled] for name in _RAGGED)))
        return _sha256(chain(rest.pieces(), ragged))

    def fault(self, layout: RowLayout, width: int) -> str | None:
        """What is wrong with these numbers; None if nothing is.

        Args:
            layout: how the bank keeps its rows.
            width: D.
        """
        for name, column in self.columns.items():
            if name == "places":
                if column.numel() and not 0 <= int(column.min()) <= int(column.max()) < layout.lexical_vectors * width:
                    return "a place is outside of the lexical vectors"
                if ((column != 0) & (self.columns["weights"] == 0)).any():
                    return "a place has no number"
            elif column.is_floating_point() and not column.isfinite().all():
                return f"a number of {_NAMES[name]} is not finite"
        return None


_SUMMARY = ("prior_keys", "summaries")
_NAMES = {
    "prior_keys": "a summary",
    "summaries": "a summary",
    "scales": "a scale",
    "weights": "a lexical vector",
    "phi": "a memory token",
}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _sha256(pieces: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Growing:
    """A tensor to which rows are appended in amortised constant time. Tensors that it has given never change."""

    def __init__(self, tensor: Tensor) -> None:
        self._buffer = tensor
        self._used = len(tensor)

    @property
    def tensor(self) -> Tensor:
        return self._buffer[: self._used]

    def append(self, more: Tensor) -> None:
        need = self._used + len(more)
        if need > len(self._buffer):
            larger = self._buffer.new_empty((max(need, 2 * len(self._buffer)), *more.shape[1:]))
            larger[: self._used] = self.tensor
            self._buffer = larger
        self._buffer[self._used : need] = more
        self._used = need


class GrowingRows:
    """Rows to which others are appended as to `Growing`."""

    def __init__(self, rows: Rows) -> None:
        self._columns = {name: Growing(column) for name, column in rows.columns.items()}

    @property
    def rows(self) -> Rows:
        return Rows({name: column.tensor for name, column in self._columns.items()})

    def append(self, more: Rows) -> None:
        width = max(self.rows.places, more.places)
        if width > self.rows.places:
            self._columns = GrowingRows(self.rows.resized(width))._columns
        for name, column in more.resized(width).columns.items():
            self._columns[name].append(column)
