"""Tuning an LM to read documents through its own keys and values, several at once, with the scores of a retriever."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.config import BaseLMConfig, Config, PromptFormat
from mac_rag.data.characters import shown_id
from mac_rag.data.metrics import best_over, exact_match, f1
from mac_rag.data.types import Document, Question
from mac_rag.errors import DataError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.block_attention import BlockAttentionLM, DocumentsKV, check_lm_class
from mac_rag.lm.block_prompt import BlockPrompt
from mac_rag.lm.loading import load_causal_lm, quiet
from mac_rag.nn.block_prefix import BlockPrefix
from mac_rag.nn.codec import KVCodec
from mac_rag.nn.dtypes import use_master_weights
from mac_rag.untrusted_files import read_json
from pipelines.corpora.packs import Pack, PackConfig, PackMaker, joined_documents, needed
from pipelines.corpora.qa_data import DataConfig, DataRecipe
from pipelines.tasks.tune_qa import LORA_RANK
from pipelines.trainer import Task, TrainingRecipe, shuffled

_DESCRIPTION, _LARGEST_DESCRIPTION = "reading.json", 1 << 16
_READ_AT_ONCE = 8  # documents
_VALIDATED, _VALIDATED_AT_ONCE = 100, 20  # questions: of each validation, from all over its split; of a batch
_ANSWER_TOKENS = 16
_WEIGHED = 50  # packs from which the codec learns what errors cost
_FITTED_ON = 100  # training documents that the codec is fitted on, at the start and at each validation
# At the start: what a document's score, relative to the best of its pack, is multiplied by before it is added to the
# attention logits of its tokens.
_BIAS_SCALE = 0.5


class FurtherConfig(Config):
    """Another data set that packs are made of.

    Attributes:
        share: share of the packs.
        data: the data set.
        packs: what they hold.
    """

    share: float = Field(gt=0, lt=1)
    data: DataConfig
    packs: PackConfig = PackConfig()


class TuneReadingConfig(DataRecipe, TrainingRecipe):
    """A recipe of the task `tune_reading`.

    Attributes:
        base_lm: the LM, which stays as it is; low-rank updates of all its linear layers are trained.
        adapter: folder of an earlier run's `best` or `last`, from whose updates and bias scale this one starts.
        turn: what the user says, with `{document}` and `{question}`.
        abstention: the answer where the right document is absent.
        packs: documents and questions of a training sequence.
        compression: how many times smaller than its keys and values, in 16 bits, a codec makes a document in training
            and validation; one is drawn for each pack, and the first is that of the validation. None for keys and
            values as they are.
        further: name -> other data sets, from which the rest of the packs is. Each validation gives the loss of the
            answers to their questions, and F1 and EM, after the best documents, among them those that they need.
        distillation: weight of the LM itself as the teacher, from 0 to 1: the target of an answer's tokens is then what
            the LM without updates predicts after the right document's text. The rest of the weight, and all of it for
            a question whose document is absent, is on the answer itself.
    """

    base_lm: BaseLMConfig
    adapter: str | None = None
    turn: str = (
        "Answer the question in a few words of the context. If the context does not answer it, say: I don't know\n\n"
        "Context: {document}\n\nQuestion: {question}"
    )
    abstention: str = "I don't know"
    packs: PackConfig = PackConfig()
    compression: tuple[int, ...] | None = None
    distillation: float = Field(0.0, ge=0, le=1)
    further: dict[str, FurtherConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> TuneReadingConfig:
        if self.compression is not None and not all(number >= 1 for number in self.compression or (0,)):
            raise ValueError(f"compression must hold numbers of at least 1, got {list(self.compression)}")
        total = sum(further.share for further in self.further.values())
        if total >= 1:
            raise ValueError(f"the shares of further data add up to {total:g}; leave some packs to data")
        return self


@dataclass(frozen=True)
class EncodedPack:
    """A pack as token ids.

    Attributes:
        documents: ids of each document.
        questions: ids of each question and of its answer.
        bias: `[questions, documents]`, scores relative to the best.
        right: `[questions, documents]`, bool: a document that the question needs; none if one of them is absent.
        rate: bytes a token that the documents pass through; None for none.
    """

    documents: list[list[int]]
    questions: list[tuple[list[int], list[int]]]
    bias: Tensor
    right: Tensor
    rate: int | None


class TuneReadingTask(Task):
    """An LM with low-rank updates, a bias scale, and packs of documents and questions.

    Validation gives loss, F1 and EM on right documents, on BM25's first, and on its first three with and without bias;
    with a codec also from coded documents; and how many answers to right documents are abstentions.
    """

    def __init__(self, config: TuneReadingConfig) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(config.trainer.seed)
        loaded, tokenizer = load_causal_lm(config.base_lm, config.trainer.device)
        lm: Any = loaded
        check_lm_class(lm)
        self.lm = lm
        self.prompt = BlockPrompt(tokenizer, config.turn)
        data = joined_documents(config.data.training_set(), self.prompt, seed=config.trainer.seed)
        self._training = PackMaker(config.packs, data, config.abstention)
        self._validation = PackMaker(config.packs, config.data.validation_set(), config.abstention)
        self._further: dict[str, tuple[PackMaker, PackMaker]] = {}
        for name, further in config.further.items():
            self._further[name] = (
                PackMaker(further.packs, further.data.training_set(), config.abstention),
                PackMaker(further.packs, further.data.validation_set(), config.abstention),
            )
        longest = self._longest()
        lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
        self._adapted: list[Any] = [get_peft_model(lm, lora)]  # in a list: its weights are those of `lm`
        use_master_weights(lm)
        self.bias_scale = nn.Parameter(torch.tensor(_BIAS_SCALE, device=lm.device))
        if config.adapter is not None:
            self._load_adapter(Path(config.adapter))
        self._blocks = BlockAttentionLM(lm, self.prompt.opening, longest=longest)
        answering = BaseLM(lm, tokenizer, PromptFormat())
        answering.end_tokens = sorted({*answering.end_tokens, *self.prompt.end_tokens})
        self._answering = [answering]  # in a list, as above
        self.codec: KVCodec | None = None
        if config.compression is not None:
            layers, kv_heads, head_width = self._blocks.shape
            self.codec = KVCodec(layers=layers, kv_heads=kv_heads, head_width=head_width).to(lm.device)
            raw = 2 * 2 * layers * kv_heads * head_width  # bytes of a token in 16 bits
            self._rates = [raw // compression for compression in config.compression]
            for rate in self._rates:
                self.codec.check_rate(rate)

    def _load_adapter(self, folder: Path) -> None:
        """Starts from the updates and the bias scale of an earlier run.

        Raises:
            ModelLoadError: for a folder that holds none, or updates of another shape.
        """
        try:
            updates = load_file(folder / "adapter_model.safetensors")
            scale = read_json(folder / _DESCRIPTION, _LARGEST_DESCRIPTION)["bias_scale"]
            result: Any = set_peft_model_state_dict(self._adapted[0], updates)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise ModelLoadError(
                f"{folder} holds no updates of this LM of rank {LORA_RANK}: {error}; give the folder best "
                "or last of a training to read (task tune_reading) around the same LM"
            ) from None
        if result.unexpected_keys:
            raise ModelLoadError(f"{folder} holds updates of another LM; it has no {result.unexpected_keys[0]}")
        with torch.no_grad():
            self.bias_scale.fill_(scale)

    def _longest(self) -> int:
        """Tokens of the longest document.

        Raises:
            DataError: for a document that does not fit into the LM's window with a question and its answer; names it.
        """
        window, longest = self.lm.config.max_position_embeddings, 0
        for maker in (self._training, self._validation, *(maker for pair in self._further.values() for maker in pair)):
            documents = maker.data.documents
            lengths = dict(zip((document.id for document in documents), map(len, self._ids(documents))))
            questions = [self.prompt.question(question.question) for question in maker.data.questions]
            answers = [self.prompt.answer(question.answers[0]) for question in maker.data.questions]
            after = max((len(q) + len(a) for q, a in zip(questions, answers)), default=0)
            room = window - len(self.prompt.opening) - after
            for name, length in lengths.items():
                if length > room:
                    raise DataError(
                        f"document {shown_id(name)} has {length:,} tokens, but the LM's window of {window:,} also "
                        f"has to hold the longest question and answer: at most {room:,} are left; split the document"
                    )
            longest = max(longest, *lengths.values())
        return longest

    def _ids(self, documents: Sequence[Document]) -> list[list[int]]:
        return [self.prompt.document(document.text) for document in documents]

    def batch(self, step: int, micro: int, size: int) -> list[EncodedPack]:
        """Packs of documents and questions."""
        seed = self.config.trainer.seed
        questions = self._training.data.questions
        indices = shuffled(len(questions), step, micro, size, seed=seed, per_step=size * self.passes)
        rng = random.Random(f"{seed}/{step}/{micro}")
        return [self._encoded(self._pack(questions[index], rng), rng) for index in indices]

    def _pack(self, question: Question, rng: random.Random) -> Pack:
        """A pack around the question, or one of other data."""
        place = rng.random() if self._further else 1.0
        for name, (training, _) in self._further.items():
            place -= self.config.further[name].share
            if place < 0:
                return training.make(rng.choice(training.data.questions), rng)
        return self._training.make(question, rng)

    def _encoded(self, pack: Pack, rng: random.Random) -> EncodedPack:
        questions = [
            (self.prompt.question(question.question), self.prompt.answer(answer))
            for question, answer in zip(pack.questions, pack.answers, strict=True)
        ]
        scores = torch.tensor(pack.scores, device=self.lm.device)
        rate = None if self.codec is None else rng.choice(self._rates)
        ids = [document.id for document in pack.documents]
        right = [[name in needed(q) and needed(q) <= set(ids) for name in ids] for q in pack.questions]
        is_right = torch.tensor(right, device=self.lm.device)
        return EncodedPack(self._ids(pack.documents), questions, scores - scores.amax(1, keepdim=True), is_right, rate)

    def begin_step(self, step: int) -> None:
        if self.codec is not None and not self.codec.fitted:
            self._fit_codec()

    def _fit_codec(self) -> None:
        """Fits the codec to training documents as the LM reads them now."""
        assert self.codec is not None
        documents = self._training.data.documents
        every = max(1, len(documents) // _FITTED_ON)
        with self._half_precision():
            with torch.no_grad():
                read = [part for _, part in self._read(documents[::every])]
            sensitivity = torch.stack([self._sensitivity(pack) for pack in self.batch(0, 0, _WEIGHED)]).sum(0)
        self.codec.fit([part.documents for part in read], sensitivity)

    def _sensitivity(self, pack: EncodedPack) -> Tensor:
        """What a squared error of the documents costs in a pack; see `KVCodec.fit`."""
        with torch.no_grad():
            read = self._blocks.read(pack.documents)
        numbers = read.documents.requires_grad_()
        with torch.enable_grad():  # validation has none
            logits = self._blocks.answer_logits(read, pack.questions, self.bias_scale.detach() * pack.bias)
            [gradient] = torch.autograd.grad(self._loss(pack, logits), numbers)
        return gradient.double().square().sum((3, 4))

    def _read(self, documents: Sequence[Document]) -> Iterator[tuple[Sequence[Document], DocumentsKV]]:
        """Batches of documents, each read after the opening."""
        for start in range(0, len(documents), _READ_AT_ONCE):
            part = documents[start : start + _READ_AT_ONCE]
            yield part, self._blocks.read(self._ids(part))

    def _half_precision(self) -> Any:
        enabled = self.config.trainer.precision == "bf16"
        return torch.autocast(self.lm.device.type, torch.bfloat16, enabled=enabled)

    def forward(self, batch: list[EncodedPack]) -> dict[str, Tensor]:
        losses = []
        for pack in batch:
            read = self._blocks.read(pack.documents)
            if pack.rate is not None:
                assert self.codec is not None
                read = read.coded(self.codec, pack.rate)
            losses.append(
                self._loss(pack, self._blocks.answer_logits(read, pack.questions, self.bias_scale * pack.bias))
            )
        tokens = sum(sum(map(len, p.documents)) + sum(len(q) + len(a) for q, a in p.questions) for p in batch)
        return {
            "loss": torch.stack(losses).mean(),
            "bias_scale": self.bias_scale.detach(),
            "tokens": torch.tensor(float(tokens)),
            "questions": torch.tensor(float(sum(len(pack.questions) for pack in batch))),
        }

    def _loss(self, pack: EncodedPack, logits: Tensor) -> Tensor:
        """The mean loss of the answers' tokens, whose logits are `[tokens, vocabulary]`."""
        labels = torch.tensor([token for _, answer in pack.questions for token in answer], device=logits.device)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        weight = self.config.distillation
        if not weight:
            return losses.mean()
        lengths = torch.tensor([len(answer) for _, answer in pack.questions], device=logits.device)
        taught = pack.right.any(1).repeat_interleave(lengths)
        targets = self._teacher_logits(pack).log_softmax(-1)
        own = functional.kl_div(logits.log_softmax(-1), targets, reduction="none", log_target=True).sum(-1)
        return torch.where(taught, weight * own + (1 - weight) * losses, losses).mean()

    @torch.no_grad()
    def _teacher_logits(self, pack: EncodedPack) -> Tensor:
        """What the LM without updates predicts with only the right documents before each question, as they are.

        One document as keys and values is its text, so nothing else has to be read.
        """
        seen = torch.zeros(pack.right.shape, device=pack.right.device).masked_fill(~pack.right, -torch.inf)
        with self._adapted[0].disable_adapter():
            read = self._blocks.read(pack.documents)
            return self._blocks.answer_logits(read, pack.questions, seen)

    def validate(self) -> dict[str, float]:
        if self.codec is not None:
            self._fit_codec()
        with self._half_precision():
            return dict(self._figures())

    def _figures(self) -> Iterator[tuple[str, float]]:
        questions = self._validated(self._validation)
        retrieved = [self._validation.best(question, 3) for question in questions]
        right = [([self._validation.gold(question)], [0.0]) for question in questions]
        first = [(documents[:1], scores[:1]) for documents, scores in retrieved]
        unbiased = [(documents, [0.0] * len(scores)) for documents, scores in retrieved]
        opening, raw, coded = self._read_once([*right, *retrieved])
        settings = {"right": right, "first": first, "three": retrieved, "three_unbiased": unbiased}
        for name, asked in settings.items():
            yield from self._scores(name, questions, asked, opening, raw)
        for name in ("right", "three") if coded else ():
            yield from self._scores(f"{name}_coded", questions, settings[name], opening, coded)
        for name, (_, maker) in self._further.items():
            questions = self._validated(maker)
            most = max(maker.config.documents)
            found = [maker.best(question, most, with_needed=True) for question in questions]
            opening, raw, coded = self._read_once(found)
            yield from self._scores(name, questions, found, opening, coded or raw)

    def _validated(self, maker: PackMaker) -> Sequence[Question]:
        every = max(1, len(maker.data.questions) // _VALIDATED)
        return maker.data.questions[::every][:_VALIDATED]

    def _read_once(
        self, asked: Sequence[tuple[Sequence[Document], Sequence[float]]]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The opening, and by id all documents as they are read, and through the codec if there is one."""
        once = {document.id: document for documents, _ in asked for document in documents}
        raw: dict[str, Tensor] = {}
        coded: dict[str, Tensor] = {}
        for part, read in self._read(list(once.values())):
            names = [document.id for document in part]
            opening = read.opening  # the same each time
            raw |= zip(names, self._blocks.rotated(read), strict=True)
            if self.codec is not None:
                through = read.coded(self.codec, self._rates[0])
                coded |= zip(names, self._blocks.rotated(through), strict=True)
        return opening, raw, coded

    def _scores(
        self,
        name: str,
        questions: Sequence[Question],
        asked: Sequence[tuple[Sequence[Document], Sequence[float]]],
        opening: Tensor,
        read: Mapping[str, Tensor],
    ) -> Iterator[tuple[str, float]]:
        """Loss, F1 and EM of questions after documents with their scores."""
        answers: list[str] = []
        losses: list[float] = []
        for start in range(0, len(questions), _VALIDATED_AT_ONCE):
            part = slice(start, start + _VALIDATED_AT_ONCE)
            prompts = [self.prompt.question(question.question) for question in questions[part]]
            gold = [self.prompt.answer(question.answers[0]) for question in questions[part]]
            scale = self.bias_scale.item()
            prefix = BlockPrefix(
                opening,
                [[read[document.id] for document in documents] for documents, _ in asked[part]],
                [[scale * (score - max(scores)) for score in scores] for _, scores in asked[part]],
            )
            losses += [float(loss.mean()) for loss in self._answering[0].token_losses(prompts, gold, prefix)]
            answers += self._answering[0].generate(prompts, prefix, max_new_tokens=_ANSWER_TOKENS)
        pairs = list(zip(answers, questions, strict=True))
        yield f"loss_{name}", sum(losses) / len(losses)
        for metric, function in (("f1", f1), ("em", exact_match)):
            yield f"{metric}_{name}", sum(best_over(function, a, q.answers) for a, q in pairs) / len(pairs)
        yield f"abstentions_{name}", sum(exact_match(a, self.config.abstention) for a in answers) / len(answers)

    def parameter_groups(self) -> list[dict[str, Any]]:
        updates = [p for p in self.lm.parameters() if p.requires_grad]
        return [
            {"params": updates},
            # At the rate of the updates. Ten times as fast, it fell to 0.23 before the LM could tell documents apart,
            # and answers from three documents were worse than those from the first.
            {"params": [self.bias_scale], "weight_decay": 0.0},
        ]

    def save(self, folder: Path) -> None:
        """A PEFT adapter, and beside it what reading needs: `reading.json` and, with a codec, `codec.safetensors`."""
        with quiet():
            self._adapted[0].save_pretrained(folder)
        config = self.config
        described = {
            "turn": config.turn,
            "system": None,  # what the chat template writes by itself
            "abstention": config.abstention,
            "bias_scale": self.bias_scale.item(),
            "codec": None if config.compression is None else {"compression": config.compression},
        }
        if self.codec is not None:
            save_file(self.codec.state_dict(), folder / "codec.safetensors")
        (folder / _DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")
