"""MACModel: amortization, aggregation and modulation around a frozen LM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mac_rag.config import MACConfig
from mac_rag.errors import BankError, ConfigError, DocumentError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.devices import default_device
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import checkpoint
from mac_rag.model.factory import make_words, pretrained_encoder, pretrained_index
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.bank_view import BankProjection, BankView
from mac_rag.nn.modulation import FiLM, LoRA, Modulation, ModulationNetwork, PrefixTuning
from mac_rag.progress import progress_bar

# Frozen parts of MAC's own; also the input encoder's, which are the same.
_FROZEN = ("amortization.network.index.", "amortization.network.words.")
_CPU_TOKENS = 1024  # of prompts read together on a CPU, where more leave its caches and are slower


class MACModel(nn.Module):
    """A frozen LM with a memory of amortized contexts.

    Documents become memory tokens (`amortize`), a question and a bank of memory tokens become one modulation phi*
    (`aggregate`), and the LM answers under it (`generate`). Build one with `from_config` or `from_pretrained`.

    Args:
        config: of all networks.
        base_lm: theta_base.
        amortization: g_amort.
        input_encoder: g_input.
    """

    def __init__(
        self, config: MACConfig, base_lm: BaseLM, amortization: TextEncoder, input_encoder: TextEncoder
    ) -> None:
        super().__init__()
        self.config = config
        self.base_lm = base_lm
        self.amortization = amortization
        self.input_encoder = input_encoder
        sizes = config.aggregation
        self.aggregation = AggregationNetwork(
            base_lm.width,
            blocks=sizes.blocks,
            heads=sizes.heads,
            head_width=sizes.head_width,
            feed_forward=sizes.feed_forward,
            prior_width=sizes.prior_width,
            prior_sharpness=sizes.prior_sharpness,
            index=config.index is not None,
            words=config.words,
            words_weight=1.0 if config.index is None else config.index.words_weight,
        )
        self.modulation = _modulation_network(config, base_lm)
        self.base_lm_trained = False
        self._fingerprint: tuple[int, str] | None = None
        if self.context_window > self._positions:
            raise ConfigError(
                f"context_window is {self.context_window}, but the LM has positions for {self._positions} tokens "
                "beside a prefix; leave it out for all of them"
            )
        self.to(base_lm.device)

    @classmethod
    def from_config(cls, config: MACConfig, *, device: str | torch.device | None = None) -> MACModel:
        """Builds a model from pretrained parts; what the paper learns from scratch starts at random.

        Raises:
            ModelLoadError: when a part cannot be loaded, or its architecture does not fit its design.
            QuantizationError: when bitsandbytes is missing.
        """
        place = default_device(device)
        base_lm = BaseLM.load(config.base_lm, config.prompt, place)
        index = None if config.index is None else pretrained_index(config.index, base_lm)
        parts = config.amortization, config.input_encoder
        words = make_words(config, base_lm)
        encoders = [pretrained_encoder(part, config, base_lm, index, words) for part in parts]
        return cls(config, base_lm, *encoders).eval()

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, revision: str | None = None, device: str | torch.device | None = None
    ) -> MACModel:
        """Loads a checkpoint: one in the package (`mac-small`, `mac-tiny`), a folder, or a repository on the Hub.

        Raises:
            ModelLoadError: when there is none of that name, or its files are truncated, of another format or of
                another architecture; names the weights that differ.
        """
        folder = checkpoint.find(name_or_path, revision)
        parts = checkpoint.read(folder, default_device(device))
        model = cls(parts.config, parts.base_lm, parts.amortization, parts.input_encoder)
        checkpoint.fill(model.mac_state(), folder / checkpoint.WEIGHTS)
        return model.eval()

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes a checkpoint: `config.json`, safetensors, tokenizers, and the base LM where it has no other home.

        Args:
            folder: new or empty.
            dtype: of the stored weights, which may be `torch.int8` (see
                `mac_rag.lm.int8_storage`); None keeps each as it is.
        """
        checkpoint.write(self._parts(), self.mac_state(), Path(folder), dtype, lm_was_trained=self.base_lm_trained)

    def push_to_hub(self, repository: str, *, private: bool = True, token: str | None = None) -> str:
        """Uploads a checkpoint to a model repository on the Hub and returns its address."""
        return checkpoint.upload(
            self._parts(),
            self.mac_state(),
            repository,
            private=private,
            token=token,
            lm_was_trained=self.base_lm_trained,
        )

    def _parts(self) -> checkpoint.Parts:
        return checkpoint.Parts(self.config, self.base_lm, self.amortization, self.input_encoder)

    @property
    def device(self) -> torch.device:
        return self.base_lm.device

    @property
    def context_window(self) -> int:
        """Tokens that documents, question and answer may have together."""
        return self.config.context_window or self._positions

    @property
    def _positions(self) -> int:
        """Those of the LM that a prefix leaves."""
        prefix = self.config.tokens * self.config.modulation.slots if self.config.modulation.kind == "prefix" else 0
        return self.base_lm.context_window - prefix

    def train(self, mode: bool = True) -> MACModel:
        """Sets the training mode of all networks but the index and a frozen base LM, which never drop anything out."""
        super().train(mode)
        if not self.base_lm_trained:
            self.base_lm.eval()
        if self.amortization.network.index is not None:
            self.amortization.network.index.eval()
        self._fingerprint = None  # fused optimisers change weights without a trace on the tensors
        return self

    def train_base_lm(self, *, lora_rank: int | None) -> None:
        """Makes the base LM trainable: all its weights, or low-rank updates, which a checkpoint holds merged.

        Embeddings that other parts share stay as they are: an index is never trained.

        Raises:
            ConfigError: for a quantised LM; see `mac_rag.lm.lora_tuning.make_trainable`.
        """
        make_trainable(self.base_lm.model, lora_rank)
        if self._shared_embeddings():
            self.base_lm.model.get_input_embeddings().requires_grad_(False)
        self.base_lm_trained = True

    def mac_state(self) -> dict[str, Tensor]:
        """Every weight of MAC's own networks; neither those of the base LM nor of quantised backbones.

        Training changes all of them but the index and the words that go with it.
        """
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if name.startswith(_FROZEN) or (parameter.requires_grad and not name.startswith("base_lm."))
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of all weights that write or read memory tokens: equal for models that can share a bank."""
        state = self.mac_state() | self._shared_embeddings()
        # In-place updates advance a tensor's version, so this notices training between two calls.
        version = sum(tensor._version for tensor in state.values())
        if self._fingerprint is None or self._fingerprint[0] != version:
            parts = {"tokens", "aggregation"} | ({"index"} if self.config.words else set())
            digest = hashlib.sha256(self.config.model_dump_json(include=parts).encode())
            for name, tensor in sorted(state.items()):
                digest.update(name.encode())
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
            self._fingerprint = (version, digest.hexdigest())
        return self._fingerprint[1]

    def _shared_embeddings(self) -> dict[str, Tensor]:
        """The base LM's embeddings, if an encoder reads with them."""
        parts = self.config.amortization, self.config.input_encoder, self.config.index
        if all(part is None or part.embeddings == "own" for part in parts):
            return {}
        return {"embeddings": self.base_lm.model.get_input_embeddings().weight}

    def amortize(self, documents: Sequence[str], *, batch_tokens: int = 8192, progress: bool = False) -> Tensor:
        """Encodes documents to memory tokens, each once and without gradients.

        Args:
            documents: K texts.
            batch_tokens: tokens of one batch, padding included; documents of similar length go together.
            progress: shows a progress bar.

        Returns:
            `[K, T, D]` in float32, on the model's device; `[K, T + R, D]` with the words of an index.

        Raises:
            DocumentError: for an empty document, one that is no text, or one beyond the limit of tokens.
        """
        rows = [self.amortization.ids(document) for document in documents]
        return self.amortize_rows(rows, batch_tokens=batch_tokens, progress=progress)

    def amortize_rows(
        self, rows: Sequence[Sequence[int]], *, batch_tokens: int = 8192, progress: bool = False
    ) -> Tensor:
        """As `amortize`, of texts that are token ids already (`TextEncoder.plan`)."""
        with progress_bar("adapt", len(rows), disable=not progress) as bar:
            return self.amortization.encode(rows, batch_tokens, bar.advance)

    @torch.no_grad()
    def project(self, phi: Tensor) -> BankProjection:
        """Projects memory tokens as `amortize` gives them to keys and values of all blocks, once for all questions.

        Raises:
            BankError: for an empty bank.
        """
        if not len(phi):
            raise BankError("the memory bank is empty; adapt to some documents first")
        return self.aggregation.project(phi.to(self.device))

    @torch.no_grad()
    def aggregate(self, questions: Sequence[str], bank: Tensor | BankView, *, mask: Tensor | None = None) -> Tensor:
        """phi* `[B, T, D]` of each question (equation 1).

        Args:
            questions: B texts.
            bank: memory tokens as `amortize` gives them, or a view of them.
            mask: `[B, K]`, True where a question may see a document.

        Raises:
            BankError: for an empty bank.
            DocumentError: for an empty question or one beyond the limit.
        """
        encoded, view = self._asked(questions, bank)
        phi: Tensor = self.aggregation(encoded, view, mask=mask)[0]
        return phi

    @torch.no_grad()
    def attention(self, questions: Sequence[str], bank: Tensor | BankView) -> Tensor:
        """The last block's attention mass on each row, `[B, K]`, averaged over heads and tokens; rows sum to 1."""
        encoded, view = self._asked(questions, bank)
        mass: Tensor = self.aggregation(encoded, view, mass=True)[1]
        return mass

    def _asked(self, questions: Sequence[str], bank: Tensor | BankView) -> tuple[Tensor, BankView]:
        """The questions' tokens `[B, T, D]`, and the bank as the aggregation network needs it."""
        view = self.project(bank) if isinstance(bank, Tensor) else bank
        return self.input_encoder([self.input_encoder.ids(question) for question in questions]), view

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
            question: x; a prompt that is fitted already is returned as it is.
            contexts: documents in front of it, the best first.
            overflow: where they do not fit: refuse, or leave out the last documents; the question is never shortened.
            max_new_tokens: longest answer, which has to fit too; None for the configured length.

        Raises:
            DocumentError: for an empty question, or a prompt beyond the window.
        """
        if isinstance(question, FittedPrompt):
            return question
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        question_ids = self.input_encoder.ids(question)  # an empty or endless question is an error without memory, too
        fitted = self.base_lm.prompts.fit_to_window(question, contexts, room)
        if len(fitted.ids) > room or (fitted.truncated and overflow == "error"):
            used = len(self.base_lm.prompts.prompt(question, contexts))
            raise DocumentError(
                f"{len(contexts)} documents and the question take {used} tokens, but the LM's window leaves room for "
                f"{room}; give fewer or shorter documents (a smaller k or chunk size)"
            )
        return replace(fitted, question_ids=tuple(question_ids))

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
    ) -> list[str]:
        """Answers questions: `LM(d + x; phi*)`.

        Args:
            prompts: B questions as texts, or as `fit_to_window` gives them.
            contexts: documents in front of each question, in this order; only for questions that are texts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.
            max_new_tokens: None for the configured length.
            num_beams: 1 is greedy.
            memory_weight: lambda behind documents, see `mac_rag.lm.max_rule`; None for the configured one.

        Raises:
            ConfigError: for a memory_weight that is not above 0 and at most 1.
        """
        fitted = self._fitted(prompts, contexts)
        weights = self._weights(fitted, memory_weight)
        answers = [""] * len(fitted)
        for rows in self._read_together(fitted):
            texts = self.base_lm.generate(
                [fitted[i].ids for i in rows],
                self._modulation(None if modulation is None else modulation[rows]),
                max_new_tokens=max_new_tokens or self.config.max_new_tokens,
                num_beams=num_beams,
                weights=None if weights is None else [weights[i] for i in rows],
            )
            for i, text in zip(rows, texts, strict=True):
                answers[i] = text
        return answers

    @torch.no_grad()
    def generate_each(
        self, prompts: Sequence[FittedPrompt], modulation: Tensor, weights: Sequence[float]
    ) -> list[list[str]]:
        """Greedy answers behind documents at each of several values of lambda; prompts are read once for all of them.

        Args:
            prompts: B questions behind at least one document each.
            modulation: phi* `[B, T, D]`.
            weights: values of lambda (see `mac_rag.lm.max_rule`), from 0, the frozen LM alone, to 1.

        Returns:
            For each value B answers.
        """
        answers = [[""] * len(prompts) for _ in weights]
        for rows in self._read_together(prompts):
            each = self.base_lm.generate_each(
                [prompts[i].ids for i in rows],
                self.modulation(modulation[rows]),
                max_new_tokens=self.config.max_new_tokens,
                weights=weights,
            )
            for given, texts in zip(answers, each, strict=True):
                for i, text in zip(rows, texts, strict=True):
                    given[i] = text
        return answers

    def _fitted(
        self, prompts: Sequence[str | FittedPrompt], contexts: Sequence[Sequence[str]] | None
    ) -> list[FittedPrompt]:
        """All prompts as token ids; questions that are texts are not shortened."""
        encoder = self.base_lm.prompts
        return [
            prompt if isinstance(prompt, FittedPrompt) else encoder.fit_to_window(prompt, texts)
            for prompt, texts in zip(prompts, contexts or [()] * len(prompts), strict=True)
        ]

    def _read_together(self, prompts: Sequence[FittedPrompt]) -> list[list[int]]:
        """Groups of prompts, by their places: all on a GPU, a few of similar lengths on a CPU."""
        if self.device.type != "cpu":
            return [list(range(len(prompts)))]
        return length_buckets([len(prompt.ids) for prompt in prompts], _CPU_TOKENS)

    def stream(
        self,
        prompt: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        modulation: Tensor | None = None,
        max_new_tokens: int | None = None,
        memory_weight: float | None = None,
    ) -> Iterator[str]:
        """Yields the greedy answer to one question piece by piece; arguments as `generate`'s, phi* `[1, T, D]`."""
        [fitted] = self._fitted([prompt], [contexts])
        yield from self.base_lm.stream(
            fitted.ids,
            self._modulation(modulation),
            max_new_tokens=max_new_tokens or self.config.max_new_tokens,
            weights=self._weights([fitted], memory_weight),
        )

    def _weights(self, prompts: Sequence[FittedPrompt], memory_weight: float | None) -> list[float] | None:
        """Memory weight per question: 1 without documents; None if all are 1."""
        weight = self.config.memory_weight if memory_weight is None else memory_weight
        if not 0 < weight <= 1:
            raise ConfigError(f"memory_weight is {weight}; give a number above 0 and at most 1")
        if weight == 1 or not any(prompt.contexts for prompt in prompts):
            return None
        return [weight if prompt.contexts else 1.0 for prompt in prompts]

    @torch.no_grad()
    def _modulation(self, phi: Tensor | None) -> Modulation | None:
        return None if phi is None else self.modulation(phi)

    @contextmanager
    def without_document_prior(self) -> Iterator[None]:
        """Attention without the document prior while the context lasts, to measure what it contributes."""
        used, self.aggregation.use_prior = self.aggregation.use_prior, False
        try:
            yield
        finally:
            self.aggregation.use_prior = used


def _modulation_network(config: MACConfig, base_lm: BaseLM) -> ModulationNetwork:
    wanted, shape = config.modulation, base_lm.shape(config.modulation)
    if wanted.kind == "lora":
        return LoRA(shape, config.tokens, base_lm.width, bottleneck=wanted.bottleneck)
    if wanted.kind == "film":
        return FiLM(shape, base_lm.width, bottleneck=wanted.bottleneck)
    return PrefixTuning(shape, config.tokens, base_lm.width, slots=wanted.slots, bottleneck=wanted.bottleneck)
