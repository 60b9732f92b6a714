"""Memory tokens that imitate what the base LM keeps of a text, against the LM's own cache and plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig
from mac_rag.errors import ConfigError
from mac_rag.imitation import imitation_loss, kept_by_lm
from mac_rag.model import MACModel
from mac_rag.nn.modulation import PrefixModulation
from mac_rag.objective import Batch, LossWeights, mac_loss

TEXTS = [
    "William of Normandy won the battle at Hastings in 1066.",
    "Rain fell.",
    "The library of the town was opened by the mayor, and burned down in the same year.",
]
TOKENS = 4


@pytest.fixture(scope="module")
def model() -> MACModel:
    torch.manual_seed(2)
    part = EncoderConfig(design="encoder-pooling", name="minilm", embeddings="base-lm")
    config = MACConfig(
        base_lm=BaseLMConfig(name="minilm"),
        amortization=part,
        input_encoder=part,
        tokens=TOKENS,
        mlp_width=8,
        aggregation=AggregationConfig(blocks=1, heads=6, head_width=64, feed_forward=1, prior_width=64),
    )
    return MACModel.from_config(config, device="cpu")


def rows_of(model: MACModel) -> list[list[int]]:
    return [model.amortization.ids(text) for text in TEXTS]


@torch.no_grad()
def test_what_is_kept_is_the_lms_cache_pooled_as_memory_tokens_pool_words(model: MACModel) -> None:
    network: Any = model.amortization.network
    kept = kept_by_lm(model, rows_of(model))
    assert kept.shape == (3, 6, 2, 12, TOKENS, 32)
    for row, ours in zip(rows_of(model), kept, strict=True):
        ids = torch.tensor([row])
        logits = network.places(network.text_states(ids, torch.ones_like(ids)), torch.ones_like(ids))
        cache: Any = model.base_lm.model(ids, parts=torch.ones_like(ids), use_cache=True).past_key_values
        for layer, states in enumerate(cache):
            for kind in (0, 1):
                for token in range(TOKENS):
                    shares = logits[0, :, token].softmax(-1).mean(0)
                    expected = sum(share * states[kind][0, :, word] for word, share in enumerate(shares))
                    assert isinstance(expected, Tensor)
                    torch.testing.assert_close(ours[layer, kind, :, token], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_loss_is_the_share_of_the_variance_that_is_missed(model: MACModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(model)
    kept = kept_by_lm(model, rows)
    mean = kept.mean((0, 4), keepdim=True).expand_as(kept)
    for made, missed in ((kept, 0.0), (mean, 1.0), (kept + 0.5 * (mean - kept), 0.25)):
        monkeypatch.setattr(model.modulation, "forward", lambda phi, made=made: PrefixModulation(made))
        torch.testing.assert_close(imitation_loss(model, rows, torch.zeros(3)), torch.tensor(missed))


def test_a_few_steps_of_imitation_make_memory_more_like_what_is_kept(model: MACModel) -> None:
    batch = Batch(TEXTS, ["Where?"], ["Hastings"], [0])
    weights = LossWeights(answer=0, imitation=2)
    optimizer = torch.optim.Adam([*model.amortization.parameters(), *model.modulation.parameters()], lr=3e-4)
    losses = []
    for _ in range(8):
        terms, _ = mac_loss(model, batch, weights)
        torch.testing.assert_close(terms["loss"], 2 * terms["imitation"])
        losses.append(float(terms["imitation"]))
        terms["loss"].backward()
        assert all(p.grad is None for p in model.base_lm.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_what_cannot_imitate(tiny_model: MACModel, model: MACModel) -> None:
    with pytest.raises(ConfigError, match="only a prefix of one slot, of encoders of design encoder-pooling"):
        imitation_loss(tiny_model, [[1, 2]], torch.zeros(1))
    tokenizer = model.amortization.tokenizer
    try:
        model.amortization.tokenizer = tiny_model.amortization.tokenizer
        with pytest.raises(ConfigError, match="cannot imitate a base LM that cuts texts into other tokens"):
            kept_by_lm(model, [[1, 2]])
    finally:
        model.amortization.tokenizer = tokenizer
