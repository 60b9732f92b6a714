"""Builds the networks of a model: text encoders, from pretrained backbones or the base LM's weights, and modulation."""

from __future__ import annotations

import copy
import re
from typing import Any, TypeVar

from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig, SentenceEncoderConfig, YearsConfig
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.attention_sink import make_attention_sink
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.fetched import FETCHABLE, exact_revision
from mac_rag.lm.loading import check_vocabulary, keep_first_layers, load_backbone, load_first_layers, load_tokenizer
from mac_rag.lm.minilm import PACKAGED
from mac_rag.lm.model_folders import pinned
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.amortization import DESIGNS
from mac_rag.nn.dtypes import HALF_PRECISION, SharedEmbedding
from mac_rag.nn.lexical import HashedBM25, NamedYears, Years
from mac_rag.nn.modulation import FiLM, LoRA, ModulationNetwork, PrefixTuning, PromptTuning

_Part = TypeVar("_Part", BaseLMConfig, EncoderConfig)


def with_exact_revision(part: _Part) -> _Part:
    """The configuration of an LM or encoder with its exact revision; see `with_exact_revisions`."""
    assert part.name is not None
    revision = exact_revision(part.name, part.revision)
    if part.name not in {*PACKAGED, *FETCHABLE}:
        revision = pinned(part.name, revision)
    return part.model_copy(update={"revision": revision})


def with_exact_revisions(config: MACConfig) -> MACConfig:
    """The configuration with the exact revision of each model that it names: a checkpoint must identify the weights.

    An exact revision is a commit on the Hub, or package and version of a fetched LM.

    Raises:
        ModelLoadError: for an LM that has not been fetched, or another revision of one that has.
    """

    def exact(part: Any) -> Any:
        if part is None or part.name is None:
            return part
        if isinstance(part, SentenceEncoderConfig):
            # A checkpoint holds the sentence encoder itself, and the fingerprint covers its revision as configured.
            return part.model_copy(update={"revision": exact_revision(part.name, part.revision)})
        return with_exact_revision(part)

    parts = ("base_lm", "amortization", "input_encoder", "sentence_encoder")
    return config.model_copy(update={name: exact(getattr(config, name)) for name in parts})


def make_encoder(
    config: MACConfig,
    part: EncoderConfig,
    backbone: Any,
    tokenizer: Any,
    base_lm: BaseLM,
    sentence_encoder: Any = None,
    hashed_bm25: HashedBM25 | None = None,
) -> TextEncoder:
    """Puts the learned vectors and MLPs of the part's design around a backbone.

    Args:
        config: the whole model's configuration.
        part: this encoder's configuration.
        backbone: a transformers model without a language-modelling head.
        tokenizer: the backbone's tokenizer.
        base_lm: the base LM.
        sentence_encoder: the result of `make_sentence_encoder`, or None.
        hashed_bm25: the result of `make_hashed_bm25`, or None.

    Raises:
        ModelLoadError: if the tokenizer has more tokens than the backbone has embeddings; if the encoder is to share
            the base LM's embeddings, but has another width or vocabulary; or if there is a sentence encoder or hashed
            BM25, which read the base LM's tokens, but the encoder has another vocabulary.
    """
    if part.design == "encoder-pooling" and hasattr(backbone, "bidirectional"):
        backbone.bidirectional = True  # off by default in backbones that can attend both ways
    check_vocabulary(tokenizer, backbone, part.name)
    alike = _same_vocabulary(tokenizer, base_lm)
    if part.embeddings == "base-lm":
        _share_embeddings(part.name, backbone, alike, base_lm)
    if not alike and (sentence_encoder is not None or hashed_bm25 is not None):
        added = "a sentence encoder" if sentence_encoder is not None else "hashed BM25"
        raise ModelLoadError(
            f"{part.name!r} cannot have {added}: its vocabulary is not the base LM's; leave one of the two out"
        )
    network = DESIGNS[part.design](
        backbone, config.tokens, base_lm.width, config.mlp_width, sentence_encoder, hashed_bm25
    )
    # Attention passes a bank that is already normalised through unchanged.
    network.normalises = config.modulation.kind == "prompt"
    return TextEncoder(network, tokenizer, config.max_document_tokens)


def make_sentence_encoder(part: SentenceEncoderConfig, backbone: Any, tokenizer: Any, base_lm: BaseLM) -> Any:
    """The frozen sentence encoder that both text encoders share.

    Raises:
        ModelLoadError: if its vocabulary is not the base LM's, or its width is not D.
    """
    if not _same_vocabulary(tokenizer, base_lm):
        raise ModelLoadError(
            f"the sentence encoder {part.name!r} cannot be used: its vocabulary is not the base LM's; choose another"
        )
    if backbone.config.hidden_size != base_lm.width:
        raise ModelLoadError(
            f"the sentence encoder {part.name!r} has a width of {backbone.config.hidden_size}, "
            f"but the base LM has one of {base_lm.width}; choose another"
        )
    backbone.requires_grad_(False)
    if part.embeddings == "base-lm":
        _share_embeddings(part.name, backbone, True, base_lm)
    return backbone


def make_hashed_bm25(config: MACConfig, base_lm: BaseLM) -> HashedBM25 | None:
    """The hashed BM25 that both text encoders share; all tokens count as equally rare. None if the model has none."""
    if config.hashed_bm25 is None:
        return None
    return HashedBM25(len(base_lm.tokenizer), config.hashed_bm25.vectors, base_lm.width).to(base_lm.device)


def _same_vocabulary(tokenizer: Any, base_lm: BaseLM) -> bool:
    alike: bool = tokenizer is base_lm.tokenizer or tokenizer.get_vocab() == base_lm.tokenizer.get_vocab()
    return alike


def _share_embeddings(name: str | None, backbone: Any, same_vocabulary: bool, base_lm: BaseLM) -> None:
    shared = base_lm.model.get_input_embeddings()
    own = backbone.get_input_embeddings()
    if own.weight.shape != shared.weight.shape or not same_vocabulary:
        raise ModelLoadError(
            f"{name!r} cannot share the base LM's embeddings: its vocabulary or width differs; set embeddings: own"
        )
    # An LM in half precision lends its embeddings to a backbone that is trained in fp32.
    half = shared.weight.dtype in HALF_PRECISION
    backbone.set_input_embeddings(SharedEmbedding(shared, backbone) if half else shared)


def pretrained_sentence_encoder(config: MACConfig, base_lm: BaseLM) -> Any:
    """Loads the sentence encoder that both text encoders share; None if the model has none.

    Raises:
        ModelLoadError: as `load_backbone` and `make_sentence_encoder`.
    """
    part = config.sentence_encoder
    if part is None:
        return None
    source = EncoderConfig(design="encoder-only", name=part.name, revision=part.revision)
    backbone = load_backbone(source, base_lm.device)
    return make_sentence_encoder(part, backbone, load_tokenizer(part.name, part.revision), base_lm)


def pretrained_encoder(
    part: EncoderConfig, config: MACConfig, base_lm: BaseLM, sentence_encoder: Any, hashed_bm25: HashedBM25 | None
) -> TextEncoder:
    """Loads an encoder's backbone, or starts it from the base LM's weights, and builds the encoder around it.

    Raises:
        ModelLoadError: as `load_backbone`, `load_first_layers` and `make_encoder`.
    """
    if part.name is not None:
        backbone = load_backbone(part, base_lm.device)
        tokenizer = load_tokenizer(part.name, part.revision)
        return make_encoder(config, part, backbone, tokenizer, base_lm, sentence_encoder, hashed_bm25)
    if config.base_lm.quantization == "none":
        backbone = copy.deepcopy(base_lm.model.base_model).float()
        if part.layers is not None:
            keep_first_layers(backbone, part.layers)
    else:  # training must not start from rounded weights
        backbone = load_first_layers(config.base_lm, part.layers, base_lm.device)
    backbone.requires_grad_(True)
    return make_encoder(config, part, backbone, base_lm.tokenizer, base_lm, sentence_encoder, hashed_bm25)


def make_modulation_network(config: MACConfig, base_lm: BaseLM) -> ModulationNetwork:
    """The network from phi* to a modulation of the base LM, with random weights.

    Raises:
        ModelLoadError: as `BaseLM.shape` and `make_attention_sink`.
    """
    part, shape = config.modulation, base_lm.shape(config.modulation)
    if part.kind == "lora":
        return LoRA(shape, config.modulation_tokens, base_lm.width, bottleneck=part.bottleneck)
    if part.kind == "film":
        return FiLM(shape, base_lm.width, bottleneck=part.bottleneck)
    if part.entry_layer is not None:
        if part.entry_layer >= shape.layers:
            raise ModelLoadError(
                f"modulation.entry_layer is {part.entry_layer}, but the LM has {shape.layers} layers; give fewer"
            )
        return PromptTuning(shape, config.tokens, entry_layer=part.entry_layer)
    sink = None
    if part.attention_sink:
        sink = make_attention_sink(base_lm, config.modulation_tokens, config.context_window)
    return PrefixTuning(shape, config.modulation_tokens, base_lm.width, bottleneck=part.bottleneck, sink=sink)


_FIRST, _END = 1000, 2100  # years before _FIRST, and from _END on, are numbers like any other
_DIGIT = re.compile(r"(?:##)?\d")


def named_years(config: YearsConfig, tokenizer: Any, width: int) -> NamedYears:
    """Makes the vectors of the years that texts name.

    The calendar ends with 2099. It has one year for each component of a vector, but begins in 1000 at the earliest.

    Args:
        config: how much a year counts.
        tokenizer: tokenizer of questions and documents. Years that it divides into several tokens are left out.
        width: D.

    Raises:
        ConfigError: if no year is a single token.
    """
    calendar = range(max(_FIRST, _END - width), _END)
    tokens: dict[int, int] = {}
    unknown = tokenizer.unk_token_id
    for before in ("", " "):
        rows = tokenizer([f"{before}{year}" for year in calendar], add_special_tokens=False)["input_ids"]
        tokens |= {
            row[0]: year for year, row in zip(calendar, rows, strict=True) if len(row) == 1 and row[0] != unknown
        }
    if not tokens:
        raise ConfigError(
            f"hashed_bm25.years needs years that are one token, but the vocabulary has none from {calendar.start} to "
            f"{calendar.stop - 1}; leave it out"
        )
    vocabulary = tokenizer.get_vocab()
    digits = {name: token for name, token in vocabulary.items() if _DIGIT.match(name)}
    # BERT's vocabulary marks tokens that continue a word, others mark tokens that begin one.
    pieces = any(name.startswith("##") for name in vocabulary)
    continuing = [token for name, token in digits.items() if not pieces or name.startswith("##")]
    years = Years(tokens, continuing, len(tokenizer), calendar, config.weight, config.decay)
    return NamedYears(years, width)
