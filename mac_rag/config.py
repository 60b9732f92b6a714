"""Validated, frozen configurations: of the networks, of the base LM, and of a whole MAC model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mac_rag.errors import ConfigError

# A field's new name; or what turns the old field's value into values of new fields, by name.
Renaming: TypeAlias = str | Callable[[Any], Mapping[str, Any]]


class Config(BaseModel):
    """Base of all configurations: immutable, and an unknown or ill-typed key is an error that names it.

    Attributes:
        RENAMED: fields that had another name in the last release, old name -> `Renaming`. The old names are still read,
            with a FutureWarning that tells the new ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    RENAMED: ClassVar[Mapping[str, Renaming]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, values: Any) -> Any:
        """Replaces old field names by the new ones."""
        old_names = [name for name in cls.RENAMED if isinstance(values, Mapping) and name in values]
        if not old_names:
            return values
        values = dict(values)
        for old in old_names:
            renaming, value = cls.RENAMED[old], values.pop(old)
            fields = {renaming: value} if isinstance(renaming, str) else renaming(value)
            new_names = " and ".join(fields)
            both = [name for name in fields if name in values]
            if both:
                raise ValueError(f"{old} is the old name of {new_names}; give only {' and '.join(both)}")
            warnings.warn(
                f"{cls.__name__}: {old} is now called {new_names}; the next release no longer reads the old name",
                FutureWarning,
                stacklevel=2,
            )
            values |= fields
        return values

    @classmethod
    def parse(cls, values: Any, where: str | Path) -> Self:
        """Validates values read from a file.

        Args:
            values: the file's content.
            where: the file, for the message.

        Raises:
            ConfigError: for invalid values; it names the file, every offending key and its value.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = (
                f"  {'.'.join(map(str, fault['loc'])) or '(top level)'}: {fault['msg']} (got {fault['input']!r})"
                for fault in error.errors()
            )
            raise ConfigError(f"{where} is not a valid {cls.__name__}:\n" + "\n".join(faults)) from None


@dataclass(frozen=True)
class PromptFormat:
    """Templates of the text around a document, a question and an answer.

    The parts are tokenized one by one and joined as ids, so that a boundary never changes a token and `d + x` starts
    with exactly the ids of `d`.

    Attributes:
        document, question, answer: the templates.
        abstention: what the LM has learned to answer when nothing in front of the question answers it, such as
            "I don't know"; None if it has learned no such answer.
    """

    document: str = "{document}\n"
    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    abstention: str | None = None

    def __post_init__(self) -> None:
        for name in ("document", "question", "answer"):
            template = getattr(self, name)
            if template.count("{" + name + "}") != 1:
                raise ValueError(f"the {name} template must hold {{{name}}} exactly once, got {template!r}")


Dtype = Literal["fp32", "bf16", "fp16"]
Quantization = Literal["none", "int8", "nf4"]


class BaseLMConfig(Config):
    """The frozen base LM theta_base.

    Attributes:
        name: of any causal LM on the Hub, or a folder; `./name` is a folder inside the checkpoint itself. `minilm` is a
            prefix LM of all-MiniLM-L6-v2's weights, to be tuned.
        revision: branch, tag or commit on the Hub.
        dtype: of its weights in memory.
        quantization: `int8` or `nf4` (4 bit) through bitsandbytes.
    """

    name: str
    revision: str | None = None
    dtype: Dtype = "fp32"
    quantization: Quantization = "none"


FROM_BASE_LM = ("decoder-only", "encoder-pooling")  # designs whose backbone can start from the base LM's own weights


class EncoderConfig(Config):
    """The amortization network g_amort or the input encoder g_input.

    Attributes:
        design: how the learned vectors meet the text; see `mac_rag.nn.amortization`.
        name: of the pretrained backbone; None starts it from the base LM's own weights (designs decoder-only and
            encoder-pooling); `minilm` is all-MiniLM-L6-v2 from its installed package.
        revision: branch, tag or commit on the Hub.
        dtype: of the backbone's weights in memory.
        quantization: of the pretrained backbone, which is then frozen; what is learned from scratch never is.
        embeddings: of tokens: the backbone's `own`, trained with it; or the base LM's (`base-lm`), as frozen as it is,
            which spares a small model half of its size. Both must have one vocabulary and dtype.
        layers: how many of the base LM's layers the backbone starts with, from the first; None for all. The last ones
            know what to say next rather than what was read.
    """

    design: Literal["encoder-decoder", "encoder-only", "encoder-pooling", "decoder-only"] = "encoder-decoder"
    name: str | None
    revision: str | None = None
    dtype: Dtype = "fp32"
    quantization: Quantization = "none"
    embeddings: Literal["own", "base-lm"] = "own"
    layers: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is None and self.design not in FROM_BASE_LM:
            raise ValueError(
                f"name is missing: only designs {' and '.join(FROM_BASE_LM)} can start from the base LM, "
                f"not {self.design}"
            )
        if self.name is not None and self.layers is not None:
            raise ValueError(f"layers is {self.layers}, but the backbone {self.name!r} is taken as it is")
        if self.name is None and self.quantization != "none":
            raise ValueError("a backbone that starts from the base LM's weights is trained and cannot be quantised")
        return self


class IndexConfig(Config):
    """A sentence encoder that gives each text one further token, its index, by which the document prior finds it.

    It is a retriever's encoder and stays frozen: to tell which document answers a question takes more examples than to
    read it. Not part of the paper.

    Attributes:
        name: of the encoder: `minilm`, a folder, or a repository on the Hub. A text's index is the mean of its states,
            so its width must be D.
        revision: branch, tag or commit on the Hub.
        embeddings: of tokens: `own`, or the base LM's (`base-lm`), where the vocabulary is the same.
        words: R, vectors that hold the text's words (see `mac_rag.nn.hashed_bm25`), which the document prior compares
            as well; 0 for none. They are stored with the memory tokens, and nothing attends to them.
        words_weight: of their product in the document prior, beside a cosine. Part of no training, so chosen on
            validation data.
    """

    name: str
    revision: str | None = None
    embeddings: Literal["own", "base-lm"] = "own"
    words: int = Field(0, ge=0)
    words_weight: float = Field(0.1, gt=0)


class AggregationConfig(Config):
    """The aggregation network h_psi; the defaults are the paper's.

    Attributes:
        blocks: cross-attention blocks.
        heads, head_width: of their attention.
        feed_forward: hidden width of the feed-forward networks, as a multiple of D.
        prior_width: width of the document prior's space; 0 for no document prior.
        prior_sharpness: factor on the document prior in attention, except in training. How much it should weigh grows
            with the bank, and batches of training are small.
    """

    blocks: int = Field(4, ge=1)
    heads: int = Field(8, ge=1)
    head_width: int = Field(96, ge=1)
    feed_forward: int = Field(4, ge=1)
    prior_width: int = Field(0, ge=0)
    prior_sharpness: float = Field(1.0, gt=0)


class ModulationConfig(Config):
    """How phi* changes the LM.

    Attributes:
        kind: `prefix` (P-tuning v2), `lora` or `film`.
        slots: prefix positions for each token; only for `prefix`.
        bottleneck: inner width of the map from phi*; None for one linear layer.
        targets: last names of the modules that LoRA changes; None for the attention's queries and values.
    """

    kind: Literal["prefix", "lora", "film"] = "prefix"
    slots: int = Field(1, ge=1)
    bottleneck: int | None = Field(None, ge=1)
    targets: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.slots > 1 and self.kind != "prefix":
            raise ValueError(f"slots is {self.slots}, but only kind prefix has slots, not {self.kind}")
        if self.targets is not None and self.kind != "lora":
            raise ValueError(f"targets is {self.targets}, but only kind lora has targets, not {self.kind}")
        return self


class AttentionConfig(Config):
    """How an engine attends to its bank; part of no checkpoint, for a bank may be read in any of these ways.

    Attributes:
        strategy: `streaming` is exact, over the whole bank, at constant working memory; `preselect` is exact over the
            documents with the highest prior, so that a question's cost hardly grows with the bank; `hierarchical` is
            algorithm 3 of the paper; `sharded` is streaming where every process of a torch.distributed group holds a
            bank of its own, and all processes ask the same questions at the same time.
        preselected: N, rows that are preselected for each question.
        exact_rows: up to so many rows are preselected by an exact product; among more, by FAISS.
        subgroup: M, modulations that are aggregated into one at a time by algorithm 3.
        cache_bytes: budget for the bank's keys and values. Those of a larger bank are projected chunk by chunk for each
            batch of questions.
        cache_dtype: in which they are kept.
    """

    strategy: Literal["streaming", "preselect", "hierarchical", "sharded"] = "streaming"
    preselected: int = Field(64, ge=1)
    exact_rows: int = Field(200_000, ge=1)
    subgroup: int = Field(16, ge=2)
    cache_bytes: int = Field(2 << 30, ge=0)
    cache_dtype: Dtype = "fp32"


class BoundConfig(Config):
    """How large a bank may become, and how it makes room (section "Memory bank size constraint").

    Attributes:
        maximum: most entries; documents that were averaged are one.
        method: see `mac_rag.memory.reduction`. The paper finds averaging the most alike best.
        seed: of the random methods.
    """

    maximum: int = Field(ge=1)
    method: Literal["random-pruning", "random-averaging", "nearest-averaging"] = "nearest-averaging"
    seed: int = 0


class MACConfig(Config):
    """A whole MAC model.

    Attributes:
        tokens: T, memory tokens of a document, its index included.
        index: what finds a document, if that is not the mean of its memory tokens.
        mlp_width: inner width of the MLP of each memory token; None for the backbone's, as in the paper.
        max_document_tokens: longest document, in the amortization network's own tokens.
        max_new_tokens: longest answer.
        context_window: tokens that documents, question and answer may have together; None for all that the LM has
            positions for. An LM may have more of them than it has learned to read.
        memory_weight: lambda, of what is said under phi* behind retrieved documents, against what the LM alone says
            (see `mac_rag.lm.max_rule`); 1 is the paper's `LM(d + x; phi*)`, and costs half as much. Part of no
            training, so chosen on validation data.
    """

    base_lm: BaseLMConfig
    amortization: EncoderConfig
    input_encoder: EncoderConfig
    index: IndexConfig | None = None
    tokens: int = Field(24, ge=1)
    mlp_width: int | None = Field(None, ge=1)
    aggregation: AggregationConfig = AggregationConfig()
    modulation: ModulationConfig = ModulationConfig()
    prompt: PromptFormat = PromptFormat()
    max_document_tokens: int = Field(512, ge=8)
    max_new_tokens: int = Field(16, ge=1)
    context_window: int | None = Field(None, ge=1)
    memory_weight: float = Field(1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for part in (self.amortization, self.input_encoder):
            kinds = {(config.dtype, config.quantization) for config in (self.base_lm, part)}
            if part.embeddings == "base-lm" and (len(kinds) > 1 or part.quantization != "none"):
                raise ValueError("embeddings of the base LM can be shared only at its dtype and without quantization")
        if self.index is not None and not self.aggregation.prior_width:
            raise ValueError(
                f"the index {self.index.name!r} serves the document prior; set aggregation.prior_width above 0"
            )
        if self.index is not None and self.tokens < 2:
            raise ValueError(f"tokens is {self.tokens}, but a document needs one beside its index")
        return self

    @property
    def words(self) -> int:
        """R, vectors that a text's words are kept in behind its T memory tokens."""
        return 0 if self.index is None else self.index.words
