"""Validated, frozen configurations of the networks, the base LM, and a whole MAC model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mac_rag.errors import ConfigError

_FAULTS = 20  # invalid values that one message names


class Config(BaseModel):
    """Base of all configurations: immutable, and an unknown or ill-typed key is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: Any, where: str | Path) -> Self:
        """Validates values read from a file.

        Args:
            values: the file's content.
            where: the file, for the message.

        Raises:
            ConfigError: for invalid values; it names the file, and up to 20 offending keys and their values.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = [
                f"  {'.'.join(map(str, fault['loc'])) or '(top level)'}: {fault['msg']} (got {fault['input']!r:.200})"
                for fault in error.errors()
            ]
            if len(faults) > _FAULTS:
                faults[_FAULTS:] = [f"  and {len(faults) - _FAULTS:,} more"]
            raise ConfigError(f"{where} is not a valid {cls.__name__}:\n" + "\n".join(faults)) from None


@dataclass(frozen=True)
class PromptFormat:
    """Templates of the text around a document, a question and an answer.

    Document, question and answer are tokenized one by one and joined as ids. So a boundary never changes a token, and
    `d + x` starts with exactly the ids of `d`.

    Examples:
        >>> prompt = PromptFormat(document="Context: {document}\\n\\n", question="Q: {question}\\nA:")
        >>> prompt.question.format(question="Who?")
        'Q: Who?\\nA:'

    With `chat`, the tokenizer's own chat template writes the system message, the user's turn, which holds documents and
    question, and the start of the assistant's turn. The LM must be an instruct LM.

    Attributes:
        document, question, answer: the templates; a chat has only the document's.
        abstention: the answer that the LM has learned for questions whose answer does not stand in front of them, such
            as "I don't know"; None if it has learned none. It abstains where it holds that more probable than all
            answers together (see `mac_rag.lm.decoding`).
        parallel_documents: True if the LM has learned to read several documents in parallel: each one with the
            question, none sees another, and the question once more behind them (see `mac_rag.lm.prompt`).
            Only for an LM whose attention takes segments.
        chat: True to write prompts with the tokenizer's chat template.
        system: the system message of a chat; None for what the chat template writes by itself.
    """

    document: str = "{document}\n"
    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    abstention: str | None = None
    parallel_documents: bool = False
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        for name in ("question", "answer"):
            given, default = getattr(self, name), getattr(PromptFormat, name)
            if self.chat and given != default:
                raise ValueError(
                    f"the {name} template is {given!r}, but in a chat the tokenizer's template stands around the "
                    f"{name}; leave it out, or say in `system` how to answer"
                )
        if self.chat and self.parallel_documents:
            raise ValueError("parallel_documents is true, but a conversation is one text; set chat: false")
        if self.system is not None and not self.chat:
            raise ValueError(f"system is {self.system!r}, but only a chat has a system message; set chat: true")
        for name in ("document", "question", "answer"):
            template = getattr(self, name)
            if template.count("{" + name + "}") != 1:
                raise ValueError(f"the {name} template must hold {{{name}}} exactly once, got {template!r}")


Dtype = Literal["fp32", "bf16", "fp16"]
Quantization = Literal["none", "int8", "nf4"]
# ISO 639 codes; None where nobody says.
Languages = tuple[Annotated[str, Field(pattern="^[a-z]{2,3}$")], ...] | None


class BaseLMConfig(Config):
    """The frozen base LM theta_base.

    Examples:
        >>> BaseLMConfig(name="openai-community/gpt2-xl", dtype="bf16", quantization="nf4").quantization
        'nf4'

    Attributes:
        name: a causal LM on the Hub, or a folder; `./name` is a folder inside the checkpoint itself. `minilm` is a
            prefix LM of all-MiniLM-L6-v2's weights, which must be tuned before it can answer. `smollm2-135m` is an LM
            that `mac-rag fetch` brings.
        revision: branch, tag or commit on the Hub; of a fetched LM, package and version.
        dtype: dtype of the weights in memory.
        quantization: `int8` or `nf4` (4 bit) through bitsandbytes; `none` for none.
        gguf_file: a GGUF file in the folder or repository, whose weights are dequantised to `dtype`; None for an LM in
            safetensors.
    """

    name: str
    revision: str | None = None
    dtype: Dtype = "fp32"
    quantization: Quantization = "none"
    gguf_file: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gguf_file is None:
            return self
        if self.quantization != "none":
            raise ValueError(f"the GGUF file {self.gguf_file} is dequantised; set quantization: none")
        path = PurePosixPath(self.gguf_file)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".gguf":
            raise ValueError(f"gguf_file is {self.gguf_file!r}; give the path of a .gguf file inside {self.name!r}")
        return self


FROM_BASE_LM = ("decoder-only", "encoder-pooling")  # designs whose backbone can start from the base LM's own weights


class EncoderConfig(Config):
    """The amortization network g_amort or the input encoder g_input.

    Examples:
        >>> EncoderConfig(name="google-t5/t5-base").design  # T5's encoder reads, its decoder writes memory tokens
        'encoder-decoder'
        >>> EncoderConfig(name=None, design="encoder-pooling", layers=6).layers  # starts from 6 layers of the base LM
        6

    Attributes:
        design: how the learned vectors meet the text; see `mac_rag.nn.amortization`.
        name: the pretrained backbone, a name on the Hub or a folder; `minilm` is all-MiniLM-L6-v2 from its installed
            package. None starts the backbone from the base LM's own weights (designs decoder-only and encoder-pooling).
        revision: branch, tag or commit on the Hub.
        dtype: dtype of the backbone's weights in memory; training keeps those that it changes in fp32.
        quantization: quantization of the pretrained backbone, which is then frozen. What starts from scratch is never
            quantised.
        embeddings: token embeddings: the backbone's `own`, trained with it; or the base LM's (`base-lm`), frozen like
            the LM, which halves the size of a small model. Both must have one vocabulary and dtype.
        layers: layers of the base LM that the backbone starts with, counted from the first; None for all. The last
            layers know what to say next rather than what was read.
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


class SentenceEncoderConfig(Config):
    """A frozen sentence encoder. Its mean state of a text is the text's first memory token, which the prior compares.

    It is a retriever's encoder and is never trained: learning which document answers a question takes more examples
    than learning to read. Not part of the paper.

    Examples:
        >>> SentenceEncoderConfig(name="minilm", embeddings="base-lm").embeddings  # the LM has this vocabulary
        'base-lm'

    Attributes:
        name: `minilm`, a folder, or a repository on the Hub. The encoder's width must be D.
        revision: branch, tag or commit on the Hub.
        embeddings: token embeddings: the encoder's `own`, or the base LM's (`base-lm`), where the vocabulary is the
            same.
    """

    name: str
    revision: str | None = None
    embeddings: Literal["own", "base-lm"] = "own"


class YearsConfig(Config):
    """How much a document counts that names a year shortly before the question's (see `mac_rag.nn.lexical`).

    Not part of the paper. The task `fit_recency` of `pipelines.train` fits both numbers.

    Attributes:
        weight: how much it counts if it names the year of the question, beside the product of both texts' lexical
            vectors, of which the question's have length 1.
        decay: years before that one behind which it counts 1/e as much.
    """

    weight: float = Field(gt=0)
    decay: float = Field(gt=0)


class HashedBM25Config(Config):
    """Lexical vectors of a text, whose products are BM25's scores (see `mac_rag.nn.lexical`).

    The document prior adds these products to its cosine. The vectors are stored with the memory tokens, and nothing
    attends to them. Not part of the paper.

    Examples:
        >>> HashedBM25Config(vectors=16, weight=0.2).vectors
        16

    Attributes:
        vectors: R, lexical vectors of width D for each text.
        weight: weight of the product beside the cosine, chosen on validation data; the task `tune_prior` alone
            trains it.
        years: one more lexical vector for each text, by which a question that names a year finds what was last known
            then; None for its words alone.
    """

    vectors: int = Field(8, ge=1)
    weight: float = Field(0.1, gt=0)
    years: YearsConfig | None = None


CUTOFFS = ("slot_cutoff", "reading_cutoff")  # fields that leave out slots, of which banks know nothing


class AggregationConfig(Config):
    """The aggregation network h_psi; the defaults are the paper's.

    Examples:
        >>> AggregationConfig(blocks=2, prior_width=128, prior_sharpness=4).prior_width  # with a document prior
        128

    Attributes:
        blocks: cross-attention blocks.
        heads, head_width: attention heads of a block, and their width.
        feed_forward: hidden width of the feed-forward networks, as a multiple of D.
        prior_width: width of the document prior's space; 0 for no document prior.
        prior_sharpness: factor on the document prior in attention, except in training. The larger the bank, the more
            the prior should weigh, and training batches are small.
        recency: True for a document prior in which, of documents on the same subject, the newest that a question can
            mean counts more (see `mac_rag.nn.prior`). It is a handful of learned numbers.
        slots: S, slots of T tokens in phi*. The first one is as it is without slots; each further one leaves out a
            document more of those that the prior ranks first. The LM reads S T tokens.
        slot_cutoff: in nats; a slot whose document the prior holds that much less probable than the first slot's is
            left out, except in training, and the LM reads T tokens less. None leaves out none. Only for modulations of
            the kind `prompt`.
        reading_cutoff: as `slot_cutoff`, behind a look at each slot alone: the LM says how probable it is that it
            abstains there, and its odds that it answers are added to the prior's. None for no such look, which only an
            LM can give that has learned to abstain (`prompt.abstention`).
    """

    blocks: int = Field(4, ge=1)
    heads: int = Field(8, ge=1)
    head_width: int = Field(96, ge=1)
    feed_forward: int = Field(4, ge=1)
    prior_width: int = Field(0, ge=0)
    prior_sharpness: float = Field(1.0, gt=0)
    recency: bool = False
    slots: int = Field(1, ge=1)
    slot_cutoff: float | None = Field(None, gt=0, le=8)
    reading_cutoff: float | None = Field(None, gt=0, le=8)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, cutoff in self.cutoffs.items():
            if self.slots == 1:
                raise ValueError(f"{name} is {cutoff}, but slots is 1; leave it out")
        if self.recency and not self.prior_width:
            raise ValueError("recency is true, but it is a term of the document prior; set prior_width above 0")
        if self.slots > 1 and not self.prior_width:
            raise ValueError(f"slots is {self.slots}, but documents are ranked by the document prior; set prior_width")
        return self

    @property
    def cutoffs(self) -> dict[str, float]:
        """The cutoffs of slots that are set."""
        return {name: cutoff for name in CUTOFFS if (cutoff := getattr(self, name)) is not None}


class ModulationConfig(Config):
    """How phi* changes the LM.

    Examples:
        >>> ModulationConfig(kind="lora", bottleneck=512).bottleneck
        512

    Attributes:
        kind: `prefix` (P-tuning v2), `lora`, `film`, or `prompt` (prompt tuning, see `mac_rag.nn.modulation`); the
            last one only for an LM whose attention takes segments.
        attention_sink: the prefix begins with the LM's own keys and values of its first tokens, and where the LM turns
            keys by their positions, those of the prefix are generated before rotation; only for `prefix`. Rotary LMs
            need it. The paper has none.
        bottleneck: inner width of the map from phi*; None for one linear layer.
        entry_layer: for `prompt`, and only there: number of the LM's layers behind which phi* gives states once more.
    """

    kind: Literal["prefix", "lora", "film", "prompt"] = "prefix"
    attention_sink: bool = False
    bottleneck: int | None = Field(None, ge=1)
    entry_layer: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.entry_layer is not None) != (self.kind == "prompt"):
            raise ValueError(f"entry_layer is {self.entry_layer}, but kind is {self.kind}; only kind prompt has one")
        if self.bottleneck is not None and self.kind == "prompt":
            raise ValueError(f"bottleneck is {self.bottleneck}, but kind prompt has none; leave it out")
        if self.attention_sink and self.kind != "prefix":
            raise ValueError(f"attention_sink is true, but only kind prefix has one, not {self.kind}")
        return self


class AttentionConfig(Config):
    """How an engine attends to its bank. It is part of no checkpoint: any bank may be read in any of these ways.

    Examples:
        >>> from mac_rag import MACEngine
        >>> MACEngine("mac-tiny", attention=AttentionConfig(strategy="preselect", preselected=8)).attention.preselected
        8

    Attributes:
        strategy: `streaming` is exact over the whole bank, at constant working memory. `preselect` is exact over the
            documents with the highest prior, so that a question's cost hardly grows with the bank. `hierarchical` is
            algorithm 3 of the paper.
        preselected: N, rows preselected for each question.
        subgroup: M, modulations that algorithm 3 aggregates into one.
        cache_bytes: memory for the bank's keys and values. Those of a larger bank are projected when they are
            needed, and the last used ones are kept.
    """

    strategy: Literal["streaming", "preselect", "hierarchical"] = "streaming"
    preselected: int = Field(64, ge=1)
    subgroup: int = Field(16, ge=2)
    cache_bytes: int = Field(2 << 30, ge=0)


class BoundConfig(Config):
    """How large a bank may become, and how it makes room (section "Memory bank size constraint").

    Examples:
        >>> from mac_rag import Document, MACEngine
        >>> engine = MACEngine("mac-tiny", bound=BoundConfig(maximum=2))
        >>> report = engine.adapt([Document(town, f"A storm has hit {town}.") for town in ("Haib", "Tour", "Wun")])
        >>> len(list(engine.bank)), len(engine.bank)  # two entries stand for three documents
        (2, 3)

    Attributes:
        maximum: largest number of entries; documents that were averaged are one entry.
        method: see `mac_rag.bank.reduction`. In the paper, averaging the nearest entries is best.
    """

    maximum: int = Field(ge=1)
    method: Literal["random-pruning", "random-averaging", "nearest-averaging"] = "nearest-averaging"


class MACConfig(Config):
    """A whole MAC model.

    Examples:
        >>> t5 = EncoderConfig(name="google-t5/t5-small")
        >>> config = MACConfig(base_lm=BaseLMConfig(name="gpt2"), amortization=t5, input_encoder=t5, tokens=12)
        >>> MACConfig.parse(config.model_dump(), "config.json") == config
        True

    Attributes:
        base_lm: the frozen base LM.
        amortization: g_amort.
        input_encoder: g_input.
        sentence_encoder: gives each text its first memory token, by which the document prior compares texts. None: the
            prior compares the means of all memory tokens.
        hashed_bm25: gives each text lexical vectors, which the document prior compares as well; None for none.
        tokens: T, memory tokens of a document, the sentence encoder's included.
        mlp_width: inner width of the MLP of each memory token; None for the backbone's width, as in the paper.
        aggregation: h_psi.
        modulation: how phi* changes the LM.
        prompt: the templates of documents, questions and answers.
        extractive: keeps answers to spans of the documents in front of the question (see `mac_rag.lm.decoding`), or to
            one of these, which are possible after any document, as the abstention of the prompt's format is; for an LM
            that has learned to answer in the words of what it reads. None for free answers.
        max_document_tokens: longest document, in the amortization network's own tokens.
        max_new_tokens: longest answer, in the LM's tokens.
        context_window: tokens that documents, question and answer may have together; None for all positions of the LM.
            An LM may have more positions than it has learned to use.
        memory_weight: lambda, the weight of the LM with memory against the LM alone, for questions behind retrieved
            documents (see `mac_rag.lm.decoding`). 1 is the paper's `LM(d + x; phi*)` and costs half as much. No
            training changes it, so choose it on validation data.
        languages: languages that the model has learned to read, as ISO 639 codes such as `en`; None where nobody says.
            Documents that are surely in another one are warned of.
    """

    base_lm: BaseLMConfig
    amortization: EncoderConfig
    input_encoder: EncoderConfig
    sentence_encoder: SentenceEncoderConfig | None = None
    hashed_bm25: HashedBM25Config | None = None
    tokens: int = Field(24, ge=1)
    mlp_width: int | None = Field(None, ge=1)
    aggregation: AggregationConfig = AggregationConfig()
    modulation: ModulationConfig = ModulationConfig()
    prompt: PromptFormat = PromptFormat()
    extractive: tuple[str, ...] | None = None
    max_document_tokens: int = Field(512, ge=8)
    max_new_tokens: int = Field(16, ge=1)
    context_window: int | None = Field(None, ge=1)
    memory_weight: float = Field(1.0, gt=0, le=1)
    languages: Languages = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for part in (self.amortization, self.input_encoder):
            # Those of a quantised LM stay in its dtype.
            if part.embeddings == "base-lm" and (part.dtype != self.base_lm.dtype or part.quantization != "none"):
                raise ValueError("embeddings of the base LM can be shared only at its dtype and without quantization")
        serving = [] if self.sentence_encoder is None else [f"the sentence encoder {self.sentence_encoder.name!r}"]
        serving += [] if self.hashed_bm25 is None else ["hashed_bm25"]
        if serving and not self.aggregation.prior_width:
            raise ValueError(f"{serving[0]} serves the document prior; set aggregation.prior_width above 0")
        for name, cutoff in self.aggregation.cutoffs.items():
            if self.modulation.kind != "prompt":
                raise ValueError(
                    f"aggregation.{name} is {cutoff}, but with a modulation of the kind {self.modulation.kind} the LM "
                    "reads all slots; leave it out"
                )
        if self.aggregation.reading_cutoff is not None and self.prompt.abstention is None:
            raise ValueError(
                f"aggregation.reading_cutoff is {self.aggregation.reading_cutoff}, but the LM has not learned to "
                "abstain; leave it out, or train with prompt.abstention"
            )
        if self.sentence_encoder is not None and self.tokens < 2:
            raise ValueError(f"tokens is {self.tokens}, but a document needs one beside the sentence encoder's")
        return self

    @property
    def modulation_tokens(self) -> int:
        """Tokens of phi*: T, or with slots S T."""
        return self.tokens * self.aggregation.slots

    @property
    def tokens_in_prompt(self) -> int:
        """Tokens of phi* that the LM runs over with each prompt, at most; 0 for all modulations but a prompt."""
        return self.modulation_tokens if self.modulation.kind == "prompt" else 0

    @property
    def lexical_vectors(self) -> int:
        """R, lexical vectors that are stored with the T memory tokens of a text; 0 without `hashed_bm25`."""
        if self.hashed_bm25 is None:
            return 0
        return self.hashed_bm25.vectors + (self.hashed_bm25.years is not None)


class OwnKVConfig(Config):
    """A model whose memory is its LM's own keys and values; see `mac_rag.model.own_kv`.

    Examples:
        >>> OwnKVConfig(base_lm=BaseLMConfig(name="HuggingFaceTB/SmolLM2-135M-Instruct"), lm_digest="").memory_tokens
        1024

    Attributes:
        base_lm: the LM.
        lm_digest: sha256 of the LM's weights and tokenizer, which the folder of the model does not hold.
        prompt: how a conversation is written; `chat` if the tokenizer has a chat template.
        turn: what the user says, with `{document}` and after it `{question}`.
        adapter: True if the folder holds low-rank updates of the LM, trained by the task `tune_reading`.
        bytes_per_token: bytes that a document's token takes in a bank; None keeps all keys and values as they are.
        sentence_encoder: encoder of the document prior, as `mac_rag.retrieval.registry.make_encoder` knows it, which
            also finds documents that share no word with a question; None for BM25 alone.
        bias_scale: what a document's score, relative to the best one, is multiplied with before it is added to the
            attention logits of its tokens.
        max_document_tokens: longest row of a document.
        memory_tokens: most tokens of documents that a question sees.
        max_new_tokens: longest answer, in tokens.
        context_window: tokens of the prompt beside documents in memory; None for all positions of the LM.
        languages: as in `MACConfig`.
    """

    base_lm: BaseLMConfig
    lm_digest: str
    prompt: PromptFormat = PromptFormat()
    turn: str = (
        "Read the context and answer the question in a few words.\n\nContext: {document}\n\nQuestion: {question}"
    )
    adapter: bool = False
    bytes_per_token: int | None = Field(None, ge=1)
    sentence_encoder: str | None = None
    bias_scale: float = Field(0.5, ge=0)
    max_document_tokens: int = Field(1024, ge=8)
    memory_tokens: int = Field(1024, ge=8)
    max_new_tokens: int = Field(64, ge=1)
    context_window: int | None = Field(None, ge=1)
    languages: Languages = Field(None, min_length=1)

    @property
    def memory_weight(self) -> float:
        """1: the opening of a prompt is a part of the memory, so nothing is decoded without it."""
        return 1.0
