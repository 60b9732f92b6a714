"""MACModel: amortization, aggregation and modulation around a frozen LM; and answering with them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor, nn

from mac_rag.config import CUTOFFS, MACConfig
from mac_rag.data.characters import fault_of, shown
from mac_rag.data.dates import LAST, named_in
from mac_rag.errors import BankError, ConfigError, DocumentError, PromptError
from mac_rag.lm.attention_sink import sink_keys_values
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.chat import ChatPromptEncoder, Message
from mac_rag.lm.decoding import GREEDY, Sampling, SpanSource
from mac_rag.lm.devices import DeviceMap, default_device, require_weights
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import checkpoint
from mac_rag.model.calibration import Calibration, read_calibration
from mac_rag.model.factory import (
    make_hashed_bm25,
    make_modulation_network,
    named_years,
    pretrained_encoder,
    pretrained_sentence_encoder,
    with_exact_revisions,
)
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.bank_view import BankProjection, BankView
from mac_rag.nn.cpu_linear import use_onednn
from mac_rag.nn.dtypes import use_master_weights
from mac_rag.nn.memory_slots import Look, heard_slots
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.modulation import Modulation, PrefixTuning
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.nn.unpadded_bert import last_states_without_gradients
from mac_rag.progress import progress_bar

# Tokens that the amortization network reads at a time, padding included.
BATCH_TOKENS = 8192
_LEAST_PROBABILITY = 1e-6  # lower bound of the probability of an abstention, and of an answer

# Parts that both encoders share and training never changes.
_FROZEN = ("amortization.network.sentence_encoder.", "amortization.network.hashed_bm25.")
# Banks do not depend on the recency term: it reads dates and prior keys, which every bank has. So a model that learns
# the term later can still read its banks.
_BESIDE_BANKS = ("aggregation.recency.",)


class MACModel(nn.Module):
    """A frozen LM with a memory of amortized contexts.

    Documents become memory tokens (`amortize`), a question and a bank of memory tokens become one modulation phi*
    (`aggregate`), and the LM answers under it (`generate`). Build one with `from_config` or `from_pretrained`.

    Examples:
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> memory_tokens = model.amortize([text])
        >>> memory_tokens.shape  # one document, T = 16 memory tokens and R = 8 lexical vectors, D = 128
        torch.Size([1, 24, 128])
        >>> question = "How many workers does Rainga Press have?"
        >>> model.generate([question], modulation=model.aggregate([question], memory_tokens))
        ['180']

    Args:
        config: the configuration of all networks.
        base_lm: theta_base.
        amortization: g_amort.
        input_encoder: g_input.

    Attributes:
        calibration: maps evidence about an answer to a probability; None if none was fitted for the checkpoint.
        cpu_batch_tokens: prompt tokens per batch on a CPU; larger batches exceed its caches and are slower.
    """

    cpu_batch_tokens: float = 1024

    def __init__(
        self, config: MACConfig, base_lm: BaseLM, amortization: TextEncoder, input_encoder: TextEncoder
    ) -> None:
        super().__init__()
        self.config = config
        self.base_lm = base_lm
        self.amortization = amortization
        self.input_encoder = input_encoder
        if config.hashed_bm25 is not None:
            given = config.hashed_bm25.years
            years = None if given is None else named_years(given, base_lm.tokenizer, base_lm.width)
            amortization.network.years = input_encoder.network.years = years
            input_encoder.network.encodes_questions = True
        sizes = config.aggregation
        self.aggregation = AggregationNetwork(
            base_lm.width,
            blocks=sizes.blocks,
            heads=sizes.heads,
            head_width=sizes.head_width,
            feed_forward=sizes.feed_forward,
            prior_width=sizes.prior_width,
            prior_sharpness=sizes.prior_sharpness,
            sentence_token=config.sentence_encoder is not None,
            lexical_vectors=config.lexical_vectors,
            recency=sizes.recency,
            slots=sizes.slots,
            slot_cutoff=sizes.slot_cutoff,
            reading_cutoff=sizes.reading_cutoff,
            readout=config.modulation.kind == "prompt",
            lexical_weight=1.0 if config.hashed_bm25 is None else config.hashed_bm25.weight,
        )
        self.modulation = make_modulation_network(config, base_lm)
        self.base_lm_trained = False
        self.calibration: Calibration | None = None
        self._fingerprint: tuple[int, str] | None = None
        if self.context_window > self._positions:
            raise ConfigError(
                f"context_window is {self.context_window}, but the LM has positions for {self._positions} tokens "
                "after the prefix; give fewer, or leave it out for all of them"
            )
        # The LM stays where it is: it may lie on several devices.
        for part in (self.amortization, self.input_encoder, self.aggregation, self.modulation):
            part.to(base_lm.device)
            use_onednn(part)

    @classmethod
    def from_config(cls, config: MACConfig, *, device: str | torch.device | None = None) -> MACModel:
        """Builds a model from pretrained parts; networks that the paper trains from scratch start at random.

        Raises:
            ModelLoadError: if a part cannot be loaded, or its architecture does not fit its design.
            QuantizationError: if bitsandbytes is missing.
        """
        place = default_device(device)
        config = with_exact_revisions(config)
        base_lm = BaseLM.load(config.base_lm, config.prompt, place, modulation=config.modulation.kind)
        sentence_encoder = pretrained_sentence_encoder(config, base_lm)
        hashed_bm25 = make_hashed_bm25(config, base_lm)
        parts = config.amortization, config.input_encoder
        encoders = [pretrained_encoder(part, config, base_lm, sentence_encoder, hashed_bm25) for part in parts]
        return cls(config, base_lm, *encoders).eval()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, int | str] | None = None,
        max_memory: Mapping[int | str, int | str] | None = None,
    ) -> MACModel:
        """Loads a checkpoint: one in the package (`mac-small`, `mac-tiny`), a folder, or a repository on the Hub.

        Args:
            name_or_path: the checkpoint.
            revision: branch, tag or commit on the Hub.
            device: one device for all parts; None for a GPU if there is one, else the CPU.
            device_map: for an LM that is larger than one device: `auto`, or a map of the LM's modules as transformers
                takes it. MAC's networks go to the device of the LM's embeddings. A model whose layers are offloaded to
                cpu or disk can answer, but not be trained.
            max_memory: memory that `device_map` may use: GPU number or `cpu` -> bytes or a text like `20GiB`.

        Raises:
            ConfigError: for a device that is not there, or arguments that contradict each other.
            ModelLoadError: if there is no model of that name, or its files are truncated or have another format or
                architecture; the message lists the weights that differ.
        """
        spread = DeviceMap.of(device_map, max_memory, device)
        folder = checkpoint.find(name_or_path, revision)
        place = default_device(device)
        with checkpoint.unexpected(folder):
            parts = checkpoint.read(folder, place, spread)
            with parts.limit or nullcontext():
                model = cls(parts.config, parts.base_lm, parts.amortization, parts.input_encoder)
            checkpoint.fill(model.mac_state(), folder / checkpoint.WEIGHTS)
            model.aggregation.quantizer = checkpoint.read_quantizer(folder)
            model.calibration = read_calibration(folder)
        return model.eval()

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes a checkpoint: `config.json`, safetensors, tokenizers; and the base LM if it was tuned or is a folder.

        It includes codebooks for banks with rows `pq`, unless the model was trained since they were fitted.

        Args:
            folder: a new or empty folder.
            dtype: dtype of the stored weights, which may be `torch.int8` (see `mac_rag.lm.loading.to_int8`); None keeps
                each weight's own.
        """
        checkpoint.write(
            self._parts(),
            self.mac_state(),
            Path(folder),
            dtype,
            lm_was_trained=self.base_lm_trained,
            quantizer=self._quantizer,
        )
        if dtype is None and self.calibration is not None and self.calibration.fingerprint == self.fingerprint:
            self.calibration.write(Path(folder))

    def push_to_hub(self, repository: str, *, private: bool = True, token: str | None = None) -> str:
        """Uploads a checkpoint to a model repository on the Hub and returns its address."""
        return checkpoint.upload(
            self._parts(),
            self.mac_state(),
            repository,
            private=private,
            token=token,
            lm_was_trained=self.base_lm_trained,
            quantizer=self._quantizer,
        )

    @property
    def _quantizer(self) -> ProductQuantizer | None:
        """The codebooks for banks with rows `pq`; None if training has changed the weights they were fitted to."""
        quantizer = self.aggregation.quantizer
        return quantizer if quantizer is not None and quantizer.fingerprint == self.fingerprint else None

    def _parts(self) -> checkpoint.Parts:
        return checkpoint.Parts(self.config, self.base_lm, self.amortization, self.input_encoder)

    @property
    def device(self) -> torch.device:
        return self.base_lm.device

    def train(self, mode: bool = True) -> MACModel:
        """Sets the training mode of all networks except the sentence encoder and a frozen base LM.

        Raises:
            ConfigError: if weights of the LM are offloaded: no gradient flows through them.
        """
        if mode:
            require_weights(self.base_lm.model, "training")
        super().train(mode)
        if not self.base_lm_trained:
            self.base_lm.eval()
        if self.amortization.network.sentence_encoder is not None:
            self.amortization.network.sentence_encoder.eval()
        self._fingerprint = None  # fused optimisers change weights without a new version of the tensors
        if self.base_lm_trained and isinstance(self.modulation, PrefixTuning) and self.modulation.sink is not None:
            self.modulation.sink.keys_values.copy_(sink_keys_values(self.base_lm))  # the trainer calls this each step
        return self

    def use_master_weights(self) -> None:
        """Converts trainable weights in half precision to fp32; call it before training.

        Frozen or quantised weights keep their dtype. A checkpoint still loads in its configured dtypes.
        """
        use_master_weights(self)
        self._fingerprint = None

    def train_base_lm(self, *, lora_rank: int | None) -> None:
        """Makes the base LM trainable: all its weights, or low-rank updates, which checkpoints store merged.

        Embeddings that other parts share stay frozen, because a sentence encoder is never trained.

        Raises:
            ConfigError: for a quantised LM; see `mac_rag.lm.lora_tuning.make_trainable`.
        """
        make_trainable(self.base_lm.model, lora_rank)
        if self._shared_embeddings():
            self.base_lm.model.get_input_embeddings().requires_grad_(False)
        self.base_lm_trained = True

    def mac_state(self) -> dict[str, Tensor]:
        """The weights of MAC's own networks by name, without those of the base LM and of quantised backbones.

        Training changes all of them except the sentence encoder and hashed BM25.
        """
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if name.startswith(_FROZEN) or (parameter.requires_grad and not name.startswith("base_lm."))
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of all weights that write or read memory tokens. Only models with the same one share a bank.

        It leaves out the recency term, which reads no memory tokens.
        """
        state = self.mac_state() | self._shared_embeddings()
        state = {name: tensor for name, tensor in state.items() if not name.startswith(_BESIDE_BANKS)}
        # In-place updates raise a tensor's version, so that training between two calls is noticed.
        version = sum(tensor._version for tensor in state.values())
        if self._fingerprint is None or self._fingerprint[0] != version:
            digest = hashlib.sha256(fingerprint_fields(self.config).encode())
            for name, tensor in sorted(state.items()):
                digest.update(name.encode())
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
            self._fingerprint = (version, digest.hexdigest())
        return self._fingerprint[1]

    @property
    def answer_digest(self) -> str:
        """Hex digest of everything in the model that changes an answer; computed at each access.

        It covers the weights of all parts, the LM's included, in their dtypes; all tokenizers and chat templates; the
        configurations of all networks; prompt format, memory weight, limits and generation settings. It does not cover
        where the weights came from, or the versions of libraries. Two models with the same digest give the same
        answers, up to rounding that differs between devices and versions.

        Raises:
            ConfigError: if weights of the LM are offloaded and so cannot be read.
        """
        return checkpoint.answer_digest(self._parts(), self.state_dict())

    def _shared_embeddings(self) -> dict[str, Tensor]:
        """The base LM's embeddings, if an encoder shares them; otherwise empty."""
        parts = self.config.amortization, self.config.input_encoder, self.config.sentence_encoder
        if all(part is None or part.embeddings == "own" for part in parts):
            return {}
        return {"embeddings": self.base_lm.model.get_input_embeddings().weight}

    def amortize(self, documents: Sequence[str], *, batch_tokens: int = BATCH_TOKENS, progress: bool = False) -> Tensor:
        """Encodes documents to memory tokens, each once and without gradients.

        Args:
            documents: K texts.
            batch_tokens: tokens of one batch, padding included; documents of similar length share a batch.
            progress: shows a progress bar.

        Returns:
            `[K, T + R, D]` in float32, on the model's device: T memory tokens of each document and, if the model has
            hashed BM25, R lexical vectors. A bank stores such rows.

        Raises:
            DocumentError: for an empty document, one that is no text, or one beyond the limit of tokens.
        """
        rows = [self.amortization.ids(document) for document in documents]
        with progress_bar("adapt", len(rows), disable=not progress) as bar:
            return self.amortize_rows(rows, batch_tokens=batch_tokens, advance=bar.advance)

    def amortize_rows(
        self,
        rows: Sequence[Sequence[int]],
        *,
        batch_tokens: int = BATCH_TOKENS,
        advance: Callable[[int], object] | None = None,
    ) -> Tensor:
        """As `amortize`, for documents that are already token ids (`TextEncoder.plan`).

        `advance` is called after each batch, with its number of rows.
        """
        return self.amortization.encode(rows, batch_tokens, advance).stacked()

    @property
    def row_shape(self) -> tuple[int, int]:
        """`(T + R, D)`, the shape of one document's row in `amortize`'s result and in a bank."""
        return self.config.tokens + self.config.lexical_vectors, self.base_lm.width

    @torch.no_grad()
    def project(self, phi: Tensor, *, dates: Tensor | None = None) -> BankProjection:
        """Projects a bank to the keys and values of all blocks, once for all questions.

        Args:
            phi: `[K, T + R, D]`, the result of `amortize`.
            dates: int64 `[K]`, date of each document in microseconds since 1970; a model with a recency term lets newer
                documents count more. None if unknown.

        Raises:
            BankError: for an empty bank.
        """
        if not len(phi):
            raise BankError("the memory bank is empty; adapt to some documents first")
        projected = self.aggregation.project(MemoryTokens.split(phi.to(self.device), self.config.lexical_vectors))
        return projected if dates is None else replace(projected, dates=dates.to(self.device))

    @torch.no_grad()
    def aggregate(self, questions: Sequence[str], bank: Tensor | BankView, *, mask: Tensor | None = None) -> Tensor:
        """phi* `[B, T, D]` of each question (equation 1).

        Args:
            questions: B texts.
            bank: memory tokens from `amortize`, or a view of them.
            mask: `[B, K]`, True where a question may see a document.

        Raises:
            BankError: for an empty bank.
            DocumentError: for an empty question or one beyond the limit.
        """
        view, encoded = self._view(bank), self._encode(questions)
        asked, look = self.asked(questions), self.look(questions)
        phi: Tensor = self.aggregation(encoded, view, mask=mask, asked=asked, look=look)[0]
        return phi

    @torch.no_grad()
    def attention(self, questions: Sequence[str], bank: Tensor | BankView) -> Tensor:
        """The last block's attention mass on each row, `[B, K]`, averaged over heads and tokens; rows sum to 1."""
        view, encoded = self._view(bank), self._encode(questions)
        asked, look = self.asked(questions), self.look(questions)
        mass: Tensor = self.aggregation(encoded, view, asked=asked, look=look, mass=True)[1]
        return mass

    def asked(self, questions: Sequence[str]) -> Tensor | None:
        """The last moment of the time that each question names, `[B]`; None without a recency term, which reads it.

        See `mac_rag.data.dates.named_in`. For a question that names no time, it is later than all dates.
        """
        if self.aggregation.recency_in_use is None:
            return None
        moments = [named_in(question) for question in questions]
        return torch.tensor([LAST if moment is None else moment for moment in moments], device=self.device)

    def _encode(self, questions: Sequence[str]) -> MemoryTokens:
        """Memory tokens of questions, without gradients."""
        rows = [self.input_encoder.ids(question) for question in questions]
        encoded: MemoryTokens = self.input_encoder(rows, last_states_without_gradients)
        return encoded

    def _view(self, bank: Tensor | BankView) -> BankView:
        return self.project(bank) if isinstance(bank, Tensor) else bank

    def without_document_prior(self) -> AbstractContextManager[None]:
        """A context in which attention ignores the document prior, to measure the prior's effect."""
        return _switched_off(self.aggregation, "use_prior")

    def without_recency(self) -> AbstractContextManager[None]:
        """A context in which the document prior ignores dates, to measure the recency term's effect."""
        return _switched_off(self.aggregation, "use_recency")

    @property
    def knows_times(self) -> bool:
        """True if the document prior reads dates of documents, or years of questions; see `without_times`."""
        return self.aggregation.recency is not None or self.input_encoder.network.years is not None

    @contextmanager
    def without_times(self) -> Iterator[None]:
        """A context without the recency term in which a question's years are words like any other."""
        years = self.input_encoder.network.years
        with self.without_recency(), nullcontext() if years is None else _switched_off(years, "use_years"):
            yield

    @property
    def context_window(self) -> int:
        """Largest number of tokens of documents, question and answer together."""
        return self.config.context_window or self._positions

    @property
    def _positions(self) -> int:
        """Positions of the LM that the prefix of memory tokens does not take."""
        return self.base_lm.context_window - self.modulation.prefix_length

    def fit_to_window(
        self,
        question: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
    ) -> FittedPrompt:
        """A question and its documents as token ids that fit the LM's window.

        Args:
            question: x; a `FittedPrompt` is returned as it is.
            contexts: documents before it, the best first.
            overflow: if they do not fit: raise an error, or cut the documents, beginning with the last one. The
                question is never cut.
            max_new_tokens: longest answer, which must fit too; None for the configured length.

        Raises:
            DocumentError: for an empty question, a text with half of a surrogate pair or NUL, or a prompt beyond the
                window.
        """
        if isinstance(question, FittedPrompt):
            return question
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        question_ids = self.input_encoder.ids(question)  # checks the question, even if no memory is used
        _check_each(contexts, "document")
        fitted = self.base_lm.prompts.fit_to_window(question, contexts, room)
        taken = self.base_lm.prompts.positions
        if taken(fitted.ids) > room or (fitted.truncated and overflow == "error"):
            used = taken(self.base_lm.prompts.prompt(question, contexts))
            raise DocumentError(
                f"{len(contexts)} documents and the question take {used} tokens, but the LM's window leaves room for "
                f"{room}; give fewer or shorter documents (a smaller k or chunk size)"
            )
        return replace(fitted, question_ids=tuple(question_ids))

    def fit_conversation(
        self,
        messages: Sequence[Message],
        *,
        question: str | None = None,
        contexts: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> FittedPrompt:
        """A conversation as token ids that fit the LM's window; only for models whose prompt format is `chat`.

        Args:
            messages: the conversation; see `ChatPromptEncoder.fit_conversation`.
            question: the question for the memory; None for the last message. If it is beyond the input encoder's
                limit, its last chunk is used.
            contexts: texts in the messages that may be cut, the best first.
            max_new_tokens: longest answer, which must fit too; None for the configured length.

        Raises:
            ConfigError: if the prompt format is not `chat`.
            DocumentError: for a message with half of a surrogate pair or NUL.
            PromptError: for a conversation that the chat template refuses, or that is beyond the window.
        """
        prompts = self.base_lm.prompts
        if not isinstance(prompts, ChatPromptEncoder):
            raise ConfigError("prompt.chat is false, but only a chat reads conversations; set it and train the model")
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        _check_each([message.text for message in messages], "message")
        asked = messages[-1].text if question is None and messages else question or ""
        fitted = prompts.fit_conversation(messages, asked, contexts, room)
        if len(fitted.ids) > room:
            raise PromptError(
                f"the conversation takes {len(fitted.ids)} tokens, but the LM's window leaves room for {room}; "
                "shorten its history or its prompts"
            )
        return replace(fitted, question_ids=tuple(self.input_encoder.plan(asked)[-1]))

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str | FittedPrompt],
        contexts: Sequence[Sequence[str]] | None = None,
        *,
        modulation: Tensor | None = None,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[str]:
        """Answers questions: `LM(d + x; phi*)`.

        Args:
            prompts: B questions, as texts or as results of `fit_to_window`.
            contexts: documents before each question; only for questions that are texts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.
            max_new_tokens: largest number of tokens of an answer; None for the configured one.
            num_beams: number of beams of beam search; 1 for no beam search.
            memory_weight: lambda after documents (see `mac_rag.lm.decoding`); None for the configured weight.
            sampling: how tokens are chosen, and which strings end an answer early.

        Raises:
            ConfigError: for a memory_weight that is not above 0 and at most 1, and for beams and sampling together.
        """
        fitted = self._as_fitted(prompts, contexts)
        weights = self._weights(fitted, memory_weight)
        answers = [""] * len(fitted)
        for rows in self._batches(fitted, modulation):
            texts = self.base_lm.generate(
                [fitted[i].ids for i in rows],
                self._modulation(None if modulation is None else modulation[rows]),
                max_new_tokens=max_new_tokens or self.config.max_new_tokens,
                num_beams=num_beams,
                weights=None if weights is None else [weights[i] for i in rows],
                sampling=sampling,
                sources=self.span_sources([fitted[i] for i in rows]),
            )
            for i, text in zip(rows, texts, strict=True):
                answers[i] = text
        return answers

    @torch.no_grad()
    def generate_each(
        self, prompts: Sequence[FittedPrompt], modulation: Tensor, weights: Sequence[float]
    ) -> list[list[str]]:
        """Greedy answers after documents at each of several memory weights; all weights share the prompts' cache.

        Args:
            prompts: B questions, each after at least one document.
            modulation: phi* `[B, T, D]`.
            weights: values of lambda (see `mac_rag.lm.decoding`), from 0 (the frozen LM alone) to 1.

        Returns:
            B answers for each weight.
        """
        answers = [[""] * len(prompts) for _ in weights]
        for rows in self._batches(prompts, modulation):
            each = self.base_lm.generate_each(
                [prompts[i].ids for i in rows],
                self._modulation(modulation[rows]),
                max_new_tokens=self.config.max_new_tokens,
                weights=weights,
                sources=self.span_sources([prompts[i] for i in rows]),
            )
            for at_weight, texts in zip(answers, each, strict=True):
                for i, text in zip(rows, texts, strict=True):
                    at_weight[i] = text
        return answers

    @torch.no_grad()
    def score_answers(
        self, prompts: Sequence[FittedPrompt], answers: Sequence[str], *, modulation: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each answer's first token under the LM, and the mean over all its tokens with the end.

        Only the part of an answer that fits the LM's positions counts.

        Args:
            prompts: B prompts.
            answers: B texts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.

        Returns:
            `[B]` each, in float32 on the CPU.
        """
        ids = [self.base_lm.prompts.answer(text) for text in answers]
        first, mean = torch.zeros(len(prompts)), torch.zeros(len(prompts))
        for i, loss in enumerate(self._losses(prompts, ids, modulation)):
            first[i], mean[i] = -loss[0], -loss.mean()
        return first, mean

    @torch.no_grad()
    def answering_odds(self, prompts: Sequence[FittedPrompt], *, modulation: Tensor | None = None) -> Tensor | None:
        """The log-odds that the LM answers rather than abstains; None for an LM that has not learned to abstain.

        Args:
            prompts: B prompts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.

        Returns:
            `[B]`, in float32 on the CPU.
        """
        if (beginning := self.base_lm.abstention) is None:
            return None
        return _answering_odds(self._losses(prompts, [beginning] * len(prompts), modulation)).float().cpu()

    def _losses(
        self, prompts: Sequence[FittedPrompt], answers: Sequence[Sequence[int]], phi: Tensor | None
    ) -> list[Tensor]:
        """For each of B answers the losses of its tokens, as far as they fit the LM's positions."""
        taken = self.base_lm.prompts.positions
        found = [torch.empty(0)] * len(prompts)
        for rows in self._batches(prompts, phi):
            losses = self.base_lm.token_losses(
                [prompts[i].ids for i in rows],
                [answers[i][: self._positions - taken(prompts[i].ids)] for i in rows],
                self._modulation(None if phi is None else phi[rows]),
            )
            for i, loss in zip(rows, losses, strict=True):
                found[i] = loss
        return found

    def look(self, questions: Sequence[str]) -> Look | None:
        """A function with which the LM looks at single slots of phi* for some questions; None if the model has no look.

        It returns the log-odds that the LM answers rather than abstains, if it reads one slot alone.
        """
        if self.config.aggregation.reading_cutoff is None or (beginning := self.base_lm.abstention) is None:
            return None
        prompts = [self.base_lm.prompts.prompt(question) for question in questions]

        @torch.no_grad()
        def odds(slots: Tensor, wanted: Tensor) -> Tensor:
            found = torch.zeros(wanted.shape, device=slots.device)
            places = wanted.nonzero().tolist()
            lengths = [slots.shape[2] + len(prompts[question]) for question, _ in places]
            at_once = self.cpu_batch_tokens if self.base_lm.device.type == "cpu" else math.inf
            for bucket in length_buckets(lengths, at_once):
                rows, columns = map(list, zip(*(places[number] for number in bucket), strict=True))
                losses = self.base_lm.token_losses(
                    [prompts[row] for row in rows],
                    [beginning] * len(rows),
                    self.modulation(slots[rows, columns]),
                )
                found[rows, columns] = _answering_odds(losses).to(found)
            return found

        return odds

    def _as_fitted(
        self, prompts: Sequence[str | FittedPrompt], contexts: Sequence[Sequence[str]] | None
    ) -> list[FittedPrompt]:
        """All prompts as token ids, without cutting documents of questions that are texts."""
        encoder = self.base_lm.prompts
        return [
            prompt if isinstance(prompt, FittedPrompt) else encoder.fit_to_window(prompt, texts)
            for prompt, texts in zip(prompts, contexts or [()] * len(prompts), strict=True)
        ]

    def _batches(self, prompts: Sequence[FittedPrompt], phi: Tensor | None) -> list[list[int]]:
        """Batches of prompts, as lists of indices. All prompts of a batch read equally many tokens of phi*.

        On a CPU, the prompts of a batch also have similar lengths.
        """
        memory = [0] * len(prompts) if phi is None else self.memory_in_prompt(phi)
        batches = []
        for tokens in sorted(set(memory)):
            rows = [row for row, own in enumerate(memory) if own == tokens]
            if self.base_lm.device.type == "cpu":
                buckets = length_buckets([tokens + len(prompts[row].ids) for row in rows], self.cpu_batch_tokens)
                batches += [[rows[place] for place in bucket] for bucket in buckets]
            else:
                batches.append(rows)
        return batches

    def memory_in_prompt(self, phi: Tensor) -> list[int]:
        """For each question the number of phi* tokens that the LM runs over; 0 unless the modulation is a prompt.

        Args:
            phi: `[B, S T, D]`.
        """
        if not self.config.tokens_in_prompt:
            return [0] * len(phi)
        if not self.config.aggregation.cutoffs:
            return [phi.shape[1]] * len(phi)
        return [count * self.config.tokens for count in heard_slots(phi, self.config.tokens).tolist()]

    def stream(
        self,
        prompt: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        modulation: Tensor | None = None,
        max_new_tokens: int | None = None,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> Iterator[str]:
        """Yields the answer to one question piece by piece; arguments as for `generate`, with phi* `[1, T, D]`."""
        [fitted] = self._as_fitted([prompt], [contexts])
        yield from self.base_lm.stream(
            fitted.ids,
            self._modulation(modulation),
            max_new_tokens=max_new_tokens or self.config.max_new_tokens,
            weights=self._weights([fitted], memory_weight),
            sampling=sampling,
            sources=self.span_sources([fitted]),
        )

    def _weights(self, prompts: Sequence[FittedPrompt], memory_weight: float | None) -> list[float] | None:
        """Memory weight per question: 1 without documents; None if all are 1."""
        weight = self.config.memory_weight if memory_weight is None else memory_weight
        if not 0 < weight <= 1:
            raise ConfigError(f"memory_weight is {weight}; give a number above 0 and at most 1")
        if weight == 1 or not any(prompt.contexts for prompt in prompts):
            return None
        return [weight if prompt.contexts else 1.0 for prompt in prompts]

    def span_sources(self, prompts: Sequence[FittedPrompt]) -> list[list[SpanSource]] | None:
        """For each answer the sources that it may copy: its documents and the fixed answers; None for free answers."""
        if self.config.extractive is None:
            return None
        tokenizer = self.base_lm.prompts.texts
        return [
            [*(SpanSource.of_text(text, tokenizer) for text in prompt.contexts), *self._fixed_answers]
            if prompt.contexts
            else []
            for prompt in prompts
        ]

    @property
    def _fixed_answers(self) -> list[SpanSource]:
        """The answers that are possible after any document."""
        prompts, extractive = self.base_lm.prompts, self.config.extractive
        texts = () if extractive is None else extractive.fixed_answers
        if prompts.format.abstention is not None:
            texts = (*texts, prompts.format.abstention)
        ids = [list(takewhile(lambda token: token not in prompts.end_tokens, prompts.answer(text))) for text in texts]
        return [SpanSource.whole(answer) for answer in ids]

    @overload
    def _modulation(self, phi: Tensor) -> Modulation: ...

    @overload
    def _modulation(self, phi: None) -> None: ...

    @torch.no_grad()
    def _modulation(self, phi: Tensor | None) -> Modulation | None:
        """The modulation of questions that read equally many tokens of phi*."""
        if phi is None:
            return None
        read = max(self.memory_in_prompt(phi), default=0)
        modulation: Modulation = self.modulation(phi[:, :read] if read else phi)
        return modulation


def fingerprint_fields(config: MACConfig) -> str:
    """JSON of the configuration's part in a model's fingerprint: the settings that write or read memory tokens.

    Recency term, cutoffs of slots and weight of years are left out: they change how a bank is read, not its contents.
    """
    return config.model_dump_json(
        include={"tokens": True, "hashed_bm25": True, "aggregation": True, "modulation": {"attention_sink"}},
        exclude={"hashed_bm25": {"years": {"weight"}}, "aggregation": {"recency", *CUTOFFS}},
    )


@contextmanager
def _switched_off(network: nn.Module, switch: str) -> Iterator[None]:
    before = getattr(network, switch)
    setattr(network, switch, False)
    try:
        yield
    finally:
        setattr(network, switch, before)


def _answering_odds(losses: Sequence[Tensor]) -> Tensor:
    """The log-odds `[B]` that an answer does not begin as an abstention, from the losses of the abstention's tokens."""
    abstains = (-torch.stack([loss.sum() for loss in losses])).exp()
    odds: Tensor = -torch.special.logit(abstains, eps=_LEAST_PROBABILITY)
    return odds


def _check_each(texts: Sequence[str], kind: str) -> None:
    """Checks the characters of documents or messages before a template surrounds them, so that errors can locate them.

    Raises:
        DocumentError: for an invalid character; the message names the text's kind and number, and the index in it.
    """
    for number, text in enumerate(texts, 1):
        fault = fault_of(text)
        if fault is not None:
            raise DocumentError(f"{kind} {number} of {len(texts)} in the prompt: {fault} (it begins {shown(text)})")
