"""The kernels of a GPU, in Triton's interpreter on the CPU (`tests/conftest.py`), against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn.codec import KVCodec
from mac_rag.nn.modulation import KeyRotation
from mac_rag.nn.rows_prefix import merged, own_attention

pytest.importorskip("triton", reason="Triton has no build for this platform")

from mac_rag.nn.row_kernels import CodeTables, RowTables, attended, decoded

# The interpreter of Triton 3.9 multiplies the bits of bf16 numbers instead of the numbers.
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-2}


def rotation(layers: int, positions: int, width: int, form: str) -> KeyRotation:
    """Halves or neighbours as pairs, in all of the width or a half of it, with angles of their own in each layer."""
    turned = width // 2 if form == "a half" else width
    pairs = torch.arange(turned // 2)
    first = 2 * pairs if form == "neighbours" else pairs
    second = first + (1 if form == "neighbours" else turned // 2)
    cos, sin = torch.ones(layers, positions, width), torch.zeros(layers, positions, width)
    partner = torch.arange(width).repeat(layers, 1)
    angles = torch.rand(layers, positions, turned // 2) * 6
    cos[:, :, first] = cos[:, :, second] = angles.cos()
    sin[:, :, first], sin[:, :, second] = -angles.sin(), angles.sin()
    partner[:, first], partner[:, second] = second, first
    return KeyRotation(cos, sin, partner)


# Layers of a group, heads of keys and values, and their width: of narrow ones many, of wide ones few, because the
# interpreter takes its time. A program of the kernel decodes 256 numbers of the 512 of the last.
SHAPES = [(2, 2, 6), (2, 1, 16), (1, 2, 16), (1, 1, 64), (1, 2, 64), (2, 1, 128)]


@given(
    seed=st.integers(0, 1000), groups=st.integers(1, 2), shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3), share=st.floats(0.01, 1),
    form=st.sampled_from(["halves", "neighbours", "a half"]), dtype=st.sampled_from(list(ERRORS)),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_codes_become_rotated_keys_and_values(
    seed: int, groups: int, shape: tuple[int, int, int], lengths: list[int], share: float, form: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    layers, kv_heads, width = shape
    codec = KVCodec(layers=groups * layers, kv_heads=kv_heads, head_width=width, group=layers)
    numbers = groups * layers * 2 * kv_heads * width
    # Variances fall quickly, so that components have 8, 4, 2, 1 and no bits.
    spread = torch.exp2(-torch.arange(40) / 6)[:, None] * torch.randn(40, numbers) + 0.01 * torch.randn(1, numbers)
    sample = (torch.randn(200, 40) @ spread + torch.randn(numbers)).T.reshape(-1, 2, kv_heads, width, 200).mT
    codec.fit([sample], torch.ones(sample.shape[:3]))
    rate = max(1, int(share * numbers))
    turning = rotation(groups * layers, 80, width, form)
    codes = [torch.randint(0, 256, (length, rate), dtype=torch.uint8) for length in lengths]
    found = decoded(codes, CodeTables.of(codec, rate, turning, dtype))
    for own, row in zip(codes, found, strict=True):
        expected = codec.decode(own, torch.float64)
        expected[:, 0] = turning(expected[:, 0])
        assert row.dtype == dtype
        assert row.is_contiguous()
        scale = expected.abs().max() if len(own) else 1.0
        torch.testing.assert_close(row.double() / scale, expected.double() / scale, rtol=0, atol=ERRORS[dtype])


def attention(query: Tensor, keys: Tensor, values: Tensor, added: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """One head of one question in float64: what is taken, and the logarithm of the sum of exponentials."""
    logits = query.double() @ keys.double().T * scaling + added.double()
    return logits.softmax(-1) @ values.double(), logits.logsumexp(-1)


@given(
    seed=st.integers(0, 1000), questions=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=2),
    kv_heads=st.integers(1, 2), groups=st.integers(1, 4), length=st.sampled_from([1, 2, 5, 40]),
    width=st.sampled_from([6, 16, 64, 80, 128]), dtype=st.sampled_from(list(ERRORS)),
)  # fmt: skip
@settings(max_examples=16, deadline=None)
def test_questions_attend_to_their_rows_and_to_themselves(
    seed: int, questions: list[list[int]], kv_heads: int, groups: int, length: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    rows = [torch.randn(2, 2, kv_heads, count, width).to(dtype) for count in (3, 64, 130, 0)]
    bias = [[float(number) for number in torch.randn(len(own)) * 3] for own in questions]
    tables = RowTables.of([[rows[number] for number in own] for own in questions], bias, torch.device("cpu"))
    heads = kv_heads * groups
    query = torch.randn(len(questions), length, heads, width).transpose(1, 2).to(dtype)
    key, value = torch.randn(2, len(questions), kv_heads, 7, width).to(dtype)
    mask = torch.randn(len(questions), 1, length, 7)
    scaling = width**-0.5
    parts, sums = attended(query, tables, 1, kv_heads, scaling, 4)
    own, own_sums = own_attention(query, key, value, mask, scaling)
    both = merged(torch.cat([parts, own[None]]), torch.cat([sums, own_sums[None]]))
    for number, chosen in enumerate(questions):
        kept = torch.cat([torch.zeros(2, kv_heads, 0, width, dtype=dtype), *(rows[place][1] for place in chosen)], 2)
        added = torch.cat([torch.zeros(0), *(torch.full((rows[p].shape[3],), b) for p, b in zip(chosen, bias[number]))])
        for head in range(heads):
            keys, values = kept[:, head // groups]
            total = sums[:, number, head].double().logsumexp(0)
            if not len(keys):
                assert (total == -torch.inf).all()
                assert not parts[:, number, head].any()
            else:
                expected, expected_sums = attention(query[number, head], keys, values, added, scaling)
                assert_near(total, expected_sums, dtype)
                assert_near(merged(parts[:, number, head], sums[:, number, head]), expected, dtype)
            expected, _ = attention(
                query[number, head],
                torch.cat([keys, key[number, head // groups]]),
                torch.cat([values, value[number, head // groups]]),
                torch.cat([added.expand(length, -1), mask[number, 0]], 1),
                scaling,
            )
            assert_near(both[number, head], expected, dtype)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])


def test_long_prompts_attend_to_themselves_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value, mask = (torch.randn(2, n, 9, 8) for n in (4, 2, 2, 1))
    mask = torch.randn(2, 1, 9, 9)
    whole = own_attention(query, key, value, mask, 0.3)
    monkeypatch.setattr("mac_rag.nn.rows_prefix._MOST_SCORES", 2 * 4 * 9 * 2)
    for found, expected in zip(own_attention(query, key, value, mask, 0.3), whole, strict=True):
        torch.testing.assert_close(found, expected)


_COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mac_rag.nn import row_kernels

POINTERS = {"codes": "*u8", "rows": "*i64", "maps": "*bf16", "query": "*bf16",
            **dict.fromkeys(["bits", "pairs", "starts"], "*i32"),
            **dict.fromkeys(["mean", "cos", "sin", "bias", "out", "sums"], "*fp32"), "scaling": "fp32"}
for kernel, warps, sizes in (
    (row_kernels._decode, row_kernels._WARPS, {"TOKENS": 64, "PAIRS": 128, "COMPONENTS": 64}),
    (row_kernels._attend, 4, {"QUERIES": 64, "KEYS": 64, "WIDTH": 128}),
):
    types = {name: "constexpr" if name in sizes else POINTERS.get(name, "i32") for name in kernel.arg_names}
    for architecture, memory in ((80, 163 << 10), (90, 227 << 10)):
        source = ASTSource(fn=kernel, signature=types, constexprs=sizes)
        made = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
        assert made.asm["cubin"] and made.metadata.shared <= memory
        print(made.metadata.name)
"""


@pytest.mark.slow
def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["_decode"] * 2 + ["_attend"] * 2, run.stderr
