"""BERT without padding against transformers' BERT; what is not supported; weights that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BertConfig, BertGenerationConfig, BertGenerationEncoder, BertModel

from mac_rag.lm.prefix_lm import PrefixLMBody, PrefixLMConfig
from mac_rag.nn.cpu_linear import PackedLinear
from mac_rag.nn.unpadded_bert import UnpaddedBert, forget, last_states, last_states_without_gradients, unpadded

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BATCHES = st.lists(st.lists(st.integers(1, 49), min_size=1, max_size=40), min_size=1, max_size=6)


def model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    built: Any
    if kind == "bert":
        built = BertModel(BertConfig(**SIZES | changes), add_pooling_layer=False)
    elif kind == "generation":
        built = BertGenerationEncoder(BertGenerationConfig(**SIZES | changes))
    else:
        built = PrefixLMBody(PrefixLMConfig(**SIZES | {"is_decoder": True} | changes))
        built.bidirectional = True
    for weight in built.parameters():  # biases and norms start at 0 and 1, which would hide that they are left out
        weight.data += 0.1 * torch.randn_like(weight)
    return built.eval()


KINDS = {kind: model(kind) for kind in ("bert", "generation", "prefix")}


def batch(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], batch_first=True)
    return ids, mask


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(rows=BATCHES, kind=st.sampled_from(sorted(KINDS)))
def test_states_are_those_of_the_model(rows: list[list[int]], kind: str) -> None:
    ids, mask = batch(rows)
    with torch.no_grad():
        expected = last_states(KINDS[kind], ids, mask) * mask[..., None]
    found = UnpaddedBert(KINDS[kind])(ids, mask)
    assert found.shape == expected.shape
    assert not found[mask == 0].any()
    assert_alike(found, expected)


def test_padding_may_be_anywhere_and_holds_a_place() -> None:
    ids, mask = batch([[7, 8, 9, 10], [11, 12]])
    mask[0, 1] = 0
    expected = KINDS["bert"](input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
    assert_alike(UnpaddedBert(KINDS["bert"])(ids, mask), expected)


def test_a_text_without_tokens_has_no_states() -> None:
    ids, mask = batch([[7, 8, 9], [5]])
    mask[1] = 0
    found = UnpaddedBert(KINDS["bert"])(ids, mask)
    assert not found[1].any()
    torch.testing.assert_close(found[0], UnpaddedBert(KINDS["bert"])(ids[:1], mask[:1])[0])


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_layer_is_a_linear_layer(gelu: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(3, 9, 48)
    with torch.no_grad():
        expected = nn.functional.gelu(layer(x)) if gelu else layer(x)
    assert_alike(PackedLinear(layer.weight, layer.bias)(x, gelu=gelu), expected)


def test_what_is_not_supported_is_read_by_the_model_itself() -> None:
    ids, mask = batch([[7, 8, 9], [5]])
    causal, training, double = model("prefix"), model("bert").train(), model("bert").double()
    causal.bidirectional = False
    adapted = model("generation")
    adapted.encoder.layer[1].attention.self.query = Doubled(32, 32)
    for other in (causal, training, double, adapted, model("bert", hidden_act="relu"), model("bert", is_decoder=True)):
        assert unpadded(other) is None
        with torch.no_grad():
            expected = other(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.equal(last_states_without_gradients(other, ids, mask), expected)


class Doubled(nn.Linear):
    """A layer that computes something else than `nn.Linear`, as adapters and quantised layers do."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_changed_weights_are_seen() -> None:
    changing = model("bert")
    first = unpadded(changing)
    assert first is not None
    assert unpadded(changing) is first
    weight = changing.encoder.layer[0].output.dense.weight
    with torch.no_grad():
        weight.mul_(1.5)
    second = unpadded(changing)
    assert second is not first
    weight.data = weight.data / 1.5
    third = unpadded(changing)
    assert third is not second
    weight.data.mul_(1.5)  # as fused optimisers do: no version says so
    assert unpadded(changing) is third
    forget(nn.ModuleList([changing]))
    assert unpadded(changing) is not third


def test_layouts_go_with_their_model() -> None:
    from mac_rag.nn import unpadded_bert

    going = model("bert")
    unpadded(going)
    before = len(unpadded_bert._KNOWN)
    del going
    assert len(unpadded_bert._KNOWN) == before - 1
