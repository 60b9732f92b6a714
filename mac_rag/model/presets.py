"""Models by name: the four of the paper (appendix A), and one for each of some small open LMs of today.

Training settings of the paper's models are in `pipelines/recipes/<name>/`, of the others in
`pipelines/recipes/small-lm/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ConfigError
from mac_rag.lm.loading import load_architecture, load_tokenizer

# T * D, numbers in the memory of a document. SmolLM2-135M then has one memory token for every two words of a paragraph,
# and an LM as wide as LLaMA-2-7B has the paper's 24 tokens.
_NUMBERS = 1 << 16
_FEWEST, _MOST = 24, 96
_HEAD = 64
_WINDOW = 8192  # SmolLM2's number of positions; the window of LMs with more is cut to it
AUTO = "auto"  # instead of a preset's name: a model `around` the configured LM


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
        prompt=PromptFormat(question="{question}"),  # as published
    )


def sized_for(
    lm: str, *, width: int, layers: int, quantized: bool = False, context_window: int | None = None
) -> MACConfig:
    """A MAC model around a rotary LM, with sizes that follow from the LM's by one rule.

    Both encoders start from the LM's own first layers and share its embeddings, so no other model is needed, and the
    networks can start by `init: kv_regression`. The rule:

    - encoders: a quarter of the LM's layers, rounded up; an eighth if the LM is quantised, since the encoders are
      trained in 32 bits;
    - tokens: T such that T * D is about 65,536, a multiple of 8 from 24 (the paper's) to 96;
    - MLP of each token: D / 24, a multiple of 8;
    - aggregation: two blocks with D / 64 heads of 64, so that attended memory tokens pass through unchanged;
    - document prior: as wide as the LM, up to 1,024;
    - prefix: one linear layer without bottleneck, which `init: kv_regression` needs, after an attention sink.

    Examples:
        >>> config = sized_for("my/llama", width=2048, layers=16)
        >>> config.tokens, config.amortization.layers, config.aggregation.heads, config.mlp_width
        (32, 4, 32, 88)

    Args:
        lm: name of the LM on the Hub, or a folder.
        width: D, width of its hidden states, a multiple of 64.
        layers: number of its layers.
        quantized: True for an LM in 4 bit (NF4).
        context_window: largest number of tokens of documents, question and answer together; None for all the LM's
            positions.

    Raises:
        ConfigError: for a width that is no multiple of 64.
    """
    if width < _HEAD or width % _HEAD:
        raise ConfigError(
            f"width is {width}, but the heads of the aggregation network are {_HEAD} wide; give a multiple"
        )
    share = 8 if quantized else 4
    encoder = EncoderConfig(
        design="encoder-pooling", name=None, layers=-(-layers // share), embeddings="base-lm", dtype="bf16"
    )
    return MACConfig(
        base_lm=BaseLMConfig(name=lm, dtype="bf16", quantization="nf4" if quantized else "none"),
        amortization=encoder,
        input_encoder=encoder,
        tokens=min(_MOST, max(_FEWEST, _multiple_of_8(_NUMBERS / width))),
        mlp_width=_multiple_of_8(width / 24),
        max_document_tokens=1024,
        context_window=context_window,
        aggregation=AggregationConfig(
            blocks=2, heads=width // _HEAD, head_width=_HEAD, feed_forward=2, prior_width=min(width, 1024)
        ),
        modulation=ModulationConfig(kind="prefix", attention_sink=True),
    )


def around(base_lm: BaseLMConfig) -> MACConfig:
    """A MAC model around any decoder-only LM: sizes by the rule of `sized_for`, prompts by the LM's own chat template.

    Reads the LM's configuration and tokenizer, not its weights. An LM without a chat template gets plain prompts.

    Args:
        base_lm: the LM; both encoders start from its first layers in its dtype.

    Raises:
        ConfigError: for an LM whose width is no multiple of 64.
        ModelLoadError: if there is no such LM.
    """
    architecture = load_architecture(base_lm).get_text_config()
    positions = getattr(architecture, "max_position_embeddings", None) or 0
    sized = sized_for(
        base_lm.name,
        width=architecture.hidden_size,
        layers=architecture.num_hidden_layers,
        quantized=base_lm.quantization != "none",
        context_window=_WINDOW if positions >= 2 * _WINDOW else None,
    )
    encoder = sized.amortization.model_copy(update={"dtype": base_lm.dtype})
    prompt = PromptFormat(chat=bool(load_tokenizer(base_lm.name, base_lm.revision).chat_template))
    changes = {"base_lm": base_lm, "amortization": encoder, "input_encoder": encoder, "prompt": prompt}
    return sized.model_copy(update=changes)


def _multiple_of_8(number: float) -> int:
    """The multiple of 8 nearest to a number, at least 8."""
    return max(8, 8 * int(number / 8 + 0.5))


# The paper quantises the pretrained networks of the two large models to 4 bits. The bottlenecks in the prefix maps of
# wide LMs are our addition: one linear layer to all keys and values of LLaMA-2-7B would have a billion weights.
PAPER: dict[str, MACConfig] = {
    "distilgpt2": _paper("distilbert/distilgpt2", "google-t5/t5-small", "google-t5/t5-small", tokens=12),
    "gpt2-large": _paper("openai-community/gpt2-large", "google-t5/t5-base", "google-t5/t5-base", bottleneck=512),
    "gpt2-xl": _paper(
        "openai-community/gpt2-xl", "google-t5/t5-large", "google-t5/t5-base", bottleneck=512, quantization="nf4"
    ),
    "llama2-7b": _paper(
        "meta-llama/Llama-2-7b-hf", "google-t5/t5-large", "google-t5/t5-base", bottleneck=512, quantization="nf4"
    ),
}
# LMs with 4 billion parameters or more have 4-bit weights.
SMALL: dict[str, MACConfig] = {
    "smollm2-135m": sized_for("smollm2-135m", width=576, layers=30),  # which `mac-rag fetch` brings
    "smollm2-360m": sized_for("HuggingFaceTB/SmolLM2-360M", width=960, layers=32),
    "smollm2-1.7b": sized_for("HuggingFaceTB/SmolLM2-1.7B", width=2048, layers=24),
    "qwen3-0.6b": sized_for("Qwen/Qwen3-0.6B", width=1024, layers=28, context_window=_WINDOW),
    "qwen3-4b": sized_for("Qwen/Qwen3-4B", width=2560, layers=36, quantized=True, context_window=_WINDOW),
    "llama3.2-1b": sized_for("meta-llama/Llama-3.2-1B", width=2048, layers=16, context_window=_WINDOW),
    "llama3.2-3b": sized_for("meta-llama/Llama-3.2-3B", width=3072, layers=28, context_window=_WINDOW),
    "gemma3-1b": sized_for("google/gemma-3-1b-pt", width=1152, layers=26, context_window=_WINDOW),
    "mistral-7b": sized_for("mistralai/Mistral-7B-v0.3", width=4096, layers=32, quantized=True, context_window=_WINDOW),
}
PRESETS: dict[str, MACConfig] = PAPER | SMALL


def preset(name: str) -> MACConfig:
    """The configuration of a model by name.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_values(name: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a preset with `changes` applied, not validated.

    Fields that a nested change does not name keep the preset's value: `{"base_lm": {"name": "my/tuned"}}` keeps dtype
    and quantisation. The preset `auto` is a model `around` the LM of the changes, in bf16 unless they say otherwise.

    Examples:
        >>> preset_values("llama2-7b", {"base_lm": {"name": "my/tuned"}})["base_lm"]["quantization"]
        'nf4'

    Args:
        name: name of the preset.
        changes: fields of `MACConfig`, and of its parts.

    Raises:
        ConfigError: for an unknown name, and for `auto` without an LM.
        ModelLoadError: as `around`.
    """
    known = ", ".join([*PRESETS, AUTO])
    if not isinstance(name, str):
        raise ConfigError(f"unknown preset {name!r:.80}; choose one of {known}")
    if name != AUTO:
        return merged(preset(name).model_dump(), changes)
    lm = changes.get("base_lm")
    if not isinstance(lm, Mapping) or lm.get("name") is None:
        raise ConfigError(
            "the recipe names no LM: --set model.base_lm.name=LM, a name on the Hub, a folder, or an LM from mac-rag "
            f"fetch; or choose another preset: {known}"
        )
    chosen = around(BaseLMConfig.parse({"dtype": "bf16", **lm}, "model.base_lm"))
    return merged(chosen.model_dump(), changes)


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested values with nested changes applied; neither argument is modified."""
    result = dict(values)
    for name, change in changes.items():
        old = result.get(name)
        result[name] = merged(old, change) if isinstance(change, Mapping) and isinstance(old, Mapping) else change
    return result
