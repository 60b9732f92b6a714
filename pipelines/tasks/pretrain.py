"""Pretraining: next-token prediction on a corpus, with a tokenizer learned from the same corpus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mac_rag.config import Config, PromptFormat
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import QADataset
from mac_rag.lm.batching import pad_rows
from mac_rag.lm.loading import load_tokenizer, quiet
from mac_rag.lm.prompt import PromptEncoder
from pipelines.corpora.blocks import Preparation
from pipelines.corpora.text import SEED, CorpusConfig, ReadingSequences, Sequences, texts
from pipelines.initializers.minilm_embeddings import minilm_embeddings
from pipelines.tasks.open_book import reading_scores
from pipelines.trainer import Task, TrainerConfig, shuffled

_POSITIONS = 1024  # longest sequence of a llama in tokens: rotary positions cost nothing, and prompts stay below it
_COPY_LENGTH = 4, 24  # fewest and most random tokens that are repeated: as long as the answers, and some more
# Proportions of the rows of a batch, in a corpus of text files. Questions teach most a step, so they have half.
_TEXT_SHARE, _CLOZE_SHARE, _QUESTIONS_SHARE = 1.0, 1.0, 2.0
# Weight of an answer's token in the loss, in a corpus of text files. Answers are a few tokens of hundreds there.
_ANSWER_WEIGHT = 4.0
_VALIDATION_QUESTIONS = 256  # of the data set beside text files: an LM answers them in seconds
# Dense bf16 peaks in FLOP/s (vendor's data sheets) by a part of the chip's name; the first that fits counts.
_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


class LMConfig(Config):
    """Architecture, sizes and first weights of an LM.

    Attributes:
        kind: `llama`, a causal LM (RoPE, RMSNorm, SwiGLU, tied embeddings); or `t5`, an encoder-decoder from which a
            text encoder of MAC can start.
        layers: number of layers; a t5 has as many in each of its two halves.
        tokenizer: name or folder of an LM whose tokenizer is used; None learns one. With that of all-MiniLM-L6-v2
            (`minilm`), the token embeddings start from its own; others start at random.
        vocabulary: entries of the BPE that is learned, without the number tokens.
    """

    kind: Literal["llama", "t5"] = "llama"
    hidden_size: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    tokenizer: str | None = None
    vocabulary: int = Field(2048, ge=300)

    @model_validator(mode="after")
    def _check(self) -> LMConfig:
        if self.tokenizer is not None and self.vocabulary != LMConfig.model_fields["vocabulary"].default:
            raise ValueError(f"vocabulary is {self.vocabulary}, but the tokenizer {self.tokenizer!r} has its own")
        return self

    @property
    def intermediate_size(self) -> int:
        """Inner width of the feed-forward networks: 8/3 of the width, as in Llama, and a multiple of 32."""
        return 32 * -(-self.hidden_size // 12)


class PretrainConfig(Config):
    """A recipe of `pipelines.pretrain`.

    Attributes:
        corpus: the texts.
        lm: the LM.
        compile: compile the losses of full blocks with `torch.compile`, which needs a C++ compiler on a CPU.
    """

    corpus: CorpusConfig = CorpusConfig()
    lm: LMConfig = LMConfig()
    compile: bool = False
    trainer: TrainerConfig


def train_tokenizer(config: PretrainConfig) -> PreTrainedTokenizerFast:
    """Learns a byte-level BPE that starts every text with `<s>` and cuts numbers into groups of at most three digits.

    Each group is one token: a small LM learns to copy one token long before it learns to copy digit by digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["<pad>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.lm.vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(config.corpus, PromptFormat()), trainer)
    tokenizer.add_tokens([f"{number:0{digits}d}" for digits in (3, 2) for number in range(10**digits)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


class PretrainTask(Task):
    """The LM, its corpus and its validation: perplexity, and for newswire the open-book exact match.

    Args:
        config: the recipe.
        output: the run's folder, where the tokenizer is kept between runs.
    """

    def __init__(self, config: PretrainConfig, output: Path) -> None:
        super().__init__()
        self.config = config
        folder = output / "tokenizer"
        if not folder.exists():
            name = config.lm.tokenizer
            (train_tokenizer(config) if name is None else load_tokenizer(name)).save_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.encoder = PromptEncoder(self.tokenizer)
        torch.manual_seed(config.trainer.seed)
        self.lm = self.network()
        embedded = self.lm.get_input_embeddings().weight
        # They are tied to the output: this scale gives logits of unit variance. With the usual 0.02, rare tokens are
        # hard to tell apart.
        torch.nn.init.normal_(embedded, std=config.lm.hidden_size**-0.5)
        if config.lm.tokenizer == "minilm":
            with torch.no_grad():
                embedded.copy_(minilm_embeddings(config.lm.hidden_size))
        self._answer_mark = self.encoder.question("")[-2:]
        self._compiled: Any = torch.compile(self.token_losses, dynamic=False) if config.compile else self.token_losses
        if config.corpus.files is None:
            self._open_newswire()
        else:
            self._open_texts(output)

    def network(self) -> Any:
        """The LM with random weights."""
        sizes = self.config.lm
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=sizes.hidden_size,
                intermediate_size=sizes.intermediate_size,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.heads,
                max_position_embeddings=_POSITIONS,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                tie_word_embeddings=True,
                bos_token_id=self.tokenizer.bos_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        )

    def _open_newswire(self) -> None:
        corpus = self.config.corpus
        sets = []
        for split, count in (("train", corpus.documents), ("val", corpus.validation_documents)):
            data = generate(split, count, seed=SEED, questions_per_document=4)
            questions = data.questions_by_document()
            sets.append(ReadingSequences(data.documents, questions, self.encoder, corpus.sequence_length))
        self._sources: list[tuple[Sequences, float]] = [(sets[0], 1.0)]
        self._held_out: Sequences = sets[1]
        self._asked: QADataset | None = data

    def _open_texts(self, output: Path) -> None:
        corpus, data = self.config.corpus, self.config.corpus.questions
        prepared = Preparation(output / "blocks", corpus, self.encoder)
        text, cloze = prepared.texts()
        text, self._held_out = text.split(corpus.validation_documents)
        self._sources = [(text, _TEXT_SHARE)]
        if corpus.cloze:
            self._sources.append((cloze, _CLOZE_SHARE))
        self._asked = None
        if data is not None:
            self._sources.append((prepared.questions(data.training_set()), _QUESTIONS_SHARE))
            self._asked = data.validation_set()

    def batch(self, step: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
        """Token ids `[B, L]` and targets `[B, L]`, which are -100 where there is no loss."""
        trainer, copy_steps = self.config.trainer, self.config.corpus.copy_steps
        if step < copy_steps:
            return self._copies(size)
        rows: list[list[int]] = []
        counts = portions(size, [share for _, share in self._sources])
        for (source, _), count in zip(self._sources, counts, strict=True):
            per_step = count * self.passes
            indices = shuffled(len(source), step - copy_steps, micro, count, seed=trainer.seed, per_step=per_step)
            first = step * per_step + micro * count
            rows += [source.sequence(i, first + n) for n, i in enumerate(indices)]
        return self._padded(rows)

    def _copies(self, size: int) -> tuple[Tensor, Tensor]:
        """Sequences of random tokens, repeated once; the targets are the repetition without its first token."""
        shortest, longest = _COPY_LENGTH
        length = int(torch.randint(shortest, longest + 1, ()))
        tokens = torch.randint(len(self.tokenizer), (size, length))
        ids = torch.cat([torch.full((size, 1), self.tokenizer.bos_token_id), tokens, tokens], 1)
        targets = ids.clone()
        targets[:, : length + 2] = -100
        return ids.to(self.lm.device), targets.to(self.lm.device)

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows padded on the right, which causal attention never reads; all of their tokens are targets."""
        pad = self.tokenizer.pad_token_id
        ids, _ = pad_rows(rows, pad, self.lm.device)
        return ids, ids.masked_fill(ids == pad, -100)  # packed blocks bring padding of their own

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of every token but the first of each row `[B, L - 1]`, 0 where there is no target."""
        logits = self.lm(input_ids=ids, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits.float().transpose(1, 2), targets[:, 1:], reduction="none")

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        ids, targets = batch
        # All blocks have one shape; torch.compile would compile every other shape anew.
        compiled = ids.shape[1] == self.config.corpus.sequence_length
        losses = (self._compiled if compiled else self.token_losses)(ids, targets)
        weights = (targets[:, 1:] != -100).float()
        answers = answer_tokens(ids, self._answer_mark, self.encoder.eos)[:, 1:] & (targets[:, 1:] != -100)
        scalars = {"answers": losses[answers].mean()} if answers.any() else {}
        if self.config.corpus.files is not None:
            weights[answers] = _ANSWER_WEIGHT
        return {"loss": (losses * weights).sum() / weights.sum(), **scalars}

    def validate(self) -> dict[str, float]:
        total, count = 0.0, 0
        rows = [self._held_out.sequence(i, i) for i in range(len(self._held_out))]
        for first in range(0, len(rows), 32):
            ids, targets = self._padded(rows[first : first + 32])
            total += float(self.token_losses(ids, targets).sum())
            count += int((targets[:, 1:] != -100).sum())
        figures = {"perplexity": math.exp(total / count)}
        if self._asked is not None:
            texts = {document.id: document.text for document in self._asked.documents}
            questions = self._asked.questions
            if self.config.corpus.files is not None:  # from all over the stream
                questions = questions[:: -(-len(questions) // _VALIDATION_QUESTIONS)]
            contexts = [[texts[question.gold]] for question in questions]
            figures |= reading_scores(self.lm, self.encoder, questions, contexts)
        return figures

    def speed(self, examples: float) -> dict[str, float]:
        return training_speed(self.lm, examples, self.config.corpus.sequence_length)

    def save(self, folder: Path) -> None:
        with quiet():
            self.lm.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def portions(size: int, shares: Sequence[float]) -> list[int]:
    """Splits `size` in proportion to the shares; what remains goes to the largest remainders."""
    exact = [size * share / sum(shares) for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in order[: size - sum(counts)]:
        counts[i] += 1
    return counts


def answer_tokens(ids: Tensor, mark: Sequence[int], eos: int) -> Tensor:
    """Mask `[B, L]` of answer tokens: those after the mark that ends a question, up to the end of the sequence.

    Args:
        ids: token ids `[B, L]`.
        mark: last tokens of every question.
        eos: token that ends an answer and belongs to it.
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    for offset, token in enumerate(reversed(mark)):
        begins &= functional.pad(ids == token, (offset, 0))[:, : ids.shape[1]]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begun = torch.where(begins, places, -1).cummax(1).values
    ended = torch.where(ids == eos, places, -1).cummax(1).values
    inside = begun > ended
    return functional.pad(inside, (1, 0))[:, : ids.shape[1]]


def training_speed(lm: Any, sequences: float, length: int) -> dict[str, float]:
    """Tokens per second and, on a chip whose peak is known, the share of this peak.

    A token costs 6 FLOP for each weight, and 6 x layers x width x length for causal attention, forward and backward
    (Chowdhery et al., 2022, "PaLM", appendix B; halved, because causal attention skips later tokens).

    Args:
        lm: a causal LM.
        sequences: full sequences per second over all processes.
        length: tokens of a sequence.
    """
    tokens = sequences * length
    speed = {"tokens_per_second": tokens}
    peak = _peak(lm.device)
    if peak is not None:
        weights = sum(parameter.numel() for parameter in lm.parameters())
        per_token = 6 * weights + 6 * lm.config.num_hidden_layers * lm.config.hidden_size * length
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        speed["share_of_peak"] = tokens * per_token / (peak * processes)
    return speed


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in _PEAKS.items() if chip in name), None)
