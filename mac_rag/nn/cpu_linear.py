"""Linear layers that use oneDNN's matrix kernels on a CPU, in fp32 and without gradients.

PyTorch multiplies fp32 matrices by MKL, which makes little of processors that are not Intel's: on an AMD EPYC with
AVX-512, oneDNN is about twice as fast, also for a single row of a wide layer (`python -m benchmarks.linear`). The
weights stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Products of a smaller layer are over before oneDNN has begun: multiplications of a product.
_LEAST = 1 << 20


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
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "none")
        return product


def is_supported() -> bool:
    """True where PyTorch has oneDNN's kernels for this processor."""
    supported: bool = torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()
    return supported


def use_onednn(module: nn.Module) -> None:
    """Makes every `nn.Linear` of a module a `CPULinear`, where it is supported; subclasses stay what they are."""
    for layer in module.modules() if is_supported() else ():
        if type(layer) is nn.Linear:
            layer.__class__ = CPULinear
