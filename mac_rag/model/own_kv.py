"""A memory for any causal LM: the keys and values that the LM itself computes for each document.

Amortization is the LM's own pass over a document that stands alone after a fixed opening. A codec
(`mac_rag.nn.codec`) turns each token's keys and values into a few bytes, or they are kept as they are. Aggregation is
the LM's own attention over all documents that can matter, with the prior of each document as a bias. Modulation is a
prefix of keys and values in every layer, as in P-tuning v2 (`mac_rag.nn.block_prefix`).

Without training and codec, one document in memory gives the same answer as its text in the prompt.

config.json          the configuration; the LM is named there, with its revision and digest
codec.safetensors    the codec, if there is one
adapter/             low-rank updates of the LM, if it was tuned (the task `tune_reading` of `pipelines.train`)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mac_rag.config import BaseLMConfig, OwnKVConfig, PromptFormat
from mac_rag.data.characters import check_text
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError, DamageError, DocumentError, MACError, ModelLoadError, PromptError
from mac_rag.lm.adapter import Adapter
from mac_rag.lm.architectures import check_modulation
from mac_rag.lm.attention_sink import key_rotation, positions_alike
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.block_attention import has_plain_attention, packed_keys_values
from mac_rag.lm.block_prompt import BlockPrompt
from mac_rag.lm.chat import ChatPromptEncoder, Message, with_shorter
from mac_rag.lm.devices import DeviceMap, default_device
from mac_rag.lm.loading import load_causal_lm
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import checkpoint
from mac_rag.model.base import MACModel, ModelConfig, check_each, switched_off
from mac_rag.model.factory import with_exact_revision
from mac_rag.model.text_encoder import split
from mac_rag.nn.block_prefix import BlockPrefix
from mac_rag.nn.codec import KVCodec
from mac_rag.nn.modulation import KeyRotation, has_limited_layers
from mac_rag.nn.rows_prefix import RowsPrefix, is_supported
from mac_rag.progress import progress_bar
from mac_rag.retrieval.dense import Encoder
from mac_rag.retrieval.registry import make_encoder
from mac_rag.untrusted_files import read_json

if TYPE_CHECKING:
    from mac_rag.nn.row_kernels import CodeTables

_log = logging.getLogger(__name__)

CODEC, ADAPTER, READING = "codec.safetensors", "adapter", "reading.json"
_LARGEST_CONFIG = 1 << 20
_FEW_TOKENS = 20_000  # a codec that is fitted on fewer may not know what other texts look like
_MOST_TOKENS = 24_000
_BATCH_TOKENS = 2048  # tokens of documents that the LM reads at a time
_SPARE = 8  # tokens that a row may have beyond the limit, because text is tokenized again with a space before it
_LEAST_BIAS = -12.0  # below it, a document's share of attention is less than rounding shows
_MEASURED = 64  # documents with which the codec learns what errors cost
_CONTINUED = 64  # most tokens of a continuation that is measured
_GATE = "The harbour of Orsena was opened in 1926 by Luca Ferri. It has nine quays and a lighthouse of red brick."


class ReadRow(NamedTuple):
    """A row of a bank as the LM attends to it.

    Attributes:
        keys_values: `[layers, 2, kv_heads, n, head_width]`, as `OwnKVModel.decode` gives them.
        bias: added to the attention logits of all its tokens.
    """

    keys_values: Tensor
    bias: float


class ReadRows:
    """phi* of B questions: the rows that each of them sees.

    Args:
        rows: for each question its rows.
    """

    def __init__(self, rows: Sequence[Sequence[ReadRow]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: list[int]) -> ReadRows:
        return ReadRows([self.rows[place] for place in index])


@dataclass(frozen=True)
class Kept:
    """What a memory keeps of documents that its codec was not fitted on.

    Attributes:
        nothing, text, memory: nats a token of how documents go on, after nothing, after the text of their first half,
            and after its row in memory.
        documents: number of documents.
        bytes_per_token: bytes of a token in a bank.
        of: bytes of a token's keys and values as they are.
    """

    nothing: float
    text: float
    memory: float
    documents: int
    bytes_per_token: int
    of: int

    def __str__(self) -> str:
        return (
            f"how {self.documents} other documents go on, in nats a token: {self.nothing:.3f} after nothing, "
            f"{self.text:.3f} after their text, {self.memory:.3f} after the memory of it; "
            f"{self.bytes_per_token:,} bytes a token of {self.of:,}"
        )


class OwnKVModel(MACModel, kind="own-kv", config_class=OwnKVConfig):
    """An LM whose memory is its own keys and values; `MACModel.around` makes one.

    Args:
        config: the configuration.
        base_lm: the LM, with its adapter if there is one.
        codec: codes keys and values; None keeps them as they are.
        adapter: the LM's adapter, which `save_pretrained` writes; None without one.

    Raises:
        ConfigError: for an impossible number of bytes a token.
        ModelLoadError: for an LM that rotates its keys in an unknown way, if there is a codec.
    """

    config: OwnKVConfig

    def __init__(
        self, config: OwnKVConfig, base_lm: BaseLM, codec: KVCodec | None, adapter: Adapter | None = None
    ) -> None:
        super().__init__(config, base_lm)
        # Around each pass that reads documents: the LM that does so also answers, and its attention cannot do both at
        # once. An engine gives its queue's.
        self.turn: Callable[[], AbstractContextManager[object]] = nullcontext
        self.use_years = True
        self.codec = codec
        self._adapter = adapter
        self.blocks = BlockPrompt(base_lm.tokenizer, config.turn, config.prompt.system)
        base_lm.end_tokens = sorted({*base_lm.end_tokens, *self.blocks.end_tokens})
        start, longest = len(self.blocks.opening), config.max_document_tokens + _SPARE
        self._reserved = start + longest
        if self.context_window > self._positions or self._positions < 1:
            raise ConfigError(
                f"context_window is {self.context_window}, but {self._reserved} of the LM's "
                f"{base_lm.context_window} positions are for documents; lower max_document_tokens, which is "
                f"{config.max_document_tokens}"
            )
        self._rotation: KeyRotation | None = None
        if codec is not None:
            try:
                window = self._reserved + self.context_window
                self._rotation = key_rotation(base_lm.model, range(start, start + longest), window)
            except ModelLoadError as error:
                reason = str(error).partition(";")[0]
                raise ModelLoadError(f"{reason}; keep keys and values as they are: compression none") from None

    @classmethod
    def _build(cls, config: ModelConfig, place: torch.device) -> OwnKVModel:
        raise ConfigError(
            f"a memory around {config.base_lm.name!r} on {place} is made by MACModel.around, not by from_config"
        )

    @classmethod
    def _around(
        cls,
        lm: str | Path | BaseLMConfig | tuple[Any, Any],
        documents: Iterable[Document | str] | None,
        *,
        compression: int | None,
        adapter: str | Path | None,
        sentence_encoder: str | None,
        device: str | torch.device | None,
        progress: bool,
    ) -> OwnKVModel:
        place = default_device(device)
        if sentence_encoder is not None:
            make_encoder(sentence_encoder)  # raises before the LM is loaded
        named, model, tokenizer = _loaded(lm, place)
        check_modulation(model.config, "own-kv")
        folder = None if adapter is None else Path(adapter)
        texts = [document if isinstance(document, str) else document.text for document in documents or ()]
        if compression is not None and not texts:
            raise ConfigError(f"compression is {compression}, but a codec is fitted on documents; give some, or None")
        config = OwnKVConfig(
            base_lm=named,
            lm_digest=lm_digest(model, tokenizer),
            sentence_encoder=sentence_encoder,
            prompt=PromptFormat(chat=bool(tokenizer.chat_template)),
        )
        updates = None
        if folder is not None:
            config = config.model_copy(update=_reading(folder, config.prompt) | {"adapter": True})
            updates = Adapter.add(folder, model)
        base_lm = BaseLM(model.requires_grad_(False).eval(), tokenizer, config.prompt)
        # Longer texts of some LMs have other keys at the same positions, so rows could not be kept.
        window = positions_alike(model, len(BlockPrompt(tokenizer, config.turn, config.prompt.system).opening))
        if 2 * config.max_document_tokens > window:
            config = config.model_copy(update={"max_document_tokens": window // 4, "memory_tokens": window})
        made = cls(config, base_lm, None, updates).eval()
        if window < base_lm.context_window:
            config = config.model_copy(update={"context_window": window - made._reserved})
            made = cls(config, base_lm, None, updates).eval()
        made.check_equal()
        return made if compression is None else made.compressed(texts, compression, progress=progress)

    def compressed(self, texts: Sequence[str], compression: int, *, progress: bool = False) -> OwnKVModel:
        """The same model with a codec that takes a `compression`-th of the bytes, fitted on texts.

        Raises:
            ConfigError: for a compression that leaves no byte, or texts without two tokens.
            ModelLoadError: as the class.
        """
        if compression < 1:
            raise ConfigError(f"compression is {compression}; give a number of at least 1, or None for no codec")
        bytes_per_token = self.raw_bytes // compression
        layers, _, kv_heads, _, width = self.opening.shape
        codec = KVCodec(layers=layers, kv_heads=kv_heads, head_width=width).to(self.device)
        codec.check_rate(bytes_per_token)
        config = self.config.model_copy(update={"bytes_per_token": bytes_per_token})
        made = OwnKVModel(config, self.base_lm, codec, self._adapter).eval()
        rows = [row for text in texts for row in self.plan(text)]
        step = max(1.0, sum(map(len, rows)) / _MOST_TOKENS)
        chosen = [rows[int(place * step)] for place in range(int(len(rows) / step))]
        if (count := sum(map(len, chosen))) < _FEW_TOKENS:
            _log.warning(
                "the codec is fitted on %s tokens; with fewer than %s it may lose much of other texts: give more "
                "documents, or keep keys and values as they are (compression none)",
                f"{count:,}",
                f"{_FEW_TOKENS:,}",
            )
        sensitivity = self._sensitivity(chosen, progress)
        with progress_bar("read", len(chosen), disable=not progress) as bar:
            codec.fit([made._unrotated(part) for part in self._read(chosen, bar.advance)], sensitivity)
        codec.compact(bytes_per_token)
        return made

    def _sensitivity(self, rows: Sequence[Sequence[int]], progress: bool) -> Tensor:
        """What a squared error in the memory of documents costs, `[layers, 2, kv_heads]`; see `KVCodec.fit`.

        The loss is that of how documents go on after the memory of their first halves.
        """
        layers, _, kv_heads, _, _ = self.opening.shape
        squares = torch.zeros(layers, 2, kv_heads, dtype=torch.float64)
        long = [ids for ids in rows if len(ids) > 3]
        measured = long[:: max(1, len(long) // _MEASURED)][:_MEASURED]
        with progress_bar("weigh", len(measured), disable=not progress) as bar:
            for before, (first, *rest) in map(_halves, measured):
                [row] = self._read([before])
                row = row.detach().requires_grad_()
                phi = BlockPrefix(self.opening, [[row]], [[0.0]])
                [losses] = self.base_lm.token_losses([[first]], [rest], phi)
                [gradient] = torch.autograd.grad(losses.sum(), row)
                squares += gradient.double().square().sum((3, 4)).cpu()
                bar.advance()
        return squares if measured else torch.ones_like(squares)

    @cached_property
    def sentences(self) -> Encoder | None:
        """The sentence encoder of the document prior; None without one."""
        return None if self.config.sentence_encoder is None else make_encoder(self.config.sentence_encoder)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a bank."""
        return self.config.bytes_per_token or self.opening[:, :, :, 0].nbytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of a token's keys and values as they are, of a 16-bit LM: compression is counted from them."""
        return 2 * self.opening.numel() // self.opening.shape[3]

    @cached_property
    def opening(self) -> Tensor:
        """Keys and values of the tokens before every document, `[layers, 2, kv_heads, P, head_width]`."""
        return self.base_lm.keys_values(self.blocks.opening)

    @classmethod
    def _load(cls, folder: Path, place: torch.device, spread: DeviceMap | None) -> OwnKVModel:
        config = OwnKVConfig.parse(checkpoint.read_values(folder)[1], folder / checkpoint.CONFIG)
        model, tokenizer = load_causal_lm(config.base_lm, place, folder, "own-kv", spread)
        digest = lm_digest(model, tokenizer)
        if digest != config.lm_digest:
            raise ModelLoadError(
                f"{folder} was made around other weights of {config.base_lm.name!r} (digest {config.lm_digest[:12]}, "
                f"not {digest[:12]}); load that revision of the LM, or make the memory again with mac-rag init"
            )
        adapter = Adapter.add(folder / ADAPTER, model) if config.adapter else None
        base_lm = BaseLM(model.requires_grad_(False).eval(), tokenizer, config.prompt)
        made = cls(config, base_lm, None, adapter)
        if config.bytes_per_token is None:
            return made
        layers, _, kv_heads, _, width = made.opening.shape
        codec = KVCodec(layers=layers, kv_heads=kv_heads, head_width=width)
        codec.check_rate(config.bytes_per_token)
        try:
            codec.load_compact(load_file(folder / CODEC), config.bytes_per_token)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{folder / CODEC} cannot be read: {error}; make it again with mac-rag init") from None
        return cls(config, base_lm, codec.to(place), adapter)

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes a folder that `from_pretrained` reads: configuration, codec and adapter, but not the LM.

        Args:
            folder: a new or empty folder.
            dtype: not for this kind.

        Raises:
            ConfigError: for a dtype, and for an LM that has no name or folder to load it from.
        """
        if dtype is not None:
            raise ConfigError(f"dtype is {dtype}, but the folder holds no weights of the LM; leave it out")
        if not self.config.base_lm.name:
            raise ConfigError(
                "the LM was given as an object without a name, so it could not be loaded again; save it to a folder, "
                "and make the memory around that folder"
            )
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise ConfigError(f"{place} is not empty; give a new folder")
        if self.codec is not None:
            assert self.config.bytes_per_token is not None
            save_file(self.codec.compact(self.config.bytes_per_token), place / CODEC)
        if self._adapter is not None:
            self._adapter.write(place / ADAPTER)
        text = json.dumps(
            {"format": checkpoint.FORMAT, "kind": self.kind, **self.config.model_dump(mode="json")}, indent=2
        )
        (place / checkpoint.CONFIG).write_text(text + "\n")
        if self.calibration is not None and self.calibration.fingerprint == self.fingerprint:
            self.calibration.write(place)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that writes or reads rows: LM, updates, opening, codec, sentence encoder."""
        digest = hashlib.sha256(self.config.lm_digest.encode())
        told = {
            "opening": self.blocks.opening,
            "bytes": self.config.bytes_per_token,
            "dtype": str(self.base_lm.dtype),
            "sentences": None if self.sentences is None else self.sentences.fingerprint,
        }
        digest.update(json.dumps(told).encode())
        if self._adapter is not None:
            digest.update(self._adapter.digest.encode())
        for name, tensor in sorted(self.codec.state_dict().items() if self.codec is not None else ()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def answer_digest(self) -> str:
        return hashlib.sha256(
            (self.fingerprint + self.config.model_dump_json(exclude={"languages"})).encode()
        ).hexdigest()

    @property
    def knows_times(self) -> bool:
        return True

    def without_times(self) -> AbstractContextManager[None]:
        return switched_off(self, "use_years")

    # Documents to rows

    def plan(
        self, text: str, *, whole: bool = False, advance: Callable[[int], object] | None = None
    ) -> list[list[int]]:
        chunks = self.chunks(text)
        if whole and len(chunks) > 1:
            raise DocumentError(
                f"a text of {len(text):,} characters is longer than the limit of {self.config.max_document_tokens} "
                "tokens; split it first"
            )
        if advance is not None:
            advance(len(text))
        return [self.blocks.document(chunk) for chunk in chunks]

    def chunks(self, text: str) -> list[str]:
        """The texts of a document's rows: the document, or parts of it that end after sentences.

        Raises:
            DocumentError: for anything but a text with at least one visible character.
        """
        check_text(text)
        return [chunk.text for chunk in split(text.strip(), self.blocks.texts, self.config.max_document_tokens)]

    @torch.no_grad()
    def amortize_rows(
        self,
        rows: Sequence[Sequence[int]],
        *,
        batch_tokens: int = _BATCH_TOKENS,
        advance: Callable[[int], object] | None = None,
    ) -> list[Tensor]:
        """Codes of documents, uint8 `[n, bytes]` each; see `plan`."""
        return [self.encode(part) for part in self._read(rows, advance, batch_tokens)]

    def _read(
        self, rows: Sequence[Sequence[int]], advance: Any = None, batch_tokens: int = _BATCH_TOKENS
    ) -> list[Tensor]:
        """Keys and values of documents after the opening, `[layers, 2, kv_heads, n, head_width]` each."""
        found: dict[int, Tensor] = {}
        for bucket in length_buckets([len(row) for row in rows], batch_tokens):
            texts: list[Sequence[int]] = [rows[i] for i in bucket]
            with self.turn():
                if self._packs:
                    parts = packed_keys_values(self.base_lm.model, self.blocks.opening, texts)
                else:
                    nothing: list[list[Any]] = [[] for _ in bucket]
                    parts = self.base_lm.keys_values_of(texts, BlockPrefix(self.opening, nothing, nothing))
            found |= zip(bucket, parts)
            if advance is not None:
                advance(len(bucket))
        return [found[place] for place in range(len(rows))]

    @cached_property
    def _packs(self) -> bool:
        """True if documents are read in one sequence without padding; on a CPU, many small products cost little."""
        lm = self.base_lm.model
        return self.device.type == "cpu" and has_plain_attention(lm) and not has_limited_layers(lm.config)

    def _unrotated(self, keys_values: Tensor) -> Tensor:
        assert self._rotation is not None
        numbers = keys_values.to(torch.float32, copy=True)
        numbers[:, 0] = self._rotation.inverse(numbers[:, 0])
        return numbers

    def encode(self, keys_values: Tensor) -> Tensor:
        """A row of a bank from keys and values at a document's positions: uint8 `[n, bytes]`, on the CPU.

        Args:
            keys_values: `[layers, 2, kv_heads, n, head_width]`.
        """
        if self.codec is None:
            return keys_values.movedim(3, 0).flatten(1).contiguous().view(torch.uint8).cpu()
        assert self.config.bytes_per_token is not None
        return self.codec.encode(self._unrotated(keys_values), self.config.bytes_per_token, self.base_lm.dtype).cpu()

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Inverts `encode`, up to what the codec loses; in the LM's dtype, on its device."""
        codes = codes.to(self.device)
        if self.codec is None:
            layers, _, kv_heads, _, width = self.opening.shape
            numbers: Tensor = codes.view(self.base_lm.dtype).unflatten(1, (layers, 2, kv_heads, width))
            if not numbers.isfinite().all():
                raise DamageError("a number of a document's keys and values is not finite; adapt to the document again")
            return numbers.movedim(0, 3)
        assert self._rotation is not None
        decoded = self.codec.decode(codes, self.base_lm.dtype)
        decoded[:, 0] = self._rotation(decoded[:, 0].float())
        return decoded

    def decode_all(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """`decode` of many rows; on a GPU in one pass."""
        if self._code_tables is None:
            return [self.decode(codes) for codes in rows]
        from mac_rag.nn.row_kernels import decoded

        return decoded([codes.to(self.device) for codes in rows], self._code_tables)

    @cached_property
    def _by_kernels(self) -> bool:
        """True if Triton's kernels decode rows and attend to them."""
        lm = self.base_lm.model
        return has_plain_attention(lm) and is_supported(lm)

    @cached_property
    def _code_tables(self) -> CodeTables | None:
        """What the kernel needs to decode codes; None without codec or kernels."""
        if self.codec is None or not self._by_kernels:
            return None
        from mac_rag.nn.row_kernels import CodeTables

        assert self._rotation is not None
        assert self.config.bytes_per_token is not None
        return CodeTables.of(self.codec, self.config.bytes_per_token, self._rotation, self.base_lm.dtype)

    # Answering

    @property
    def context_window(self) -> int:
        return self.config.context_window or self._positions

    @property
    def _positions(self) -> int:
        return self.base_lm.context_window - self._reserved

    def split_question(self, question: str) -> list[str]:
        return [question]

    def _question_ids(self, question: str, *, last_part: bool = False) -> list[int]:
        check_text(question)
        return []

    def _written(self, question: str, contexts: Sequence[str]) -> FittedPrompt:
        return self.fit_to_window(question, contexts)

    def _modulation(self, phi: Any) -> BlockPrefix:
        kind = RowsPrefix if self._by_kernels else BlockPrefix
        return kind(
            self.opening,
            [[row.keys_values for row in rows] for rows in phi.rows],
            [[row.bias for row in rows] for rows in phi.rows],
        )

    def ids_read(self, prompt: FittedPrompt, *, with_memory: bool) -> Sequence[int]:
        return prompt.after_memory if with_memory else prompt.ids

    def _weights(self, prompts: Sequence[FittedPrompt], memory_weight: float | None) -> None:
        if memory_weight not in (None, 1.0):
            raise ConfigError(
                f"memory_weight is {memory_weight}, but a memory of keys and values has none; leave it out"
            )

    def fit_to_window(
        self,
        question: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
    ) -> FittedPrompt:
        if isinstance(question, FittedPrompt):
            return question
        check_text(question)
        check_each(contexts, "document")
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        given = [text.strip() for text in contexts if text.strip()]
        texts = given
        encoder = self.base_lm.prompts
        documents = [self.blocks.texts.ids(text) for text in texts]
        left = room - len(self.blocks.question(question))
        while True:
            after = self.blocks.question(question, texts)
            if len(after) <= room or not texts:
                break
            if overflow == "error":
                raise DocumentError(
                    f"{len(contexts)} documents and the question take {len(after)} tokens, but the LM's window leaves "
                    f"room for {room}; give fewer or shorter documents (a smaller k or chunk size)"
                )
            texts = [text for text, _ in encoder.shortened(given, documents, left)] if left > 0 else []
            left -= 1 + len(texts)  # joined texts may take more tokens than each alone
        if len(after) > room:
            raise DocumentError(
                f"the question takes {len(after)} tokens, but the LM's window leaves room for {room}; shorten it"
            )
        begin = self.blocks.document("\n\n".join(texts)) if texts else []
        ids = [*self.blocks.opening, *begin, *self.blocks.question(question)]
        return FittedPrompt(question, tuple(ids), tuple(texts), truncated=texts != given, after_memory=tuple(after))

    def fit_conversation(
        self,
        messages: Sequence[Message],
        *,
        question: str | None = None,
        contexts: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> FittedPrompt:
        fitted = super().fit_conversation(messages, question=question, contexts=contexts, max_new_tokens=max_new_tokens)
        encoder = self.base_lm.prompts
        assert isinstance(encoder, ChatPromptEncoder)
        shorter = with_shorter(messages, contexts, fitted.contexts)
        after = self.blocks.conversation(encoder.turns(shorter))
        room = self.context_window - (max_new_tokens or self.config.max_new_tokens)
        if len(after) > room:
            raise PromptError(
                f"the conversation takes {len(after)} tokens, but documents in memory leave room for {room}; shorten "
                "its history or its prompts"
            )
        return replace(fitted, after_memory=tuple(after))

    # Checks

    @torch.no_grad()
    def check_equal(self) -> None:
        """Checks that a row in memory and its text in the prompt give the LM the same next token.

        Raises:
            ModelLoadError: if they do not, within the noise of the LM's dtype; names the difference.
        """
        document, after = self.blocks.document(_GATE), self.blocks.question("Who opened the harbour of Orsena?")
        [row] = self._read([document])
        answer = [self.blocks.answer("Luca Ferri")]
        memory = self.base_lm.answer_logits([after], answer, self._modulation(ReadRows([[ReadRow(row, 0.0)]])))
        text = self.base_lm.answer_logits([[*self.blocks.opening, *document, *after]], answer, None)
        difference = float((memory.float() - text.float()).pow(2).mean().sqrt() / text.float().std())
        bound = torch.finfo(self.base_lm.dtype).eps ** 0.5
        if not difference <= bound:
            raise ModelLoadError(
                f"{self.base_lm.model.config.model_type} answers differently from a document's keys and values and "
                f"from its text: the logits differ by {difference:.2g} of their spread, and {bound:.2g} would be "
                "rounding; its attention does something that this memory does not know, so take another LM"
            )

    @torch.no_grad()
    def kept(self, texts: Sequence[str]) -> Kept:
        """Measures what the memory keeps of documents; see `Kept`.

        Raises:
            ConfigError: if no text has at least 16 tokens.
        """
        sums, count, documents = [0.0, 0.0, 0.0], 0, 0
        for text in texts:
            ids = self.plan(text)[0]
            if len(ids) < 16:
                continue
            before, (first, *rest) = _halves(ids)
            [row] = self._read([before])
            seen = ReadRow(self.decode(self.encode(row)), 0.0)
            for place, (rows, prompt) in enumerate((([], [first]), ([], [*before, first]), ([seen], [first]))):
                losses = self.base_lm.token_losses([prompt], [rest], self._modulation(ReadRows([rows])))
                sums[place] += float(losses[0].sum())
            count += len(rest)
            documents += 1
        if not documents:
            raise ConfigError("no document has 16 tokens or more, so nothing can be measured; give longer ones")
        nothing, after_text, memory = (total / count for total in sums)
        size = self.config.bytes_per_token or self.raw_bytes
        return Kept(nothing, after_text, memory, documents, size, self.raw_bytes)

    def chosen(
        self, candidates: Iterable[tuple[int, float, int]], wanted: Container[int] = ()
    ) -> list[tuple[int, float]]:
        """The rows that a question sees: the best ones within a number of tokens, with their biases.

        Args:
            candidates: key, bias and number of tokens of each row, in any order.
            wanted: keys of rows that are seen even if there is no room for them.
        """
        best = sorted(candidates, key=lambda row: -row[1])
        rows: list[tuple[int, float]] = []
        left = self.config.memory_tokens
        for key, bias, tokens in best:
            relative = bias - best[0][1]
            if relative < _LEAST_BIAS:
                break
            if tokens <= left or not rows or key in wanted:
                rows.append((key, relative))
                left -= tokens
        return rows


def _halves(ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The first half of a document, and the beginning of how it goes on."""
    half = len(ids) // 2
    return ids[:half], ids[half : half + _CONTINUED]


def lm_digest(lm: Any, tokenizer: Any) -> str:
    """sha256 of an LM's weights in their dtype, and of its tokenizer and chat template.

    Raises:
        ConfigError: if weights are offloaded and so cannot be read.
    """
    digest = hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    digest.update(str(tokenizer.chat_template).encode())
    for name, tensor in sorted(lm.state_dict().items()):
        if tensor.device.type == "meta":
            raise ConfigError("weights of the LM are offloaded, so its digest is not known; load it whole once")
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _loaded(lm: str | Path | BaseLMConfig | tuple[Any, Any], device: torch.device) -> tuple[BaseLMConfig, Any, Any]:
    """Name, LM and tokenizer."""
    if isinstance(lm, tuple):
        model, tokenizer = lm
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        dtypes = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        dtype = dtypes.get(model.dtype)
        return BaseLMConfig(name=getattr(model, "name_or_path", ""), dtype=dtype), model, tokenizer
    config = with_exact_revision(lm if isinstance(lm, BaseLMConfig) else BaseLMConfig(name=str(lm), dtype="bf16"))
    return config, *load_causal_lm(config, device, modulation="own-kv")


def _reading(folder: Path, prompt: PromptFormat) -> dict[str, Any]:
    """What the task `tune_reading` has written beside its updates; `prompt` is the format of an LM without them.

    Raises:
        ModelLoadError: if it is not there.
    """
    try:
        found = read_json(folder / READING, _LARGEST_CONFIG)
        told = dataclasses.replace(prompt, system=found["system"], abstention=found["abstention"])
        return {"turn": found["turn"], "bias_scale": found["bias_scale"], "prompt": told}
    except (OSError, KeyError, TypeError, ValueError, MACError) as error:
        raise ModelLoadError(
            f"{folder} holds no {READING} of an adapter: {error}; give the folder best or last of a run of "
            "pipelines.train whose task is tune_reading"
        ) from None
