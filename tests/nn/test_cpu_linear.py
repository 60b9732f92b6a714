"""Linear layers by oneDNN: what `nn.Linear` says, and only where they can say it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mac_rag.nn.cpu_linear import CPULinear, filled_rows, is_supported, onednn_linear, use_onednn

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


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 3), (1, 133)])
@pytest.mark.parametrize("bias", [False, True])
def test_bf16_in_another_layout_is_a_linear_layer_whatever_its_weights_become(
    rows: tuple[int, ...], bias: bool
) -> None:
    """Against float64: the sums are exact enough that only the result is rounded."""
    layer = nn.Linear(130, 70, bias=bias, dtype=torch.bfloat16)
    use_onednn(layer)
    x = torch.randn(*rows, 130, dtype=torch.bfloat16)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: layer.weight.mul_(2),
            lambda: setattr(layer.weight, "data", -layer.weight),
        ):
            change()
            expected = copy.deepcopy(layer).double()(x.double())
            torch.testing.assert_close(layer(x).double(), expected, rtol=2**-8, atol=1e-3)


def test_gradients_flow() -> None:
    layer, plain = nn.Linear(512, 4096), nn.Linear(512, 4096)
    plain.load_state_dict(layer.state_dict())
    use_onednn(layer)
    x = torch.randn(8, 512)
    for each in (layer, plain):
        each(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
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


def test_few_kernels_are_made_for_many_numbers_of_rows() -> None:
    assert len({filled_rows(rows) for rows in range(1, 4097)}) < 140


@pytest.mark.parametrize("after", ["none", "gelu"])
@pytest.mark.parametrize("shape", [(0,), (1,), (17,), (2, 33), (3, 1, 67), (129,)])
def test_filled_rows_leave_the_product_as_it_is(shape: tuple[int, ...], after: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*shape, 48), torch.randn(80, 48), torch.randn(80)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = torch.nn.functional.gelu(expected) if after == "gelu" else expected
    torch.testing.assert_close(onednn_linear(x, weight, bias, after).double(), expected, rtol=1e-4, atol=1e-4)
