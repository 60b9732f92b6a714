"""Linear layers that use oneDNN's matrix kernels on a CPU, in fp32 and without gradients.

PyTorch multiplies fp32 matrices by MKL, which makes little of processors that are not Intel's: on an AMD EPYC with
AVX-512, oneDNN is about twice as fast, also for a single row of a wide layer. The weights stay as
they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Products of a smaller layer are over before oneDNN has begun: multiplications of a product.
_LEAST = 1 << 20
# Rows from which on fewer are filled up.
_MANY = 1024


class CPULinear(nn.Linear):
    """`nn.Linear`, which multiplies by oneDNN where it can and where it pays."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in] -> [..., out]`."""
        if (
            torch.is_grad_enabled()
            or input.numel() * self.out_features < _LEAST
            or not (input.device.type == self.weight.device.type == "cpu")
            or not (input.dtype == self.weight.dtype == torch.float32)
            or torch.is_autocast_enabled("cpu")
            or input.shape[-1] != self.in_features  # PyTorch's error names the shapes
        ):
            return super().forward(input)
        return onednn_linear(input, self.weight, self.bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, after: str = "none") -> Tensor:
    """`W x + b` by oneDNN, `[..., in] -> [..., out]`.

    oneDNN makes a kernel of half a MiB for each number of rows that it meets, and keeps a thousand of them. Questions
    that are answered together have another number of tokens each time, so rows of zeros fill up to one of few numbers.

    Args:
        x: `[..., in]`, fp32 on the CPU.
        weight: `[out, in]`, or laid out for oneDNN.
        bias: `[out]`; None for none.
        after: what follows: `none` or `gelu`.
    """
    rows = x.numel() // max(1, x.shape[-1])
    filled = filled_rows(rows)
    product: Tensor
    if filled == rows:
        product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], "none")
        return product
    flat = x.new_zeros(filled, x.shape[-1])
    flat[:rows] = x.reshape(rows, -1)
    product = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, after, [], "none")
    return product[:rows].view(*x.shape[:-1], product.shape[-1])


def filled_rows(rows: int) -> int:
    """The least number of at least so many rows that has few significant bits: at most an eighth more.

    Beyond a thousand rows it is at most a 32nd more. There a product takes milliseconds, and a batch of questions has a
    multiple of T rows, so that few of these numbers occur.
    """
    bits = 4 if rows < _MANY else 6
    step = 1 << max(0, rows.bit_length() - bits)
    return -(-rows // step) * step


def is_supported() -> bool:
    """True where PyTorch has oneDNN's kernels for this processor."""
    supported: bool = torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()
    return supported


def use_onednn(module: nn.Module) -> None:
    """Makes every `nn.Linear` of a module a `CPULinear`, where it is supported; subclasses stay what they are."""
    for layer in module.modules() if is_supported() else ():
        if type(layer) is nn.Linear:
            layer.__class__ = CPULinear


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
