"""Weights stored as int8: how near they come back, in checkpoints of whole models, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

from mac_rag.config import BaseLMConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm.loading import INT8_LM, from_int8, load_causal_lm, to_int8
from mac_rag.model import MACModel
from tests.helpers import mac_config

CPU = torch.device("cpu")


@given(arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.floats(-1e3, 1e3, width=32)))
def test_no_weight_is_further_off_than_half_a_step_of_its_row_or_column(rows) -> None:  # type: ignore[no-untyped-def]
    weights = torch.from_numpy(rows)
    stored = to_int8({"w": weights})
    assert stored["w"].dtype == torch.int8
    off = (from_int8(stored)["w"] - weights).abs()
    steps = [weights.abs().amax(dim, keepdim=True) / 127 for dim in (-1, -2)]
    assert any((off <= 0.501 * step + 1e-37).all() for step in steps)
    by_rows = (weights / steps[0].clamp(min=1e-37)).round() * steps[0] - weights
    assert off.square().sum() <= by_rows.square().sum() * 1.001 + 1e-30


def test_a_large_column_does_not_take_the_others_precision() -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, 40, 30)
    weights[..., 7] = 1000.0
    back = from_int8(to_int8({"w": weights}))["w"]
    assert torch.allclose(back, weights, atol=0.02)
    turned = from_int8(to_int8({"w": weights.mT}))["w"]
    assert torch.allclose(turned, weights.mT, atol=0.02)


def test_vectors_and_whole_numbers_stay_as_they_are() -> None:
    state = {"bias": torch.randn(5), "ids": torch.arange(6).view(2, 3), "zeros": torch.zeros(2, 3)}
    back = from_int8(to_int8(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_checkpoint_of_int8_is_a_quarter_and_answers_as_before(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = MACModel.from_config(mac_config(model_folder("llama")), device="cpu")
    model.save_pretrained(tmp_path / "fp32")
    model.save_pretrained(tmp_path / "int8", dtype=torch.int8)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors")) for name in ("fp32", "int8")]
    assert sizes[1] < 0.35 * sizes[0]
    rounded = MACModel.from_pretrained(tmp_path / "int8", device="cpu")
    texts = ["The mayor of Lisbon opened a bridge.", "A storm closed the port of Riga on Monday."]
    before, after = model.amortize(texts), rounded.amortize(texts)
    assert (before - after).norm() < 0.05 * before.norm()
    prompt = torch.tensor([[1, 40, 41, 42]])
    with torch.no_grad():
        logits = [m.base_lm.model(prompt).logits for m in (model, rounded)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()
    # Rounding what is already rounded changes nothing.
    rounded.save_pretrained(tmp_path / "again", dtype=torch.int8)
    again = MACModel.from_pretrained(tmp_path / "again", device="cpu")
    assert torch.allclose(again.amortize(texts), after, atol=1e-5)


def test_a_base_lm_of_int8_that_does_not_fit_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    MACModel.from_config(mac_config(model_folder("gpt2")), device="cpu").save_pretrained(tmp_path, dtype=torch.int8)
    place = tmp_path / "base_lm"
    lm, _ = load_causal_lm(BaseLMConfig(name=str(place)), CPU)
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    with pytest.raises(ModelLoadError, match="cannot be quantised again"):
        load_causal_lm(BaseLMConfig(name=str(place), quantization="nf4"), CPU)
    stored = load_file(place / INT8_LM)
    del stored["transformer.wpe.weight"]
    save_file(stored, place / INT8_LM)
    with pytest.raises(ModelLoadError, match=r"does not match config.json: transformer.wpe.weight"):
        load_causal_lm(BaseLMConfig(name=str(place)), CPU)
