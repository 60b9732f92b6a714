"""The four models of the paper (appendix A), by name. Training settings of each are in `pipelines/recipes/<name>/`."""

from __future__ import annotations

from typing import Literal

from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig, ModulationConfig
from mac_rag.errors import ConfigError


def _paper(
    lm: str,
    amortization: str,
    input_encoder: str,
    *,
    tokens: int = 24,
    bottleneck: int | None = None,
    quantization: Literal["none", "nf4"] = "none",
) -> MACConfig:
    dtype: Literal["fp32", "bf16"] = "fp32" if quantization == "none" else "bf16"
    return MACConfig(
        base_lm=BaseLMConfig(name=lm, dtype=dtype, quantization=quantization),
        amortization=EncoderConfig(name=amortization, dtype=dtype, quantization=quantization),
        input_encoder=EncoderConfig(name=input_encoder, dtype=dtype, quantization=quantization),
        tokens=tokens,
        modulation=ModulationConfig(bottleneck=bottleneck),
    )


# The paper quantises the pretrained networks of the two large models to 4 bit. The bottlenecks in the prefix maps of
# wide LMs are ours: one linear layer to all keys and values of LLaMA-2-7B would have a billion weights.
PRESETS: dict[str, MACConfig] = {
    "distilgpt2": _paper("distilbert/distilgpt2", "google-t5/t5-small", "google-t5/t5-small", tokens=12),
    "gpt2-large": _paper("openai-community/gpt2-large", "google-t5/t5-base", "google-t5/t5-base", bottleneck=512),
    "gpt2-xl": _paper(
        "openai-community/gpt2-xl", "google-t5/t5-large", "google-t5/t5-base", bottleneck=512, quantization="nf4"
    ),
    "llama2-7b": _paper(
        "meta-llama/Llama-2-7b-hf", "google-t5/t5-large", "google-t5/t5-base", bottleneck=512, quantization="nf4"
    ),
}


def preset(name: str) -> MACConfig:
    """The configuration of one of the paper's models.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
