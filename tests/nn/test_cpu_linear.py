"""Linear layers by oneDNN: what `nn.Linear` says, and only where they can say it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mac_rag.nn.cpu_linear import CPULinear, is_supported, use_onednn

pytestmark = pytest.mark.skipif(not is_supported(), reason="this processor has no kernels of oneDNN")


@settings(max_examples=30, deadline=None)
@given(
    rows=st.sampled_from([(0,), (1,), (37,), (3, 50), (2, 1, 64)]),
    sizes=st.sampled_from([(7, 5), (384, 384), (130, 8200), (1024, 1025)]),
    bias=st.booleans(),
    transposed=st.booleans(),
)
def test_it_is_a_linear_layer(rows: tuple[int, ...], sizes: tuple[int, int], bias: bool, transposed: bool) -> None:
    """Against float64; small and large layers, no rows, views whose strides are not those of a new tensor."""
    layer = nn.Linear(*sizes, bias=bias)
    use_onednn(layer)
    x = torch.randn(*rows, sizes[0])
    if transposed:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    with torch.no_grad():
        expected = copy.deepcopy(layer).double()(x.double())
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_changed_weights_count_at_once() -> None:
    layer = nn.Linear(512, 4096)
    use_onednn(layer)
    x = torch.randn(8, 512)
    with torch.no_grad():
        layer(x)
        layer.weight.mul_(2)
        layer.weight.data = layer.weight.data + 1
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-3, rtol=1e-4)


def test_gradients_flow() -> None:
    layer, plain = nn.Linear(512, 4096), nn.Linear(512, 4096)
    plain.load_state_dict(layer.state_dict())
    use_onednn(layer)
    x = torch.randn(8, 512)
    for each in (layer, plain):
        each(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_left_to_pytorch(dtype: torch.dtype) -> None:
    layer = nn.Linear(512, 4096, dtype=dtype)
    x = torch.randn(8, 512, dtype=dtype)
    with torch.no_grad():
        expected = layer(x)
        use_onednn(layer)
        assert torch.equal(layer(x), expected)


def test_autocast_is_left_to_pytorch() -> None:
    layer = nn.Linear(512, 4096)
    use_onednn(layer)
    with torch.no_grad(), torch.autocast("cpu"):
        assert layer(torch.randn(8, 512)).dtype == torch.bfloat16


def test_a_wrong_width_is_an_error() -> None:
    layer = nn.Linear(512, 4096)
    use_onednn(layer)
    with torch.no_grad(), pytest.raises(RuntimeError, match="8x256 and 512x4096"):
        layer(torch.randn(8, 256))


def test_only_plain_layers_change() -> None:
    class Other(nn.Linear):
        pass

    network = nn.Sequential(nn.Linear(2, 2), Other(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.LayerNorm(2))
    use_onednn(network)
    assert [type(layer) for layer in network.modules() if isinstance(layer, nn.Linear)] == [CPULinear, Other, CPULinear]
