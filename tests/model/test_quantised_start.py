"""Around an LM in 4 bit, encoders start from the LM's weights as they were before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mac_rag.config import BaseLMConfig, MACConfig, ModulationConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm.loading import load_first_layers
from mac_rag.model import MACModel
from tests.helpers import mac_config


def around(folder: Path, **base_lm: Any) -> MACConfig:
    values = mac_config(folder, None, "encoder-pooling", modulation=ModulationConfig(attention_sink=True)).model_dump()
    part = {**values["amortization"], "layers": 1, "embeddings": "base-lm", "dtype": "bf16"}
    lm = BaseLMConfig(**{"name": str(folder), "dtype": "bf16", "quantization": "nf4", **base_lm})
    return MACConfig.model_validate({**values, "base_lm": lm, "amortization": part, "input_encoder": part})


def test_encoders_start_from_the_first_layers_unquantised(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model_folder("llama")
    config = around(folder)
    model = MACModel.from_config(config, device="cpu")
    backbone = model.amortization.network.backbone
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    first = {name: weight for name, weight in whole.named_parameters() if name.startswith(("layers.0.", "norm."))}
    found = dict(backbone.named_parameters())
    assert found.keys() == first.keys()  # one layer, and no embeddings of its own
    for name, weight in first.items():
        assert found[name].requires_grad
        assert torch.equal(found[name], weight), name
    assert model.base_lm.model.is_quantized
    assert backbone.get_input_embeddings().weight is model.base_lm.model.get_input_embeddings().weight

    model.save_pretrained(tmp_path / "saved")
    loaded = MACModel.from_pretrained(tmp_path / "saved", device="cpu")
    assert loaded.config.base_lm.quantization == "nf4"
    text = ["Ada Voss was appointed."]
    torch.testing.assert_close(loaded.amortize(text), model.amortize(text), rtol=0, atol=0.1)


def test_more_layers_than_there_are(model_folder: Callable[[str], Path]) -> None:
    config = around(model_folder("llama"))
    part = config.amortization.model_copy(update={"layers": 3})
    with pytest.raises(ModelLoadError, match="layers is 3, but llama has 2"):
        MACModel.from_config(config.model_copy(update={"amortization": part, "input_encoder": part}), device="cpu")


def test_files_in_4_bit_are_no_start(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    MACModel.from_config(around(model_folder("llama")), device="cpu").save_pretrained(tmp_path / "saved")
    with pytest.raises(ModelLoadError, match="holds quantised weights, from which an encoder cannot start"):
        MACModel.from_config(around(tmp_path / "saved" / "base_lm"), device="cpu")


def test_embeddings_of_another_dtype_are_not_shared(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="only at its dtype"):
        around(model_folder("llama"), dtype="fp32")


def test_weights_that_are_missing_are_named(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    state = {name: weight for name, weight in whole.state_dict().items() if "layers.0.mlp.up" not in name}
    whole.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the LM's weights, such as layers\.0\.mlp\.up_proj"):
        load_first_layers(BaseLMConfig(name=str(tmp_path)), 1, torch.device("cpu"))
    assert len(list(load_first_layers(BaseLMConfig(name=str(model_folder("gpt2"))), None, torch.device("cpu")).h)) == 2
