"""A frozen linear layer on a CPU: its weights are laid out once for oneDNN's matrix kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def matrix_dtype() -> torch.dtype:
    """The dtype that this CPU multiplies matrices in fastest: bf16 with AVX512-BF16 or AMX, else fp32.

    A CPU with plain AVX512 can emulate bf16, but is faster in fp32.
    """
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bf16 and _has_onednn() else torch.float32


class PackedLinear:
    """`y = W x + b`, without gradients. Sums are accumulated in fp32, whatever the dtype.

    Later changes of the weights are not seen.

    Args:
        weight: W, `[out, in]`, in fp32 on the CPU.
        bias: b, `[out]`.
        dtype: dtype of weights, x and y.
    """

    def __init__(self, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
        self._packed = _has_onednn()
        weight = weight.detach().to(dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias.detach().to(dtype).contiguous()

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """`[N, in] -> [N, out]`; with `gelu`, of GELU(y)."""
        if self._packed:
            after = "gelu" if gelu else "none"
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, after, [], "none")
            return product
        product = functional.linear(x, self._weight, self._bias)
        return functional.gelu(product) if gelu else product


def _has_onednn() -> bool:
    """True where torch has oneDNN's kernels for this processor: builds for x86 have."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()
