"""Triton kernels for a GPU: rows of codes to keys and values, and attention of each question to its own rows.

They are two, and not one: the layers of a group share their components, so the keys of each head are a product with all
of them, a dozen times the work of attention. It is done once for a question; attention within the same kernel would do
it again for every token of the answer. What is fused is the rest. The first kernel reads bytes and writes rotated keys
and values in the LM's dtype, and levels, products and unrotated keys never reach memory. The second reads each row
where it lies, by its address, so rows are neither copied nor padded for a batch of questions.

Their plain counterparts are `KVCodec.decode` with `KeyRotation`, and `BlockPrefix`. Without a GPU they run in Triton's
interpreter, if `TRITON_INTERPRET=1` is set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mac_rag.nn.codec import KVCodec
from mac_rag.nn.modulation import KeyRotation

# Of a program that decodes: tokens, pairs of columns, components at a time, and warps. Each unpacked level serves 256
# columns, so that on paper unpacking takes half as long as the product.
_TOKENS, _PAIRS, _COMPONENTS, _WARPS = 64, 128, 64, 8
_KEYS = 64  # that a program attends to at a time
_QUERIES = 64  # most queries of a program
_PROGRAMS = 264  # that fill a GPU: two for each multiprocessor of an H100


class CodeTables(NamedTuple):
    """What the kernel reads to decode codes of one rate. A group's `W` numbers of a token come as pairs.

    Attributes:
        bits: `[groups, C]`, where a component's level lies in a code: byte, lowest bit (4 bits), number of bits (4).
        maps: `[groups, C, 2, W / 2]`, components in steps to numbers; zeros fill up to C.
        mean: `[groups, 2, W / 2]`.
        pairs: `[groups, 2, W / 2]`, which numbers make a pair: those that rotate together, or any two.
        cos, sin: `[layers, N, head_width]`, as `KeyRotation` holds them.
        shape: layers, heads of keys and values, width of a head.
    """

    bits: Tensor
    maps: Tensor
    mean: Tensor
    pairs: Tensor
    cos: Tensor
    sin: Tensor
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, codec: KVCodec, bytes_per_token: int, rotation: KeyRotation, dtype: torch.dtype) -> CodeTables:
        """The tables of a codec; the products are of `dtype`, and so are the decoded numbers."""
        decoders = [decoder.T for _, decoder in codec._of_rate(bytes_per_token, dtype)]
        counts = codec.allocation(bytes_per_token).counts
        device = codec.mean.device
        most = -(-max(map(len, decoders)) // _COMPONENTS) * _COMPONENTS
        bits = torch.zeros(codec.groups, most, dtype=torch.int32)
        maps = torch.zeros(codec.groups, most, codec.width, dtype=dtype, device=device)
        total = {width: sum(of_groups) for width, of_groups in counts.items()}
        filled = [0] * codec.groups
        for width, of_groups in counts.items():
            parts = _places(width, total).split(of_groups)
            for group, part in enumerate(parts):
                bits[group, filled[group] : filled[group] + len(part)] = part
                filled[group] += len(part)
        for own, decoder in zip(maps, decoders, strict=True):
            own[: len(decoder)] = decoder
        layers, head_width = rotation.partner.shape
        heads = codec.groups * codec.width // (layers * 2 * head_width)
        pairs = torch.stack([_pairs(partner) for partner in rotation.partner.cpu()])  # [layers, 2, head_width / 2]
        starts = torch.arange(0, codec.width, head_width).view(-1, 2 * heads)  # of each head of a layer of a group
        columns = starts[:, :, None, None] + pairs.view(codec.groups, -1, 1, 2, head_width // 2)
        columns = columns.permute(0, 3, 1, 2, 4).reshape(codec.groups, 2, -1)
        pairs = columns.to(device)
        flat = pairs.flatten(1)
        maps = torch.stack([own[:, order] for own, order in zip(maps, flat, strict=True)]).unflatten(2, (2, -1))
        mean = codec.mean.gather(1, flat).view_as(pairs)
        shape = layers, heads, head_width
        return cls(
            bits.to(device), maps, mean, pairs.int(), rotation.cos.contiguous(), rotation.sin.contiguous(), shape
        )


def _places(width: int, total: dict[int, int]) -> Tensor:
    """Byte, lowest bit and number of bits of every component with `width` bits, as a code holds them."""
    unit, bit, index = width, torch.zeros(total[width], dtype=torch.int32), torch.arange(total[width])
    while unit < 8:  # two of these are one of twice the bits, after those that have so many
        bit = bit + unit * (index % 2)
        index, unit = total[2 * unit] + index // 2, 2 * unit
    return (index << 8 | bit << 4 | width).int()


def _pairs(partner: Tensor) -> Tensor:
    """`[head_width]` partners to the two members of each pair, `[2, head_width / 2]`."""
    places = torch.arange(len(partner))
    alone = places[partner == places].view(2, -1)
    first = places[places < partner]
    return torch.cat([alone, torch.stack([first, partner[first]])], 1)


def decoded(codes: Sequence[Tensor], tables: CodeTables) -> list[Tensor]:
    """Keys at the first positions of a rotation, and values: `[layers, 2, kv_heads, n, head_width]` for each row.

    Args:
        codes: `[n, bytes]` uint8 for each row.
        tables: of the rate of the codes.
    """
    layers, heads, width = tables.shape
    made = [tables.maps.new_empty(layers, 2, heads, len(row), width) for row in codes]
    longest = max(map(len, codes), default=0)
    if not longest:
        return made
    starts = torch.tensor([0, *map(len, codes)]).cumsum(0)
    rows = torch.stack([torch.tensor([row.data_ptr() for row in made]), starts[:-1], starts.diff()], 1)
    groups, most, _, columns = tables.maps.shape
    tiles = -(-longest // _TOKENS)
    with torch.cuda.device_of(tables.maps):  # where Triton starts a kernel
        _decode[(len(codes) * tiles, groups, -(-columns // _PAIRS))](
            torch.cat(list(codes)), rows.to(tables.maps.device), tables.bits, tables.maps, tables.mean, tables.pairs,
            tables.cos, tables.sin, tiles, codes[0].shape[1], most, columns, heads, width, tables.cos.shape[1],
            TOKENS=_TOKENS, PAIRS=_PAIRS, COMPONENTS=_COMPONENTS, num_warps=_WARPS,
        )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["tiles"])
def _decode(
    codes, rows, bits, maps, mean, pairs, cos, sin, tiles, rate, most, columns, heads, width, positions,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, COMPONENTS: tl.constexpr,
):  # fmt: skip
    """One program: some tokens of a row, some pairs of a group; `columns` is W / 2."""
    row = rows + tl.program_id(0) // tiles * 3
    out = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(maps.dtype.element_ty))
    length = tl.load(row + 2)
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) % tiles * TOKENS < length:
        group = tl.program_id(1)
        pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
        real, some = token < length, pair < columns
        code = codes + (tl.load(row + 1) + token) * rate
        left_maps = maps + group.to(tl.int64) * most * 2 * columns + pair[None, :]
        left = tl.zeros((TOKENS, PAIRS), tl.float32)
        right = tl.zeros((TOKENS, PAIRS), tl.float32)
        for start in range(0, most, COMPONENTS):
            component = start + tl.arange(0, COMPONENTS)
            place = tl.load(bits + group * most + component)
            byte = tl.load(code[:, None] + (place >> 8)[None, :], mask=real[:, None], other=0).to(tl.int32)
            levels = 1 << (place & 15)
            level = (byte >> (place >> 4 & 15)[None, :]) & (levels - 1)[None, :]
            middle = (level.to(tl.float32) - (levels.to(tl.float32) * 0.5 - 0.5)[None, :]).to(maps.dtype.element_ty)
            at = left_maps + component[:, None] * 2 * columns
            left = tl.dot(middle, tl.load(at, mask=some[None, :], other=0.0), left)
            right = tl.dot(middle, tl.load(at + columns, mask=some[None, :], other=0.0), right)
        pair += group * 2 * columns
        left += tl.load(mean + pair, mask=some, other=0.0)[None, :]
        right += tl.load(mean + pair + columns, mask=some, other=0.0)[None, :]
        first = tl.load(pairs + pair, mask=some, other=0)
        second = tl.load(pairs + pair + columns, mask=some, other=0)
        # Of each layer the heads of keys, and after them those of values.
        head = group * (2 * columns // width) + first // width
        one, two = token[:, None] * width + (first % width)[None, :], token[:, None] * width + (second % width)[None, :]
        turn = (head // (2 * heads) * positions * width)[None, :]
        keys = (some & (head // heads % 2 == 0))[None, :] & real[:, None]
        turned = left * tl.load(cos + turn + one, mask=keys, other=1.0)
        turned += right * tl.load(sin + turn + one, mask=keys, other=0.0)
        right *= tl.load(cos + turn + two, mask=keys, other=1.0)
        right += left * tl.load(sin + turn + two, mask=keys, other=0.0)
        place = out + (head * length * width)[None, :]
        write = real[:, None] & some[None, :]
        tl.store(place + one, turned.to(maps.dtype.element_ty), mask=write)
        tl.store(place + two, right.to(maps.dtype.element_ty), mask=write)


class RowTables(NamedTuple):
    """Which rows each of B questions sees, one question's after another's.

    Attributes:
        rows: `[R, 2]` int64, address and number of tokens of each row `[layers, 2, kv_heads, n, head_width]`.
        bias: `[R]` float32, added to the logits of all tokens of the row.
        starts: `[B + 1]` int32, where each question's rows begin and end.
    """

    rows: Tensor
    bias: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tensor]], bias: Sequence[Sequence[float]], device: torch.device) -> RowTables:
        """The tables of rows, which must be contiguous, of one dtype, and live as long as the tables are used."""
        flat = [(row.data_ptr(), row.shape[3]) for own in rows for row in own]
        added = [number for own in bias for number in own]
        starts = torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        made = torch.tensor(flat, dtype=torch.int64).view(-1, 2), torch.tensor(added, dtype=torch.float32), starts
        return cls(*(table.to(device) for table in made))


def attended(
    query: Tensor, tables: RowTables, layer: int, kv_heads: int, scaling: float, most_rows: int
) -> tuple[Tensor, Tensor]:
    """What each question's queries take from its rows, in up to `most_rows` parts that `merged` joins.

    Args:
        query: `[B, heads, l, head_width]`, in the dtype of the rows.
        tables: the rows of the B questions.
        layer: which layer's keys and values.
        kv_heads: number of heads of keys and values; `heads` is a multiple.
        scaling: of the logits.
        most_rows: largest number of rows of a question.

    Returns:
        `[parts, B, heads, l, head_width]` and the logarithms of the sums of exponentials `[parts, B, heads, l]`, both
        float32; zeros and minus infinity for a part without tokens.
    """
    batch, heads, length, width = query.shape
    queries = heads // kv_heads * length
    size = min(_QUERIES, max(16, triton.next_power_of_2(queries)))
    tiles = -(-queries // size)
    parts = max(1, min(most_rows, _PROGRAMS // max(1, batch * kv_heads * tiles)))
    out = query.new_empty(parts, batch, heads, length, width, dtype=torch.float32)
    sums = out.new_empty(out.shape[:-1])
    if not sums.numel():
        return out, sums
    with torch.cuda.device_of(query):
        _attend[(batch * parts, kv_heads, tiles)](
            query.contiguous(), tables.rows, tables.bias, tables.starts, out, sums, layer, parts, length,
            queries // length, scaling, batch, width, QUERIES=size, KEYS=_KEYS,
            WIDTH=max(16, triton.next_power_of_2(width)),
        )  # fmt: skip
    return out, sums


@triton.jit(do_not_specialize=["layer", "parts", "batch"])
def _attend(
    query, rows, bias, starts, out, sums, layer, parts, length, groups, scaling, batch, width,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: every `parts`-th row of a question, the query heads that share a head of keys and values."""
    question, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    head, heads = tl.program_id(1), tl.num_programs(1)
    own = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    real = own < groups * length
    column = tl.arange(0, WIDTH)
    wide = column < width
    # The query heads of one head of keys and values lie one after another: they are one matrix.
    place = (question * heads + head).to(tl.int64) * groups * length + own
    q = tl.load(query + place[:, None] * width + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
    most = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    taken = tl.zeros((QUERIES, WIDTH), tl.float32)
    for row in range(tl.load(starts + question) + part, tl.load(starts + question + 1), parts):
        count = tl.load(rows + 2 * row + 1)
        keys = tl.multiple_of(tl.load(rows + 2 * row), 16).to(tl.pointer_type(query.dtype.element_ty))
        keys += (layer * 2 * heads + head) * count * width
        values = keys + heads * count * width
        added = tl.load(bias + row)
        for start in range(0, count, KEYS):
            token = start + tl.arange(0, KEYS)
            seen = token < count
            at = token[:, None] * width + column[None, :]
            inside = seen[:, None] & wide[None, :]
            k = tl.load(keys + at, mask=inside, other=0.0)
            logits = tl.dot(q, tl.trans(k)) * scaling + added
            logits = tl.where(seen[None, :], logits, -float("inf"))
            higher = tl.maximum(most, tl.max(logits, 1))
            weights = tl.exp(logits - higher[:, None])
            fade = tl.exp(most - higher)
            v = tl.load(values + at, mask=inside, other=0.0)
            total = total * fade + tl.sum(weights, 1)
            taken = tl.dot(weights.to(v.dtype), v, taken * fade[:, None])
            most = higher
    place += part.to(tl.int64) * batch * heads * groups * length
    found = tl.where(total > 0, total, 1.0)
    tl.store(out + place[:, None] * width + column[None, :], taken / found[:, None], mask=real[:, None] & wide[None, :])
    tl.store(sums + place, most + tl.log(found), mask=real)
