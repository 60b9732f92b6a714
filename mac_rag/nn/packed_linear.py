"""A frozen linear layer on a CPU: its weights are laid out once for oneDNN's matrix kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.nn.cpu_linear import is_supported, onednn_linear


class PackedLinear:
    """`y = W x + b` in fp32, without gradients. Later changes of the weights are not seen.

    Where torch has no oneDNN for the processor, it is an ordinary linear layer.

    Args:
        weight: W, `[out, in]`, on the CPU.
        bias: b, `[out]`; None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # Builds for x86 have oneDNN's kernels for these two operators, which torch's own compiler uses.
        self._packed = is_supported()
        weight = weight.detach().contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """`[..., in] -> [..., out]`; with `gelu`, of GELU(y)."""
        if self._packed:
            return onednn_linear(x, self._weight, self._bias, "gelu" if gelu else "none")
        product = functional.linear(x, self._weight, self._bias)
        return functional.gelu(product) if gelu else product
