"""AmortizedModel: amortization, aggregation and modulation around a frozen LM."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mac_rag.config import CUTOFFS, MACConfig
from mac_rag.data.dates import LAST, named_in
from mac_rag.errors import BankError, ConfigError
from mac_rag.lm.attention_sink import sink_keys_values
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.devices import DeviceMap, require_weights
from mac_rag.lm.loading import keep_gradients
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.model import checkpoint
from mac_rag.model.base import BATCH_TOKENS, MACModel, ModelConfig, Phi, log_odds_of_answering, switched_off
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

# Parts that both encoders share and training never changes.
_FROZEN = ("amortization.network.sentence_encoder.", "amortization.network.hashed_bm25.")
# Banks do not depend on the recency term: it reads dates and prior keys, which every bank has. So a model that learns
# the term later can still read its banks.
_BESIDE_BANKS = ("aggregation.recency.",)


class AmortizedModel(MACModel, kind=checkpoint.AMORTIZED, config_class=MACConfig):
    """A frozen LM with a memory of amortized contexts.

    Documents become memory tokens (`amortize`), a question and a bank of memory tokens become one modulation phi*
    (`aggregate`), and the LM answers under it (`generate`). Build one with `from_config` or `from_pretrained`.

    Examples:
        >>> model = AmortizedModel.from_pretrained("mac-tiny")
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

    config: MACConfig

    def __init__(
        self, config: MACConfig, base_lm: BaseLM, amortization: TextEncoder, input_encoder: TextEncoder
    ) -> None:
        super().__init__(config, base_lm)
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
    def _build(cls, config: ModelConfig, place: torch.device) -> Self:
        assert isinstance(config, MACConfig)
        config = with_exact_revisions(config)
        base_lm = BaseLM.load(config.base_lm, config.prompt, place, modulation=config.modulation.kind)
        sentence_encoder = pretrained_sentence_encoder(config, base_lm)
        hashed_bm25 = make_hashed_bm25(config, base_lm)
        parts = config.amortization, config.input_encoder
        encoders = [pretrained_encoder(part, config, base_lm, sentence_encoder, hashed_bm25) for part in parts]
        return cls(config, base_lm, *encoders)

    @classmethod
    def _load(cls, folder: Path, place: torch.device, spread: DeviceMap | None) -> Self:
        parts = checkpoint.read(folder, place, spread)
        with parts.limit or nullcontext():
            model = cls(parts.config, parts.base_lm, parts.amortization, parts.input_encoder)
        checkpoint.fill(model.mac_state(), folder / checkpoint.WEIGHTS)
        model.aggregation.quantizer = checkpoint.read_quantizer(folder)
        return model

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

    @property
    def _quantizer(self) -> ProductQuantizer | None:
        """The codebooks for banks with rows `pq`; None if training has changed the weights they were fitted to."""
        quantizer = self.aggregation.quantizer
        return quantizer if quantizer is not None and quantizer.fingerprint == self.fingerprint else None

    def _parts(self) -> checkpoint.Parts:
        return checkpoint.Parts(self.config, self.base_lm, self.amortization, self.input_encoder)

    def train(self, mode: bool = True) -> Self:
        """Sets the training mode of all networks except the sentence encoder and a frozen base LM.

        Raises:
            ConfigError: if weights of the LM are offloaded: no gradient flows through them.
        """
        if mode:
            require_weights(self.base_lm.model, "training")
            keep_gradients(self)
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

    def plan(
        self, text: str, *, whole: bool = False, advance: Callable[[int], object] | None = None
    ) -> list[list[int]]:
        return self.amortization.plan(text, whole=whole, advance=advance)

    def amortize_rows(
        self,
        rows: Sequence[Sequence[int]],
        *,
        batch_tokens: int = BATCH_TOKENS,
        advance: Callable[[int], object] | None = None,
    ) -> Tensor:
        """As `amortize`, for documents that are already token ids (`plan`).

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
    def aggregate(self, questions: Sequence[str], bank: Tensor | BankView) -> Tensor:
        """phi* `[B, T, D]` of each question (equation 1).

        Args:
            questions: B texts.
            bank: memory tokens from `amortize`, or a view of them.

        Raises:
            BankError: for an empty bank.
            DocumentError: for an empty question or one beyond the limit.
        """
        view, encoded = self._view(bank), self._encode(questions)
        asked, look = self.asked(questions), self.look(questions)
        phi: Tensor = self.aggregation(encoded, view, asked=asked, look=look)[0]
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

    def split_question(self, question: str) -> list[str]:
        return self.input_encoder.split(question)

    def _question_ids(self, question: str, *, last_part: bool = False) -> list[int]:
        return self.input_encoder.plan(question)[-1] if last_part else self.input_encoder.ids(question)

    def _view(self, bank: Tensor | BankView) -> BankView:
        return self.project(bank) if isinstance(bank, Tensor) else bank

    def without_document_prior(self) -> AbstractContextManager[None]:
        """A context in which attention ignores the document prior, to measure the prior's effect."""
        return switched_off(self.aggregation, "use_prior")

    def without_recency(self) -> AbstractContextManager[None]:
        """A context in which the document prior ignores dates, to measure the recency term's effect."""
        return switched_off(self.aggregation, "use_recency")

    @property
    def knows_times(self) -> bool:
        """True if the document prior reads dates of documents, or years of questions; see `without_times`."""
        return self.aggregation.recency is not None or self.input_encoder.network.years is not None

    @contextmanager
    def without_times(self) -> Iterator[None]:
        """A context without the recency term in which a question's years are words like any other."""
        years = self.input_encoder.network.years
        with self.without_recency(), nullcontext() if years is None else switched_off(years, "use_years"):
            yield

    @property
    def context_window(self) -> int:
        """Largest number of tokens of documents, question and answer together."""
        return self.config.context_window or self._positions

    @property
    def _positions(self) -> int:
        """Positions of the LM that the prefix of memory tokens does not take."""
        return self.base_lm.context_window - self.modulation.prefix_length

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
                found[rows, columns] = log_odds_of_answering(losses).to(found)
            return found

        return odds

    def memory_in_prompt(self, phi: Phi) -> list[int]:
        """For each question the number of phi* tokens that the LM runs over; 0 unless the modulation is a prompt.

        Args:
            phi: `[B, S T, D]`.
        """
        assert isinstance(phi, Tensor)
        if not self.config.tokens_in_prompt:
            return [0] * len(phi)
        if not self.config.aggregation.cutoffs:
            return [phi.shape[1]] * len(phi)
        return [count * self.config.tokens for count in heard_slots(phi, self.config.tokens).tolist()]

    @property
    def _extractive(self) -> tuple[str, ...] | None:
        return self.config.extractive

    @torch.no_grad()
    def _modulation(self, phi: Phi) -> Modulation:
        assert isinstance(phi, Tensor)
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
