"""Loading pretrained parts: dtype, quantisation, and what is frozen and kept in a checkpoint when it is quantised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mac_rag.config import BaseLMConfig, Dtype, EncoderConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ConfigError, ModelLoadError, QuantizationError
from mac_rag.lm import base_lm, devices
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import default_device
from mac_rag.lm.loading import load_backbone, load_causal_lm, require_gradients
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.model import MACModel
from tests.helpers import mac_config

Folder = Callable[[str], Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dtype(model_folder: Folder, dtype: str, expected: torch.dtype) -> None:
    config = BaseLMConfig.model_validate({"name": str(model_folder("gpt2")), "dtype": dtype})
    lm, _ = load_causal_lm(config, CPU)
    assert {p.dtype for p in lm.parameters()} == {expected}


def test_a_tokenizer_without_padding_pads_with_its_end(model_folder: Folder, tmp_path: Path) -> None:
    import json
    import shutil

    place = shutil.copytree(model_folder("gpt2"), tmp_path / "lm")
    settings = json.loads((place / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    _, tokenizer = load_causal_lm(BaseLMConfig(name=str(place)), CPU)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_pickled_weights_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    import shutil

    place = shutil.copytree(model_folder("gpt2"), tmp_path / "lm")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_causal_lm(BaseLMConfig(name=str(place)), CPU)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_4_bit_lm_answers_on_the_cpu(model_folder: Folder, name: str) -> None:
    config = BaseLMConfig(name=str(model_folder(name)), quantization="nf4")
    lm = BaseLM.load(config, PromptFormat(), CPU)
    assert lm.model.is_quantized
    assert lm.generate([[1, 30, 31], [1, 40]], None, max_new_tokens=3)
    assert (
        lm.shape(ModulationConfig(kind="lora")).linears.keys()
        >= BaseLM.load(BaseLMConfig(name=str(model_folder(name))), PromptFormat(), CPU)
        .shape(ModulationConfig(kind="lora"))
        .linears.keys()
    )


def test_quantising_t5_freezes_its_encoder_and_trains_its_decoder(model_folder: Folder) -> None:
    config = EncoderConfig(name=str(model_folder("t5")), quantization="nf4")
    backbone = load_backbone(config, CPU)
    trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("decoder.") for name in trained)
    kinds = {name: type(module).__name__ for name, module in backbone.named_modules()}
    assert kinds["encoder.block.0.layer.0.SelfAttention.q"] == "Linear4bit"
    assert kinds["decoder.block.0.layer.0.SelfAttention.q"] == "Linear"


def test_a_quantised_model_comes_back_from_its_checkpoint(model_folder: Folder, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = mac_config(model_folder("llama"), model_folder("t5"), "encoder-decoder")
    part = config.amortization.model_copy(update={"quantization": "nf4"})
    model = MACModel.from_config(config.model_copy(update={"amortization": part}), device="cpu")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("amortization.network.backbone.encoder" in name for name in stored)
    again = MACModel.from_pretrained(tmp_path, device="cpu")
    assert again.fingerprint == model.fingerprint
    torch.testing.assert_close(again.amortize(["A text.", "Another."]), model.amortize(["A text.", "Another."]))


def test_gradients_through_quantised_weights_are_refused_on_the_cpu() -> None:
    require_gradients("none", CPU)
    require_gradients("nf4", torch.device("cuda"))
    for quantization in ("nf4", "int8"):
        with pytest.raises(QuantizationError, match=rf"{quantization}.*cpu"):
            require_gradients(quantization, CPU)  # type: ignore[arg-type]


def test_a_quantised_lm_cannot_be_tuned(model_folder: Folder) -> None:
    lm, _ = load_causal_lm(BaseLMConfig(name=str(model_folder("llama")), quantization="nf4"), CPU)
    with pytest.raises(ConfigError, match="stays frozen"):
        make_trainable(lm, None)


def test_lora_without_a_target(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_lm, "LORA_TARGETS", ("nothing",))
    config = mac_config(model_folder("llama"), modulation=ModulationConfig(kind="lora"))
    with pytest.raises(ModelLoadError, match=r"named nothing.*choose another modulation\.kind"):
        MACModel.from_config(config, device="cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        default_device(device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_numbers_without_instructions(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads an LM in them is told; fp32 has instructions everywhere, and a GPU has others."""
    told = r"an-lm is loaded in .*set dtype: fp32"
    monkeypatch.setattr(devices, "_has_instructions", lambda _: False)
    if dtype == "fp32":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            devices.warn_of_slow_numbers("an-lm", dtype, torch.device("cpu"))
    else:
        with pytest.warns(UserWarning, match=told):
            devices.warn_of_slow_numbers("an-lm", dtype, torch.device("cpu"))
    monkeypatch.undo()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices.warn_of_slow_numbers("an-lm", dtype, torch.device("cpu"))
        devices.warn_of_slow_numbers("an-lm", dtype, torch.device("meta"))
    supported = {"bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported, "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported}
    assert len(caught) == (dtype != "fp32" and not supported[dtype]())
