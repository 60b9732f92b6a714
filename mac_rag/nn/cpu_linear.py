"""Linear layers that use oneDNN's matrix kernels on a CPU, without gradients.

PyTorch multiplies fp32 matrices with MKL, which is slow on processors other than Intel's: on an AMD EPYC with AVX-512,
oneDNN is about twice as fast, even for a single row of a wide layer. In bf16 PyTorch itself uses oneDNN, but leaves
weights as they lie; in oneDNN's own layout a single row takes less than half of the time, and 256 rows four fifths. The
values of the weights do not change.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

# Multiplications of a product; a smaller one is finished before oneDNN has started.
_LEAST = 1 << 20
# Number of rows from which on the padding is finer.
_MANY = 1024


class CPULinear(nn.Linear):
    """`nn.Linear` that multiplies with oneDNN if it can and if it pays."""

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


class PackedBF16Linear(nn.Linear):
    """`nn.Linear` that keeps a copy of its bf16 weights in oneDNN's layout, made anew after they have changed."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in] -> [..., out]`."""
        weight = self.weight
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not (input.device.type == weight.device.type == "cpu")
            or not (input.dtype == weight.dtype == torch.bfloat16)
            or not input.numel()
            or input.shape[-1] != self.in_features
            or weight.is_inference()
        ):
            return super().forward(input)
        state = weight.data_ptr(), weight._version
        known = _PACKED.get(self)
        if known is None or known[0] != state:
            known = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
            _PACKED[self] = known
        return onednn_linear(input, known[1], self.bias)


_PACKED: WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()
_MOST_PACKED = 1 << 30  # bytes of a module's bf16 weights; those of a larger one are not kept twice


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, after: str = "none") -> Tensor:
    """`W x + b` with oneDNN, `[..., in] -> [..., out]`.

    oneDNN compiles a kernel of half a MiB for each number of rows that it sees, and keeps a thousand of them. Batches
    of questions have another number of tokens each time, so rows of zeros pad them to one of few numbers of rows.

    Args:
        x: `[..., in]`, on the CPU.
        weight: `[out, in]`, or in oneDNN's layout.
        bias: `[out]`; None for no bias.
        after: function applied to the result: `none` or `gelu`.
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
    """The smallest number with few significant bits that is at least `rows`: at most an eighth more.

    From 1,024 rows on it is at most a 32nd more. There a product takes milliseconds, and a batch of questions has a
    multiple of T rows, so that few of these numbers occur.
    """
    bits = 4 if rows < _MANY else 6
    step = 1 << max(0, rows.bit_length() - bits)
    return -(-rows // step) * step


def is_supported() -> bool:
    """True if PyTorch has oneDNN's kernels for this processor."""
    supported: bool = torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()
    return supported


def use_onednn(module: nn.Module) -> None:
    """Has every `nn.Linear` of a module multiply with oneDNN, if it is supported; subclasses stay as they are."""
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear] if is_supported() else []
    half = [layer for layer in layers if layer.weight.dtype == torch.bfloat16]
    packed = set(half) if sum(layer.weight.nbytes for layer in half) <= _MOST_PACKED else set()
    for layer in layers:
        layer.__class__ = PackedBF16Linear if layer in packed else CPULinear


class PackedLinear:
    """`y = W x + b` in fp32, without gradients. Later changes of the weights have no effect.

    If torch has no oneDNN for the processor, it is an ordinary linear layer.

    Args:
        weight: W, `[out, in]`, on the CPU.
        bias: b, `[out]`; None for no bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # Builds for x86 have oneDNN's kernels for these two operators, which torch.compile uses.
        self._packed = is_supported()
        weight = weight.detach().contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """`[..., in] -> [..., out]`; with `gelu`, returns GELU(y)."""
        if self._packed:
            return onednn_linear(x, self._weight, self._bias, "gelu" if gelu else "none")
        product = functional.linear(x, self._weight, self._bias)
        return functional.gelu(product) if gelu else product
