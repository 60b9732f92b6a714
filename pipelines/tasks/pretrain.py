"""Pretraining: a small LM learns to read generated news, with a tokenizer that is learned from the same news."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mac_rag.config import PromptFormat
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.lm.batching import pad_rows
from mac_rag.lm.loading import quiet
from mac_rag.lm.prompt import PromptEncoder
from pipelines.tasks.open_book import reading_scores
from pipelines.trainer import Task, TrainingRecipe, shuffled

_DOCUMENTS, _VALIDATION_DOCUMENTS = 100_000, 256  # generated, to train on and to validate on
_TOKENIZER_DOCUMENTS = 20_000  # documents that the tokenizer is learned from, at most
_COPIED = 4, 24  # fewest and most random tokens that are repeated: as long as the answers, and some more
# First steps on random tokens, repeated once. Only copying predicts them: within two minutes they teach a small LM what
# answering from a document needs, which documents teach it far later.
_COPY_STEPS = 1500
_LENGTH = 224  # of a training sequence in tokens: a story with its questions
_POSITIONS = 1024  # longest sequence in tokens: rotary positions cost nothing, and prompts stay below it
_SEED = 0  # of the generated documents
_VALIDATION_BATCH = 32
# Sizes of the LM: RoPE, RMSNorm, SwiGLU, tied embeddings. The vocabulary is that of the BPE, without the number tokens.
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = 128, 4, 4, 2048
_INNER_WIDTH = 32 * -(-_WIDTH // 12)  # of the feed-forward networks: 8/3 of the width, as in Llama, a multiple of 32


class PretrainConfig(TrainingRecipe):
    """A recipe of the task `pretrain`, which makes one LM: its sizes and its data are fixed above."""


def train_tokenizer() -> PreTrainedTokenizerFast:
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
        vocab_size=_VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(), trainer)
    tokenizer.add_tokens([f"{number:0{digits}d}" for digits in (3, 2) for number in range(10**digits)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def _tokenizer_texts() -> Iterator[str]:
    """The texts from which the tokenizer learns its vocabulary."""
    prompt = PromptFormat()
    data = generate("train", min(_DOCUMENTS, _TOKENIZER_DOCUMENTS), seed=_SEED, questions_per_document=2)
    yield from (prompt.document.format(document=document.text) for document in data.documents)
    yield from (prompt.question.format(question=question.question) for question in data.questions)


class PretrainTask(Task):
    """The LM, its corpus and its validation: perplexity, and exact match and F1 with the document in the prompt.

    The tokenizer is kept in the run's folder (`output`) between runs.
    """

    def __init__(self, config: PretrainConfig, output: Path) -> None:
        super().__init__()
        self.config = config
        folder = output / "tokenizer"
        if not folder.exists():
            train_tokenizer().save_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.encoder = PromptEncoder(self.tokenizer)
        torch.manual_seed(config.trainer.seed)
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=_WIDTH,
                intermediate_size=_INNER_WIDTH,
                num_hidden_layers=_LAYERS,
                num_attention_heads=_HEADS,
                num_key_value_heads=_HEADS,
                max_position_embeddings=_POSITIONS,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                tie_word_embeddings=True,
                bos_token_id=self.tokenizer.bos_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        )
        # The embeddings are tied to the output: this scale gives logits of unit variance. With the usual 0.02, rare
        # tokens are hard to tell apart.
        embeddings: Any = self.lm.get_input_embeddings()
        torch.nn.init.normal_(embeddings.weight, std=_WIDTH**-0.5)
        self._training, self._held_out = (
            generate(split, count, seed=_SEED, questions_per_document=4)
            for split, count in (("train", _DOCUMENTS), ("val", _VALIDATION_DOCUMENTS))
        )
        self._questions = self._training.questions_by_document() | self._held_out.questions_by_document()

    def batch(self, step: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
        """Token ids `[B, L]` and targets `[B, L]`, which are -100 where there is no loss."""
        if step < _COPY_STEPS:
            return self._copies(size)
        per_step = size * self.passes
        seed = self.config.trainer.seed
        documents = self._training.documents
        indices = shuffled(len(documents), step - _COPY_STEPS, micro, size, seed=seed, per_step=per_step)
        first = step * per_step + micro * size
        return self._padded([self._sequence(documents[i], first + n) for n, i in enumerate(indices)])

    def _sequence(self, document: Document, seed: int) -> list[int]:
        """A document, then questions on it with their answers; the seed determines their order.

        Such sequences teach an LM to answer from the text before the question, several times for each document.
        """
        ids, length = self.encoder.prompt_start([document.text]), _LENGTH
        questions = list(self._questions[document.id])
        random.Random(seed).shuffle(questions)
        for question in questions:
            pair = self.encoder.question(question.question) + self.encoder.answer(question.answers[0])
            if len(ids) + len(pair) > length:
                break
            ids += pair
        return ids[:length]

    def _copies(self, size: int) -> tuple[Tensor, Tensor]:
        """Sequences of random tokens, repeated once; the targets are the repetition without its first token."""
        shortest, longest = _COPIED
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
        return ids, ids.masked_fill(ids == pad, -100)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        total, count = self._loss(*batch)
        return {"loss": total / count}

    def _loss(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the targets' negative log-likelihoods, and their number; the first token of a row is no target."""
        logits = self.lm(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = functional.cross_entropy(logits.float().transpose(1, 2), targets[:, 1:], reduction="sum")
        return losses, (targets[:, 1:] != -100).sum()

    def validate(self) -> dict[str, float]:
        total, count = 0.0, 0
        rows = [self._sequence(document, number) for number, document in enumerate(self._held_out.documents)]
        for first in range(0, len(rows), _VALIDATION_BATCH):
            losses, targets = self._loss(*self._padded(rows[first : first + _VALIDATION_BATCH]))
            total += float(losses)
            count += int(targets)
        texts = {document.id: document.text for document in self._held_out.documents}
        questions = self._held_out.questions
        contexts = [[texts[question.gold]] for question in questions]
        return {"perplexity": math.exp(total / count), **reading_scores(self.lm, self.encoder, questions, contexts)}

    def save(self, folder: Path) -> None:
        with quiet():
            self.lm.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
