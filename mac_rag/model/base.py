"""MACModel: a frozen LM with a memory of any kind, and answering with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from mac_rag.config import BaseLMConfig, Config, PromptFormat
from mac_rag.data.characters import fault_of, shown
from mac_rag.data.types import Decoded, Document, Token
from mac_rag.errors import ConfigError, DocumentError, ModelLoadError, PromptError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.chat import ChatPromptEncoder, Message
from mac_rag.lm.continuous_batch import Answers, ContinuousBatch
from mac_rag.lm.decoding import GREEDY, Sampling, SpanSource
from mac_rag.lm.devices import DeviceMap, default_device
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import checkpoint
from mac_rag.model.calibration import Calibration, read_calibration
from mac_rag.nn.modulation import Modulation

# Tokens of documents that a model reads at a time, padding included.
BATCH_TOKENS = 8192
_LEAST_PROBABILITY = 1e-6  # lower bound of the probability of an abstention, and of an answer


class ModelConfig(Protocol):
    """What the configurations of all kinds of models have; `mac_rag.config` explains each field."""

    @property
    def base_lm(self) -> BaseLMConfig: ...

    @property
    def prompt(self) -> PromptFormat: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def memory_weight(self) -> float: ...

    @property
    def languages(self) -> tuple[str, ...] | None: ...

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]: ...

    def model_dump_json(self) -> str: ...


class Phi(Protocol):
    """phi* of some questions: a Tensor `[B, T, D]`, or what another kind of model has in its place."""

    def __len__(self) -> int:
        """B, the number of questions."""

    def __getitem__(self, rows: list[int], /) -> Phi:
        """phi* of some of the questions, by their numbers."""


class MACModel(nn.Module, ABC):
    """A frozen LM with a memory.

    A question and a bank become one modulation phi*, and the LM answers under it (`generate`). Build a model with
    `from_config` or `from_pretrained`: the configuration, or the checkpoint, says which kind of model it is.

    A kind is a subclass. It gives a name for the `config.json` of checkpoints and the class of its configurations:
    `class AmortizedModel(MACModel, kind="amortized", config_class=MACConfig)`.

    Examples:
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> model.kind
        'amortized'

    Args:
        config: the configuration of the whole model.
        base_lm: theta_base.

    Attributes:
        kind: the name of this kind of model.
        config_class: the class of its configurations.
        calibration: maps evidence about an answer to a probability; None if none was fitted for the checkpoint.
        cpu_batch_tokens: prompt tokens per batch on a CPU; larger batches exceed its caches and are slower.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[Config]]
    config: ModelConfig
    cpu_batch_tokens: float = 1024

    def __init_subclass__(cls, *, kind: str, config_class: type[Config]) -> None:
        super().__init_subclass__()
        cls.kind, cls.config_class = kind, config_class
        _KINDS[kind] = cls

    def __init__(self, config: ModelConfig, base_lm: BaseLM) -> None:
        super().__init__()
        self.config = config
        self.base_lm = base_lm
        self.calibration: Calibration | None = None

    @classmethod
    def from_config(cls, config: ModelConfig, *, device: str | torch.device | None = None) -> Self:
        """Builds a model from pretrained parts; networks that the paper trains from scratch start at random.

        Raises:
            ConfigError: for a configuration of another kind of model.
            ModelLoadError: if a part cannot be loaded, or its architecture does not fit its design.
            QuantizationError: if bitsandbytes is missing.
        """
        for chosen in _kinds_of(cls):
            if isinstance(config, chosen.config_class):
                return chosen._build(config, default_device(device)).eval()
        needed = " or ".join(chosen.config_class.__name__ for chosen in _kinds_of(cls))
        raise ConfigError(f"{cls.__name__} cannot be built from a {type(config).__name__}; give a {needed}")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, int | str] | None = None,
        max_memory: Mapping[int | str, int | str] | None = None,
    ) -> Self:
        """Loads a checkpoint: one in the package, such as `mac-tiny`, a folder, or a repository on the Hub.

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
                architecture, where the message lists the weights that differ; for a kind of model that is unknown, or
                is not this class; and if `mac-rag fetch` has yet to bring its LM.
        """
        spread = DeviceMap.of(device_map, max_memory, device)
        folder = checkpoint.find(name_or_path, revision)
        place = default_device(device)
        with checkpoint.unexpected(folder):
            kind = checkpoint.read_values(folder)[0]
            chosen = _KINDS.get(kind)
            if chosen is None:
                raise ModelLoadError(
                    f"{folder} holds a model of the kind {kind!r:.40}, but this version knows {', '.join(_KINDS)}; "
                    "update mac_rag"
                )
            if not issubclass(chosen, cls):
                needed = " or ".join(repr(each.kind) for each in _kinds_of(cls))
                raise ModelLoadError(f"{folder} holds a model of the kind {kind!r}, but {needed} is needed")
            model = chosen._load(folder, place, spread)
            model.calibration = read_calibration(folder)
        return model.eval()

    @classmethod
    def around(
        cls,
        lm: str | Path | BaseLMConfig | tuple[Any, Any],
        documents: Iterable[Document | str] | None = None,
        *,
        compression: int | None = 20,
        adapter: str | Path | None = None,
        sentence_encoder: str | None = "minilm",
        device: str | torch.device | None = None,
        progress: bool = False,
    ) -> MACModel:
        """A memory for any causal LM, of its own keys and values; see `mac_rag.model.own_kv`. Nothing is trained.

        First checks that this LM answers from a document in memory as from its text.

        Args:
            lm: a folder, a name on the Hub or of `mac-rag fetch`, its configuration, or a loaded LM and its tokenizer.
                From a name, it is loaded in bf16.
            documents: documents like those that the memory will hold, to fit a codec to; 20,000 tokens are advised.
            compression: how many times smaller than its keys and values, in 16 bits, a document is in a bank; None
                keeps them as they are. Without documents, only None.
            adapter: folder `best` or `last` of a run of the task `tune_reading` for this LM; None for the LM as it is.
            sentence_encoder: compares questions with documents, beside BM25, by a name that
                `mac_rag.retrieval.registry.make_encoder` knows; None for BM25 alone.
            device: device of the LM; None for a GPU if there is one, else the CPU.
            progress: shows a progress bar.

        Raises:
            ConfigError: for a compression without documents, or one that leaves no byte.
            ModelLoadError: if the LM or the encoder cannot be loaded, or the LM has layers without keys and values, or
                answers from memory otherwise than from text; the message names the difference.
        """
        return _KINDS["own-kv"]._around(
            lm,
            documents,
            compression=compression,
            adapter=adapter,
            sentence_encoder=sentence_encoder,
            device=device,
            progress=progress,
        )

    @classmethod
    def _around(cls, *arguments: Any, **named: Any) -> MACModel:
        """See `around`; for the kind of model that it makes."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def _build(cls, config: ModelConfig, place: torch.device) -> Self:
        """A new model, as `from_config` describes it, from a configuration of this kind's `config_class`."""

    @classmethod
    @abstractmethod
    def _load(cls, folder: Path, place: torch.device, spread: DeviceMap | None) -> Self:
        """The model of a checkpoint of this kind, without its calibration.

        Args:
            folder: the checkpoint.
            place: device of all parts.
            spread: where the LM's parts go, instead of `place`; None to use `place`.
        """

    @abstractmethod
    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Writes a checkpoint that `from_pretrained` reads.

        Args:
            folder: a new or empty folder.
            dtype: dtype of the stored weights; None keeps each weight's own.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of all that writes or reads a bank. Only models with the same one share a bank."""

    @property
    @abstractmethod
    def answer_digest(self) -> str:
        """Hex digest of everything in the model that changes an answer; computed at each access.

        Raises:
            ConfigError: if weights of the LM are offloaded and so cannot be read.
        """

    @abstractmethod
    def plan(
        self, text: str, *, whole: bool = False, advance: Callable[[int], object] | None = None
    ) -> list[list[int]]:
        """Token ids of a document, as rows that the model reads one by one: a single row for a text within the limit.

        Args:
            text: the document.
            whole: True raises an error for a text beyond the limit, instead of cutting it.
            advance: called with the number of characters done since its last call; all calls add up to the length of
                the text.

        Raises:
            DocumentError: for anything but a text with at least one visible character; with `whole`, for a text
                beyond the limit.
        """

    @abstractmethod
    def amortize_rows(
        self,
        rows: Sequence[Sequence[int]],
        *,
        batch_tokens: int = BATCH_TOKENS,
        advance: Callable[[int], object] | None = None,
    ) -> Tensor | list[Tensor]:
        """What a bank stores of documents, from their token ids (`plan`): K rows, without gradients.

        Args:
            rows: K rows of token ids.
            batch_tokens: tokens of one batch, padding included.
            advance: called after each batch, with its number of rows.
        """

    @abstractmethod
    def split_question(self, question: str) -> list[str]:
        """A text as questions within the model's limit: itself, or several if it is beyond the limit."""

    @abstractmethod
    def _question_ids(self, question: str, *, last_part: bool = False) -> list[int]:
        """Token ids of a question as the memory reads it.

        Args:
            question: x.
            last_part: True takes the last part of a question beyond the limit (`split_question`).

        Raises:
            DocumentError: for anything but a text with at least one visible character; without `last_part`, for a text
                beyond the limit.
        """

    @abstractmethod
    def _modulation(self, phi: Phi) -> Modulation:
        """The modulation of questions that read equally many tokens of phi*, without gradients."""

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Largest number of tokens of documents, question and answer together."""

    @property
    def _positions(self) -> int:
        """Positions of the LM that the memory does not take."""
        return self.base_lm.context_window

    def memory_in_prompt(self, phi: Phi) -> list[int]:
        """For each question the number of tokens of phi* that the LM runs over with the prompt; 0 by default."""
        return [0] * len(phi)

    def ids_read(self, prompt: FittedPrompt, *, with_memory: bool) -> Sequence[int]:
        """The token ids of a prompt that the LM reads after its memory, or without one."""
        return prompt.ids

    @property
    def _extractive(self) -> tuple[str, ...] | None:
        """Fixed answers beside spans of the documents in front of the question; None for free answers, the default."""
        return None

    @property
    def knows_times(self) -> bool:
        """True if the memory reads dates of documents, or years of questions; see `without_times`."""
        return False

    def without_times(self) -> AbstractContextManager[None]:
        """A context in which the memory ignores dates of documents and years of questions."""
        return nullcontext()

    @property
    def device(self) -> torch.device:
        return self.base_lm.device

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
        question_ids = self._question_ids(question)  # checks the question, even if no memory is used
        check_each(contexts, "document")
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
            question: the question for the memory; None for the last message. If it is beyond the model's limit,
                its last part is used.
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
        check_each([message.text for message in messages], "message")
        asked = messages[-1].text if question is None and messages else question or ""
        fitted = prompts.fit_conversation(messages, asked, contexts, room)
        if len(fitted.ids) > room:
            raise PromptError(
                f"the conversation takes {len(fitted.ids)} tokens, but the LM's window leaves room for {room}; "
                "shorten its history or its prompts"
            )
        return replace(fitted, question_ids=tuple(self._question_ids(asked, last_part=True)))

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str | FittedPrompt],
        contexts: Sequence[Sequence[str]] | None = None,
        *,
        modulation: Phi | None = None,
        max_new_tokens: int | None = None,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[Decoded]:
        """Answers questions: `LM(d + x; phi*)`.

        Args:
            prompts: B questions, as texts or as results of `fit_to_window`.
            contexts: documents before each question; only for questions that are texts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.
            max_new_tokens: largest number of tokens of an answer; None for the configured one.
            memory_weight: lambda after documents (see `mac_rag.lm.decoding`); None for the configured weight.
            sampling: how tokens are chosen, and which strings end an answer early.

        Raises:
            ConfigError: for a memory_weight that is not above 0 and at most 1.
        """
        answers, batch = [Decoded("")] * len(prompts), ContinuousBatch()
        begun = self.begin(
            batch, self._as_fitted(prompts, contexts), answers.__setitem__, modulation=modulation,
            max_new_tokens=max_new_tokens, memory_weight=memory_weight, sampling=sampling,
        )  # fmt: skip
        while batch:
            batch.step()
        for part in begun:
            part.check()
        return answers

    @torch.no_grad()
    def begin(
        self,
        batch: ContinuousBatch,
        prompts: Sequence[FittedPrompt],
        tell: Callable[[int, Decoded], object],
        *,
        hear: Callable[[int, Sequence[Token]], bool] | None = None,
        modulation: Phi | None = None,
        max_new_tokens: int | None = None,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> list[Answers]:
        """Adds the answers to questions to those that the LM writes already.

        Args:
            batch: the answers that this model's LM writes together.
            prompts: B questions.
            tell: called with the number and the answer of each question once its answer has ended; it must not raise
                an exception.
            hear: called with the number and the tokens of each answer that goes on; as `Answers` takes it.
            modulation, max_new_tokens, memory_weight, sampling: as `generate` takes them.

        Returns:
            The parts of the questions that are read together.

        Raises:
            ConfigError: as `generate`.
        """
        weights = self._weights(prompts, memory_weight)
        return [
            self.base_lm.begin(
                batch,
                [self.ids_read(prompts[i], with_memory=modulation is not None) for i in rows],
                None if modulation is None else self._modulation(modulation[rows]),
                max_new_tokens=max_new_tokens or self.config.max_new_tokens,
                weights=None if weights is None else [weights[i] for i in rows],
                sampling=sampling,
                sources=self.span_sources([prompts[i] for i in rows]),
                tell=partial(_of_row, tell, rows),
                hear=hear and partial(_of_row, hear, rows),
            )
            for rows in self._batches(prompts, modulation)
        ]

    @torch.no_grad()
    def score_answers(
        self, prompts: Sequence[FittedPrompt], answers: Sequence[str], *, modulation: Phi | None = None
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
    def answering_odds(self, prompts: Sequence[FittedPrompt], *, modulation: Phi | None = None) -> Tensor | None:
        """The log-odds that the LM answers rather than abstains; None for an LM that has not learned to abstain.

        Args:
            prompts: B prompts.
            modulation: phi* `[B, T, D]`; None for the frozen LM alone.

        Returns:
            `[B]`, in float32 on the CPU.
        """
        if (beginning := self.base_lm.abstention) is None:
            return None
        return log_odds_of_answering(self._losses(prompts, [beginning] * len(prompts), modulation)).float().cpu()

    def _losses(
        self, prompts: Sequence[FittedPrompt], answers: Sequence[Sequence[int]], phi: Phi | None
    ) -> list[Tensor]:
        """For each of B answers the losses of its tokens, as far as they fit the LM's positions."""
        taken = self.base_lm.prompts.positions
        found = [torch.empty(0)] * len(prompts)
        for rows in self._batches(prompts, phi):
            losses = self.base_lm.token_losses(
                [self.ids_read(prompts[i], with_memory=phi is not None) for i in rows],
                [answers[i][: self._positions - taken(prompts[i].ids)] for i in rows],
                None if phi is None else self._modulation(phi[rows]),
            )
            for i, loss in zip(rows, losses, strict=True):
                found[i] = loss
        return found

    def _as_fitted(
        self, prompts: Sequence[str | FittedPrompt], contexts: Sequence[Sequence[str]] | None
    ) -> list[FittedPrompt]:
        """All prompts as token ids, without cutting documents of questions that are texts."""
        return [
            prompt if isinstance(prompt, FittedPrompt) else self._written(prompt, texts)
            for prompt, texts in zip(prompts, contexts or [()] * len(prompts), strict=True)
        ]

    def _written(self, question: str, contexts: Sequence[str]) -> FittedPrompt:
        """A question after documents as token ids, whatever their number."""
        return self.base_lm.prompts.fit_to_window(question, contexts)

    def _batches(self, prompts: Sequence[FittedPrompt], phi: Phi | None) -> list[list[int]]:
        """Batches of prompts, as lists of indices. All prompts of a batch read equally many tokens of phi*.

        On a CPU, the prompts of a batch also have similar lengths.
        """
        memory = [0] * len(prompts) if phi is None else self.memory_in_prompt(phi)
        batches = []
        for tokens in sorted(set(memory)):
            rows = [row for row, own in enumerate(memory) if own == tokens]
            if self.base_lm.device.type == "cpu":
                lengths = [len(self.ids_read(prompts[row], with_memory=phi is not None)) for row in rows]
                buckets = length_buckets([tokens + length for length in lengths], self.cpu_batch_tokens)
                batches += [[rows[place] for place in bucket] for bucket in buckets]
            else:
                batches.append(rows)
        return batches

    def stream(
        self,
        prompt: str | FittedPrompt,
        contexts: Sequence[str] = (),
        *,
        modulation: Phi | None = None,
        max_new_tokens: int | None = None,
        memory_weight: float | None = None,
        sampling: Sampling = GREEDY,
    ) -> Iterator[Decoded]:
        """Yields the answer to one question piece by piece; arguments as for `generate`, with phi* `[1, T, D]`."""
        [fitted] = self._as_fitted([prompt], [contexts])
        yield from self.base_lm.stream(
            self.ids_read(fitted, with_memory=modulation is not None),
            None if modulation is None else self._modulation(modulation),
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
        if self._extractive is None:
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
        prompts, texts = self.base_lm.prompts, self._extractive or ()
        if prompts.format.abstention is not None:
            texts = (*texts, prompts.format.abstention)
        ids = [list(takewhile(lambda token: token not in prompts.end_tokens, prompts.answer(text))) for text in texts]
        return [SpanSource.whole(answer) for answer in ids]


_Model = TypeVar("_Model", bound=MACModel)

# The kinds of models by name. `mac_rag.model` imports the modules that define them.
_KINDS: dict[str, type[MACModel]] = {}


def _kinds_of(cls: type[_Model]) -> list[type[_Model]]:
    """The kinds of models that are instances of a class."""
    return [kind for kind in _KINDS.values() if issubclass(kind, cls)]


def _of_row(call: Callable[[int, Any], Any], rows: Sequence[int], place: int, said: Any) -> Any:
    return call(rows[place], said)


def log_odds_of_answering(losses: Sequence[Tensor]) -> Tensor:
    """The log-odds `[B]` that an answer does not begin as an abstention, from the losses of the abstention's tokens."""
    abstains = (-torch.stack([loss.sum() for loss in losses])).exp()
    odds: Tensor = -torch.special.logit(abstains, eps=_LEAST_PROBABILITY)
    return odds


def check_each(texts: Sequence[str], kind: str) -> None:
    """Checks the characters of documents or messages before a template surrounds them, so that errors can locate them.

    Raises:
        DocumentError: for an invalid character; the message names the text's kind and number, and the index in it.
    """
    for number, text in enumerate(texts, 1):
        fault = fault_of(text)
        if fault is not None:
            raise DocumentError(f"{kind} {number} of {len(texts)} in the prompt: {fault} (it begins {shown(text)})")


@contextmanager
def switched_off(network: nn.Module, switch: str) -> Iterator[None]:
    """A context in which an attribute of a network is False."""
    before = getattr(network, switch)
    setattr(network, switch, False)
    try:
        yield
    finally:
        setattr(network, switch, before)
