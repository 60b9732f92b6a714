"""Attention to a bank: every strategy is the plain loop over documents and tokens, and rows left out weigh nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mac_rag.nn import attention
from mac_rag.nn.attention import (
    BankAttention,
    Chunk,
    direct_attention,
    longest_keys,
    needed_of_all,
    partial_attention,
    recomputing_attention,
    streaming_attention,
)
from tests.nn.helpers import random

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def loop_attention(query: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Softmax attention written out: one weight for each question, head, query token, row and token."""
    batch, heads, length, _ = query.shape
    keys, values = (part.expand(batch, *part.shape[-4:]) for part in (chunk.keys, chunk.values))
    rows, tokens = keys.shape[2:4]
    attended, mass = torch.zeros_like(query), torch.zeros(batch, rows, dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            for s in range(length):
                weights = {
                    (k, t): math.exp(
                        (query[b, h, s] @ keys[b, h, k, t]).item()
                        + (0 if chunk.bias is None else chunk.bias[b, h, k].item())
                    )
                    for k in range(rows)
                    for t in range(tokens)
                }
                total = sum(weights.values())
                for (k, t), weight in weights.items():
                    attended[b, h, s] += weight / total * values[b, h, k, t]
                    mass[b, k] += weight / total / (heads * length)
    return attended, mass


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Chunk, list[int]]:
    """A query, a bank with shared or own rows, with or without bias and hidden rows, and where to cut it."""
    size = st.integers(1, 4)
    run, heads, length, width, tokens = draw(size), draw(size), draw(size), draw(size), draw(size)
    runs = draw(st.sampled_from([None, 1, 2, 3]))
    batch, rows, seed = run * (runs or 1), draw(st.integers(1, 12)), draw(st.integers(0, 99))
    shape = (heads, rows, tokens, width) if runs is None else (runs, heads, rows, tokens, width)
    scale = draw(st.sampled_from([1.0, 30.0]))
    bias = None
    if draw(st.booleans()):
        bias = scale * random(batch, heads, rows, seed=seed + 3)
        hidden = random(batch, 1, rows, seed=seed + 4) > draw(st.sampled_from([-1.0, 0.0, 9.0]))
        hidden[:, :, draw(st.integers(0, rows - 1))] = False
        bias = bias.masked_fill(hidden, -torch.inf)
    chunk = Chunk(random(*shape, seed=seed + 1), random(*shape, seed=seed + 2), bias)
    cuts = draw(st.lists(st.integers(0, rows), max_size=4))
    return scale * random(batch, heads, length, width, seed=seed), chunk, sorted(cuts)


def cut(chunk: Chunk, cuts: list[int]) -> Iterator[Chunk]:
    rows = chunk.keys.shape[-3]
    for start, stop in zip([0, *cuts], [*cuts, rows]):
        bias = None if chunk.bias is None else chunk.bias[..., start:stop]
        yield Chunk(chunk.keys[..., start:stop, :, :], chunk.values[..., start:stop, :, :], bias)


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_direct_attention_is_the_plain_loop(case: tuple[Tensor, Chunk, list[int]]) -> None:
    query, chunk, cuts = case
    query = query / 30  # so that no exponential of the loop overflows
    own = chunk.keys.ndim == 5
    spread = Chunk(
        chunk.keys.repeat_interleave(len(query) // len(chunk.keys), 0) if own else chunk.keys,
        chunk.values.repeat_interleave(len(query) // len(chunk.values), 0) if own else chunk.values,
        chunk.bias,
    )
    for fast, slow in zip(direct_attention(query, cut(chunk, cuts), mass=True), loop_attention(query, spread)):
        torch.testing.assert_close(fast, slow)


@settings(max_examples=200, deadline=None)
@given(case=cases(), logits=st.sampled_from([1, 40, 1000]), queries=st.sampled_from([1, 20, 1000]))
def test_streaming_is_direct(case: tuple[Tensor, Chunk, list[int]], logits: int, queries: int) -> None:
    query, chunk, cuts = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention._LOGITS, "cpu", logits)
        patch.setattr(attention, "_QUERIES", queries)
        attended, mass = streaming_attention(query, cut(chunk, cuts), mass=True)
        without, none = streaming_attention(query, cut(chunk, cuts))
    expected, expected_mass = direct_attention(query, [chunk], mass=True)
    assert none is None
    torch.testing.assert_close(attended, expected, **CLOSE)
    torch.testing.assert_close(without, expected, **CLOSE)
    torch.testing.assert_close(mass, expected_mass, **CLOSE)
    torch.testing.assert_close(mass.sum(1), torch.ones(len(query), dtype=torch.float64), **CLOSE)


@settings(max_examples=100, deadline=None)
@given(case=cases(), logits=st.sampled_from([1, 40, 1000]))
def test_recomputing_is_direct_with_its_gradients(case: tuple[Tensor, Chunk, list[int]], logits: int) -> None:
    query, chunk, cuts = case
    given = [tensor for tensor in (query, chunk.keys, chunk.values, chunk.bias) if tensor is not None]
    for tensor in given:
        tensor.requires_grad_()

    def run(attend: BankAttention) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        attended, mass = attend(query, cut(chunk, cuts), mass=True)
        return attended, mass, torch.autograd.grad(attended.square().sum(), given)

    expected = run(direct_attention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention._RECOMPUTED, "cpu", logits)
        torch.testing.assert_close(run(recomputing_attention), expected, **CLOSE)
    assert recomputing_attention(query, [chunk])[1] is None


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_streaming_has_the_gradients_of_direct(case: tuple[Tensor, Chunk, list[int]]) -> None:
    query, chunk, cuts = case
    gradients = []
    for strategy in (streaming_attention, direct_attention):
        parts = (query, chunk.keys, chunk.values, chunk.bias)
        leaves = [part.clone().requires_grad_() for part in parts if part is not None]
        given = Chunk(leaves[1], leaves[2], None if chunk.bias is None else leaves[3])
        attended, _ = strategy(leaves[0], cut(given, cuts), mass=True)
        attended.square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mass", [False, True])
def test_a_part_of_which_nothing_is_seen_weighs_nothing(mass: bool) -> None:
    query, keys, values = random(2, 3, 4, 8), random(3, 5, 2, 8, seed=1), random(3, 5, 2, 8, seed=2)
    hidden = Chunk(keys, values, torch.full((2, 3, 5), -torch.inf, dtype=torch.float64))
    for chunks in ([], [hidden], [hidden, hidden]):
        partial = partial_attention(query, chunks, mass=mass)
        assert partial.attended.eq(0).all()
        assert partial.lse.isneginf().all()
        assert partial.mass(partial.lse).eq(0).all()
    seen = Chunk(keys + 1, values + 1, None)
    for chunks in ([hidden, seen], [seen, hidden], [hidden, hidden, seen]):
        attended, _ = streaming_attention(query, chunks, mass=mass)
        torch.testing.assert_close(attended, direct_attention(query, [seen])[0], **CLOSE)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("biased", "dtype"),
    [
        *((True, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        *((False, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ],
)
def test_the_fused_kernels_agree_with_plain_products(own: bool, biased: bool, dtype: torch.dtype) -> None:
    """Some rows are hidden from some heads; all of them from all heads of the last question."""
    shape = (4, 2, 50, 3, 16) if own else (2, 50, 3, 16)
    query = random(4, 2, 3, 16).to(torch.promote_types(dtype, torch.float32))
    bias = 3 * random(4, 2, 50, seed=3).to(query.dtype)
    bias = bias.masked_fill(bias > 2, -torch.inf)
    bias[3] = -torch.inf
    chunk = Chunk(random(*shape, seed=1).to(dtype), random(*shape, seed=2).to(dtype), bias if biased else None)
    plain = attention._plain(query, chunk, mass=False)
    if biased:
        assert attention._kernel_takes_bias(query, chunk)
        fused = attention._fused_with_bias(query, chunk)
        assert fused.attended[3].eq(0).all()
    else:
        fused = attention._fused(query, chunk)
        assert fused is not None
    tolerance = 1e-5 if biased or dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused.attended, plain.attended, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fused.lse, plain.lse, rtol=tolerance, atol=tolerance)


@settings(max_examples=100, deadline=None)
@given(case=cases(), logits=st.sampled_from([1, 40, 1000]), below=st.sampled_from([0.0, 5.0, torch.inf]))
def test_rows_that_are_skipped_cannot_matter(case: tuple[Tensor, Chunk, list[int]], logits: int, below: float) -> None:
    """A floor at the largest logit, which is the highest there may be, and lower ones."""
    query, chunk, cuts = case
    bias = torch.zeros(*query.shape[:2], chunk.keys.shape[-3]).double() if chunk.bias is None else chunk.bias
    keys = chunk.keys if chunk.keys.ndim == 5 else chunk.keys[None]
    products = query @ keys.repeat_interleave(len(query) // len(keys), 0).flatten(2, 3).mT
    floor = (products.unflatten(-1, keys.shape[2:4]).amax(-1) + bias[:, :, None]).amax(-1) - below
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(attention._LOGITS, "cpu", logits)
        skipping, _ = streaming_attention(query, cut(Chunk(chunk.keys, chunk.values, bias), cuts), floor=floor)
    expected, _ = direct_attention(query, [chunk])
    torch.testing.assert_close(skipping, expected, **CLOSE)


@pytest.mark.parametrize("own", [False, True])
def test_rows_that_cannot_matter_are_not_read(own: bool) -> None:
    shape = (4, 2, 50, 3, 16) if own else (2, 50, 3, 16)
    query, keys, values = random(4, 2, 3, 16), random(*shape, seed=1), random(*shape, seed=2)
    bias = torch.full((4, 2, 50), -500.0, dtype=torch.float64)
    best = torch.tensor([7, 7, 31, 49])
    bias[torch.arange(4), :, best] = 0.0
    chunk = Chunk(keys, values, bias)
    expected, _ = direct_attention(query, [chunk])
    floor = expected.new_full((4, 2, 3), -100.0)
    unread = torch.ones(50, dtype=torch.bool)
    unread[best] = False
    chunk.values[..., unread, :, :] = torch.nan
    attended, _ = streaming_attention(query, cut(chunk, [20, 40]), floor=floor)
    torch.testing.assert_close(attended, expected, **CLOSE)


@pytest.mark.parametrize("length", [24, 33])
@pytest.mark.parametrize(("kernel", "dtype"), [("fused_flash", torch.bfloat16), ("fused_efficient", torch.float32)])
def test_the_kernels_for_cuda_take_and_give_what_is_expected(kernel: str, dtype: torch.dtype, length: int) -> None:
    with FakeTensorMode():  # shapes and signatures, without a device
        query = torch.empty(2, 4, length, 32, dtype=dtype, device="cuda")
        rows = torch.empty(2, 4, 60, 32, dtype=dtype, device="cuda")
        attended, lse = getattr(attention, kernel)(query, rows, rows)
    assert attended.shape == query.shape
    assert attended.dtype == dtype
    assert lse.shape == query.shape[:3]
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_bank_in_half_precision_serves_queries_in_single(biased: bool, dtype: torch.dtype) -> None:
    query, keys, values = random(2, 2, 3, 8).float(), random(2, 40, 3, 8, seed=1), random(2, 40, 3, 8, seed=2)
    bias = random(2, 2, 40, seed=3).float() if biased else None
    attended, _ = streaming_attention(query, [Chunk(keys.to(dtype), values.to(dtype), bias)])
    expected, _ = direct_attention(query, [Chunk(keys.float(), values.float(), bias)])
    assert attended.dtype == torch.float32
    torch.testing.assert_close(attended, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("biased", [False, True])
def test_logits_in_memory_do_not_grow_with_the_bank(biased: bool) -> None:
    peaks = []
    for rows in (2_000, 20_000):
        query, keys = torch.zeros(64, 2, 3, 8), torch.zeros(2, rows, 3, 8)
        bias = torch.zeros(64, 2, rows) if biased else None
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal largest
                result = func(*args, **(kwargs or {}))
                given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
                made = [x for x in (result if isinstance(result, tuple) else [result]) if isinstance(x, Tensor)]
                new = [x for x in made if x.untyped_storage().data_ptr() not in given]
                largest = max([largest, *(x.untyped_storage().nbytes() // x.itemsize for x in new)])
                return result

        with Watch():
            streaming_attention(query, [Chunk(keys, keys, bias)])
        peaks.append(largest)
    assert peaks[1] <= max(peaks[0], attention._LOGITS["cpu"])


ROUNDING = torch.finfo(torch.float32).eps


@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    questions=st.integers(1, 3),
    sharpness=st.sampled_from([0.0, 5.0, 40.0, 200.0]),
    size=st.sampled_from([0.1, 1.0, 4.0]),
    hidden=st.booleans(),
    seed=st.integers(0, 999),
)
def test_what_is_left_out_weighs_nothing(
    rows: int, questions: int, sharpness: float, size: float, hidden: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, queries, tokens, width = 2, 3, 4, 5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, keys = size * random(questions, heads, queries, width), size * random(heads, rows, tokens, width)
    scores, weights = sharpness * random(questions, rows), torch.rand(heads, generator=generator) + 0.5
    if hidden and rows > 1:
        scores[:, 1::2] = -torch.inf
    # As attention has it: the best row's own logits are a lower bound of the largest logit.
    best = scores.argmax(1)
    logits = torch.einsum("bhsd,hktd->bhskt", query.double(), keys.double())
    logits = logits + (weights[:, None] * scores[:, None])[:, :, None, :, None]
    floor = logits[torch.arange(questions), :, :, best].amax(-1)
    needed = needed_of_all(query, longest_keys(keys), tokens, scores, weights, floor.float())
    assert needed.tolist() == sorted(set(needed.tolist()))
    assert set(best.tolist()) <= set(needed.tolist())
    left_out = torch.ones(rows, dtype=torch.bool)
    left_out[needed] = False
    share = logits.flatten(-2).softmax(-1).view_as(logits)[..., left_out, :].sum((-1, -2))
    assert float(share.max()) <= 2.5 * ROUNDING


def test_a_row_far_below_is_left_out_and_many_of_them_are_not() -> None:
    """A row may weigh nothing by itself, and a thousand like it something."""
    query, longest, floor = torch.zeros(1, 1, 1, 2), torch.zeros(1, 10_000), torch.zeros(1, 1, 1)

    def needed(light: int) -> int:
        scores = torch.full((1, 10_000), -torch.inf)
        scores[0, 0], scores[0, 1 : light + 1] = 0.0, math.log(ROUNDING) - 1
        return len(needed_of_all(query, longest, 1, scores, torch.ones(1), floor))

    assert needed(1) == 1
    assert needed(3000) == pytest.approx(2999, abs=2)
