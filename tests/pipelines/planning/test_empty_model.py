"""Every preset is built with the true sizes of its LM and encoders, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mac_rag.config import BaseLMConfig, EncoderConfig, ModulationConfig
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model import MACModel
from mac_rag.model.checkpoint import find, read_config
from mac_rag.model.presets import PAPER, PRESETS, SMALL, preset, sized_for
from mac_rag.nn.modulation import PrefixTuning
from pipelines.planning.architectures import architecture, known, lm_architecture
from pipelines.planning.empty_model import empty_model
from tests.helpers import mac_config

# As the models' pages on the Hub count them.
PUBLISHED = {
    "distilbert/distilgpt2": 81_912_576,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "smollm2-135m": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "google/gemma-3-1b-pt": 999_885_952,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}


def test_every_model_of_the_table_has_the_published_number_of_weights() -> None:
    assert known().keys() == PUBLISHED.keys()
    for name, count in PUBLISHED.items():
        described = architecture(name)
        with torch.device("meta"):
            kind: Any = AutoModel if described.model_type == "t5" else AutoModelForCausalLM
            model = kind.from_config(described)
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_built_around_their_lm(name: str) -> None:
    config = preset(name)
    model, lm = empty_model(config), lm_architecture(config.base_lm)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model.row_shape == (config.tokens, lm.hidden_size)
    assert model.context_window == config.context_window or config.context_window is None
    assert isinstance(model.modulation, PrefixTuning)
    assert model.modulation.shape.layers == lm.num_hidden_layers
    backbone = model.amortization.network.backbone.config
    assert backbone.hidden_size == (lm.hidden_size if name in SMALL else backbone.d_model)
    if name in PAPER:
        assert config.amortization.name is not None
        return
    assert backbone.num_hidden_layers == config.amortization.layers
    assert model.modulation.prefix_length == config.tokens + 1  # behind one token of the sink
    # The encoders read with the LM's embeddings and bring none.
    embedded = model.base_lm.model.get_input_embeddings().weight
    assert all(tensor.shape != embedded.shape for tensor in model.amortization.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_the_rule_of_sizes(name: str) -> None:
    config, lm = preset(name), lm_architecture(preset(name).base_lm)
    nf4 = config.base_lm.quantization == "nf4"
    assert config == sized_for(
        config.base_lm.name, width=lm.hidden_size, layers=lm.num_hidden_layers, quantized=nf4,
        context_window=config.context_window,
    )  # fmt: skip
    assert nf4 == (PUBLISHED[config.base_lm.name] >= 4e9)
    assert config.amortization == config.input_encoder  # which `init: kv_regression` needs, and no bottleneck
    assert config.modulation == ModulationConfig(kind="prefix", attention_sink=True)
    assert config.aggregation.heads * config.aggregation.head_width == lm.hidden_size
    assert 24 <= config.tokens <= 96
    assert config.tokens in (24, 96) or abs(config.tokens * lm.hidden_size - 65_536) <= 4 * lm.hidden_size


@given(heads=st.integers(1, 256), layers=st.integers(1, 200), quantized=st.booleans())
def test_the_rule_gives_a_model_for_any_lm(heads: int, layers: int, quantized: bool) -> None:
    config = sized_for("my/lm", width=64 * heads, layers=layers, quantized=quantized)
    assert config.tokens % 8 == 0
    assert 24 <= config.tokens <= 96
    assert config.amortization.layers is not None
    assert 1 <= config.amortization.layers <= layers
    wider = sized_for("my/lm", width=64 * heads + 64, layers=layers, quantized=quantized)
    assert wider.tokens <= config.tokens
    assert wider.mlp_width is not None
    assert config.mlp_width is not None
    assert wider.mlp_width >= config.mlp_width


def test_a_width_that_no_heads_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match="width is 100"):
        sized_for("my/lm", width=100, layers=4)


@pytest.mark.parametrize(
    ("lm", "encoder", "design", "modulation"),
    [
        ("llama", None, "decoder-only", ModulationConfig(attention_sink=True)),
        ("llama", None, "encoder-pooling", ModulationConfig(attention_sink=True, slots=2)),
        ("gpt2", "t5", "encoder-decoder", ModulationConfig(bottleneck=8)),
        ("gpt2", "t5", "encoder-only", ModulationConfig(kind="lora")),
        ("llama", "bert", "encoder-only", ModulationConfig(kind="film")),
    ],
)
def test_shapes_are_those_of_the_real_model(
    model_folder: Callable[[str], Path], lm: str, encoder: str | None, design: str, modulation: ModulationConfig
) -> None:
    folder = None if encoder is None else model_folder(encoder)
    config = mac_config(model_folder(lm), folder, design, modulation=modulation)
    if folder is None:
        part = config.amortization.model_copy(update={"layers": 1})
        config = config.model_copy(update={"amortization": part, "input_encoder": part})
    real, empty = MACModel.from_config(config, device="cpu"), empty_model(config)
    assert _shapes(empty) == _shapes(real)


def _shapes(model: MACModel) -> dict[str, tuple[Any, ...]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["tiny", pytest.param("mac-small", marks=pytest.mark.slow)])
def test_checkpoints_are_built_from_their_own_files(tiny_checkpoint: Path, name: str) -> None:
    folder = tiny_checkpoint if name == "tiny" else find(name, None)
    real, empty = MACModel.from_pretrained(folder), empty_model(read_config(folder), folder)
    assert _shapes(empty) == _shapes(real)


def test_names_that_say_no_sizes(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"--set base_lm\.name=FOLDER"):
        architecture("${stages.reader}/best")
    with pytest.raises(ModelLoadError, match="nowhere"):
        architecture(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"a\.gguf are known only once it is read"):
        lm_architecture(BaseLMConfig(name="folder", gguf_file="a.gguf"))
    config = mac_config(model_folder("llama"))
    deep = config.model_copy(update={"amortization": EncoderConfig(design="decoder-only", name=None, layers=9)})
    with pytest.raises(ModelLoadError, match="layers is 9, but llama has 2"):
        empty_model(deep)


def test_a_folder_comes_before_the_table(model_folder: Callable[[str], Path]) -> None:
    described = architecture(str(model_folder("gpt2")))
    assert described.n_embd == AutoConfig.from_pretrained(model_folder("gpt2")).n_embd
