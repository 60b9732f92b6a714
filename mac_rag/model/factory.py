"""How the text encoders of a model are built: backbone, index and words, from pretrained parts or the base LM's own."""

from __future__ import annotations

import copy
from typing import Any

from mac_rag.config import EncoderConfig, IndexConfig, MACConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.loading import keep_first_layers, load_backbone, load_tokenizer
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.amortization import DESIGNS
from mac_rag.nn.hashed_bm25 import HashedWords


def make_encoder(
    config: MACConfig,
    part: EncoderConfig,
    backbone: Any,
    tokenizer: Any,
    base_lm: BaseLM,
    index: Any = None,
    words: HashedWords | None = None,
) -> TextEncoder:
    """Puts the learned vectors and MLPs of the part's design around a backbone.

    Beside it come the index (`make_index`) and its words (`make_words`).

    Raises:
        ModelLoadError: when it should share the base LM's embeddings, but has another width or vocabulary; when its
            vocabulary is not the base LM's, by which the index reads.
    """
    if part.design == "encoder-pooling" and hasattr(backbone, "bidirectional"):
        backbone.bidirectional = True  # a prefix LM's layers, which would read as a causal LM
    alike = _same_vocabulary(tokenizer, base_lm)
    if part.embeddings == "base-lm":
        _share_embeddings(part.name, backbone, alike, base_lm)
    if index is not None and not alike:
        raise ModelLoadError(f"{part.name!r} cannot have an index: its vocabulary is not the base LM's")
    network = DESIGNS[part.design](backbone, config.tokens, base_lm.width, config.mlp_width, index, words)
    return TextEncoder(network, tokenizer, config.max_document_tokens)


def make_index(part: IndexConfig, backbone: Any, tokenizer: Any, base_lm: BaseLM) -> Any:
    """A sentence encoder as both encoders have it, frozen.

    Raises:
        ModelLoadError: when its vocabulary is not the base LM's, or its width not D.
    """
    if not _same_vocabulary(tokenizer, base_lm):
        raise ModelLoadError(f"the index {part.name!r} cannot be used: its vocabulary is not the base LM's")
    if backbone.config.hidden_size != base_lm.width:
        raise ModelLoadError(
            f"the index {part.name!r} has a width of {backbone.config.hidden_size}, the base LM one of {base_lm.width}"
        )
    backbone.requires_grad_(False)
    if part.embeddings == "base-lm":
        _share_embeddings(part.name, backbone, True, base_lm)
    return backbone


def make_words(config: MACConfig, base_lm: BaseLM) -> HashedWords | None:
    """The words of an index as both encoders have them, all equally rare; None for none."""
    if not config.words:
        return None
    return HashedWords(len(base_lm.tokenizer), config.words, base_lm.width).to(base_lm.device)


def _same_vocabulary(tokenizer: Any, base_lm: BaseLM) -> bool:
    alike: bool = tokenizer is base_lm.tokenizer or tokenizer.get_vocab() == base_lm.tokenizer.get_vocab()
    return alike


def _share_embeddings(name: str | None, backbone: Any, same_vocabulary: bool, base_lm: BaseLM) -> None:
    shared = base_lm.model.get_input_embeddings()
    own = backbone.get_input_embeddings()
    if own.weight.shape != shared.weight.shape or not same_vocabulary:
        raise ModelLoadError(
            f"{name!r} cannot share the base LM's embeddings: its vocabulary or width is another; set embeddings: own"
        )
    backbone.set_input_embeddings(shared)


def pretrained_index(part: IndexConfig, base_lm: BaseLM) -> Any:
    """Loads a sentence encoder as both encoders have it; see `make_index` and `load_backbone` for the errors."""
    source = EncoderConfig(design="encoder-only", name=part.name, revision=part.revision)
    backbone = load_backbone(source, base_lm.device)
    return make_index(part, backbone, load_tokenizer(part.name, part.revision), base_lm)


def pretrained_encoder(
    part: EncoderConfig, config: MACConfig, base_lm: BaseLM, index: Any, words: HashedWords | None
) -> TextEncoder:
    """Loads an encoder's backbone, or starts it from the base LM's weights, and builds the encoder around it.

    Raises:
        ModelLoadError: as `load_backbone` and `make_encoder`; where it should start from a quantised LM.
    """
    if part.name is not None:
        backbone = load_backbone(part, base_lm.device)
        return make_encoder(config, part, backbone, load_tokenizer(part.name, part.revision), base_lm, index, words)
    if config.base_lm.quantization != "none":
        raise ModelLoadError(
            f"the base LM is quantised ({config.base_lm.quantization}), so an encoder cannot start from its weights; "
            "give the encoder a name"
        )
    backbone = copy.deepcopy(base_lm.model.base_model).float().requires_grad_(True)
    if part.layers is not None:
        keep_first_layers(backbone, part.layers)
    return make_encoder(config, part, backbone, base_lm.tokenizer, base_lm, index, words)
