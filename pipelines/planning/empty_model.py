"""A MAC model with its true shapes and without numbers: all tensors are on PyTorch's meta device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig, PromptFormat
from mac_rag.errors import ModelLoadError
from mac_rag.lm.architectures import check_modulation
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import DTYPES
from mac_rag.lm.loading import describe_first_layers, empty_backbone
from mac_rag.lm.minilm import PACKAGED
from mac_rag.model import MACModel
from mac_rag.model.factory import make_encoder, make_hashed_bm25, make_sentence_encoder
from mac_rag.model.stored_names import SENTENCE_ENCODER_FOLDER
from mac_rag.model.text_encoder import TextEncoder
from pipelines.planning.architectures import architecture, lm_architecture

_FEW = 3  # tokens of a tokenizer that nothing depends on


def empty_model(config: MACConfig, folder: Path | None = None) -> MACModel:
    """The model of a configuration, without weights.

    Args:
        config: the configuration of all networks.
        folder: the checkpoint that it comes from; None for pretrained parts.

    Raises:
        ConfigError: as `lm_architecture`.
        ModelLoadError: when there is no such model, or an architecture does not fit its design.
    """
    described = lm_architecture(config.base_lm, folder)
    check_modulation(described, config.modulation.kind)
    tokens = described.vocab_size if config.hashed_bm25 is not None else _FEW
    base_lm = empty_lm(config.base_lm, described, tokens)
    with torch.device("meta"):
        sentence_encoder = None
        if config.sentence_encoder is not None:
            part = EncoderConfig(design="encoder-only", name=config.sentence_encoder.name)
            backbone = empty_backbone(part, _described(part, folder, SENTENCE_ENCODER_FOLDER))
            sentence_encoder = make_sentence_encoder(config.sentence_encoder, backbone, base_lm.tokenizer, base_lm)
        hashed_bm25 = make_hashed_bm25(config, base_lm)
        encoders = [
            _encoder(config, part, name, base_lm, described, folder, sentence_encoder, hashed_bm25)
            for name, part in (("amortization", config.amortization), ("input_encoder", config.input_encoder))
        ]
        # Sizes do not depend on how prompts are written, and a stand-in has no chat template.
        return MACModel(config.model_copy(update={"prompt": PromptFormat()}), base_lm, *encoders)


def empty_lm(config: BaseLMConfig, described: Any, tokens: int = _FEW) -> BaseLM:
    """A frozen base LM without weights.

    Args:
        config: the base LM.
        described: its architecture.
        tokens: number of tokens in its stand-in of a tokenizer.
    """
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(described, dtype=DTYPES[config.dtype], trust_remote_code=False)
        return BaseLM(lm.requires_grad_(False).eval(), _tokenizer(described.vocab_size, tokens), PromptFormat())


def _encoder(
    config: MACConfig,
    part: EncoderConfig,
    name: str,
    base_lm: BaseLM,
    lm: Any,
    folder: Path | None,
    sentence_encoder: Any,
    hashed_bm25: Any,
) -> TextEncoder:
    if part.name is None and folder is None:
        described = copy.deepcopy(lm)
        if part.layers is not None:
            if part.layers > described.num_hidden_layers:
                raise ModelLoadError(
                    f"layers is {part.layers}, but {described.model_type} has {described.num_hidden_layers}"
                )
            describe_first_layers(described, part.layers)
    else:
        described = _described(part, folder, name)
    backbone = empty_backbone(part, described)
    if part.name is not None and (folder is None or part.quantization != "none"):
        _like_pretrained(backbone, part)
    alike = described.vocab_size == lm.vocab_size
    tokenizer = base_lm.tokenizer if alike else _tokenizer(described.vocab_size, _FEW)
    return make_encoder(config, part, backbone, tokenizer, base_lm, sentence_encoder, hashed_bm25)


def _like_pretrained(backbone: Any, part: EncoderConfig) -> None:
    """What `mac_rag.lm.loading.load_backbone` does: freezes what is quantised, which is not the decoder of a T5.

    transformers keeps some layers of a T5 in fp32 where the others are fp16.
    """
    if part.quantization != "none":
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(part.design == "encoder-decoder" and name.startswith("decoder."))
    if part.dtype == "fp16":
        for name, module in backbone.named_modules():
            if name.rpartition(".")[2] in (backbone._keep_in_fp32_modules or ()):
                module.float()


def _described(part: EncoderConfig, folder: Path | None, name: str) -> Any:
    if folder is not None and part.quantization == "none":
        return architecture(str(folder / name))
    assert part.name is not None
    if part.name in PACKAGED:
        return PACKAGED[part.name].backbone().config
    return architecture(part.name, part.revision, folder)


def _tokenizer(size: int, tokens: int) -> Any:
    """A stand-in for the tokenizer of a vocabulary of some size; only hashed BM25 depends on its number of tokens."""
    words = {f"{number} of {size}": number for number in range(tokens)}
    unknown, pad, eos, *_ = words
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=unknown)), unk_token=unknown, pad_token=pad, eos_token=eos
    )
