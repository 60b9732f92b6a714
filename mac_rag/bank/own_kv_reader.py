"""Reads a bank of an LM's own keys and values: which rows a question sees, with which bias, decoded and kept."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.bank.bank import Contents
from mac_rag.bank.base_reader import Aggregated, Reader, share_odds
from mac_rag.bank.directory import followed
from mac_rag.bank.interface import BankContents
from mac_rag.config import AttentionConfig
from mac_rag.data.dates import years_in
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError
from mac_rag.model import OwnKVModel, ReadRow, ReadRows
from mac_rag.retrieval.base import Hit
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.retrieval.dense import Encoder, check_finite

_ALIKE = 8  # documents among which one with the same text is looked for
_BLANK_LINE = re.compile(r"\n\s*\n\s*")
_CANDIDATES = 64  # documents that the prior finds for a question; a budget of tokens rarely holds as many
# What a retriever has found first is at most so many nats less probable than the document that the prior ranks first,
# and what it has found later this number times the logarithm of the rank less.
_FOUND_FIRST, _RANK_WEIGHT = -2.0, 2.0
# The cosine of a row's nearer half counts as much as this number in a BM25 score. For 1,500 validation questions of
# SQuAD among 1,170 paragraphs, the right one then comes first for 84.1 % (83.2 with 25), with one vector of the whole
# row for 82.3 % at most, and by BM25 alone for 77.3 %. More parts of a row than two add no more than 0.4.
_SENTENCE_WEIGHT = 35.0
# How much a document adds to its score that names the first year of a question, and over how many years before it this
# falls to 1/e; fitted on the training pages of Time-Sensitive QA.
_YEAR_WEIGHT, _YEAR_DECAY = 12.0, 2.7
_QUESTIONS = 256  # questions whose vectors are kept


class OwnKVReader(Reader):
    """Reads a bank with the model that wrote it.

    Args:
        model: the model.
        bank: a bank that it wrote, or a snapshot of one.
        config: how many bytes of decoded rows are kept. Attention is always to all rows that can matter.
        prior: scores all documents of the bank for a question, together with the model's sentence encoder.

    Raises:
        ConfigError: for an attention strategy other than `streaming`.
    """

    model: OwnKVModel
    bank: Contents
    sees_some = True

    def __init__(self, model: OwnKVModel, bank: Contents, config: AttentionConfig, prior: BM25Retriever) -> None:
        if config.strategy != "streaming":
            raise ConfigError(
                f"strategy {config.strategy!r} is one of aggregation networks, and this model attends with its LM; "
                "choose 'streaming'"
            )
        super().__init__(bank, config)
        self.model = model
        self._prior = prior
        self._sentences = None if model.sentences is None else SentenceKeys(model.sentences, bank)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()  # by key of a row: its decoded keys and values
        self._row_keys = bank.row_keys
        self._scores: OrderedDict[tuple[int, str, bool], list[float]] = OrderedDict()

    def follow(self, bank: BankContents) -> None:
        assert isinstance(bank, Contents)
        if bank.history != self.bank.history:
            self._kept.clear()
            self._scores.clear()
            if self._sentences is not None:
                self._sentences = SentenceKeys(self._sentences.encoder, bank)
        self.bank = bank
        if self._sentences is not None:
            self._sentences.follow(bank)
        if bank.row_keys is not self._row_keys:
            self._row_keys = bank.row_keys
            held = set(self._row_keys.tolist()) if self._kept else set()
            for key in [key for key in self._kept if key not in held]:
                del self._kept[key]

    @property
    def recent_questions(self) -> tuple[int, int]:
        return 0, 0

    @torch.no_grad()
    def aggregate(
        self,
        questions: Sequence[str],
        allowed: Container[str] | None = None,
        *,
        ids: Sequence[Sequence[int]] | None = None,
        mass: bool = False,
        read: Sequence[Sequence[str]] | None = None,
    ) -> Aggregated:
        self._visible(allowed)  # raises for an empty bank, and if nothing is allowed
        retrieved = read or [()] * len(questions)
        biases = map(self._biases, self._probable(questions, allowed), retrieved)
        candidates = [list(self._candidates(*each)) for each in zip(questions, biases, strict=True)]
        # Of documents that a retriever has found, none is left out for want of room: they are not in the prompt either.
        wanted = [self._best_rows(*each) for each in zip(candidates, retrieved, strict=True)]
        chosen = [self.model.chosen(*each) for each in zip(candidates, wanted, strict=True)]
        decoded = self._decoded([key for rows in chosen for key, _ in rows])
        phi = ReadRows([[ReadRow(decoded[key], bias) for key, bias in rows] for rows in chosen])
        unseen = [_unseen(*each) for each in zip(candidates, chosen, strict=True)]
        return Aggregated(phi, torch.tensor(unseen), mass=self._mass(chosen) if mass else None)

    @torch.no_grad()
    def prior_evidence(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor:
        self._visible(allowed)
        best = torch.zeros(len(questions), 2)
        for row, scores in zip(best, self._probable(questions, allowed), strict=True):
            if scores:
                found = torch.tensor(list(scores.values()))
                share = (self.model.config.bias_scale * found).softmax(0).max()
                row[0], row[1] = found.max(), share_odds(share) if len(found) > 1 else 0.0
        return best

    def apart(self, hits: Sequence[Hit], allowed: Container[str] | None = None) -> tuple[list[str], list[Hit]]:
        parts = [part for hit in hits for part in ([hit] if hit.document_id else self._parts(hit, allowed))]
        read: dict[str, None] = {}
        others = []
        for part in parts:
            if (allowed is None or part.document_id in allowed) and self._holds(part):
                read[part.document_id] = None
            else:
                others.append(part)
        return list(read), others

    def text_of(self, document_id: str) -> str | None:
        kept = super().text_of(document_id)
        if kept is not None or document_id not in self._prior:
            return kept
        [document] = self._prior.documents([document_id])
        return document.text if self._holds(Hit(document_id, document.text, 0.0)) else None

    def _holds(self, hit: Hit) -> bool:
        """True if the bank holds a document with this text."""
        if hit.document_id not in self.bank:
            return False
        entry = self.bank[hit.document_id]
        return entry.members[entry.place(hit.document_id)].matches(hit.text)

    def _parts(self, hit: Hit, allowed: Container[str] | None) -> list[Hit]:
        """The documents of the bank in a text, and what stands between them."""
        text = hit.text.strip()
        if not text:
            return [hit]
        blank = [match.span() for match in _BLANK_LINE.finditer(text)]
        starts, ends = [0, *(end for _, end in blank)], [*(start for start, _ in blank), len(text)]
        paragraphs = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        asked = list(dict.fromkeys([text, *paragraphs]))
        found = dict(zip(asked, self._prior.retrieve(asked, _ALIKE, allowed=allowed), strict=True))
        parts: list[Hit] = []
        done = 0
        for start, paragraph in zip(starts, paragraphs, strict=True):
            here = [
                (end, one)
                for one in (*found[paragraph], *found[text])
                if text.startswith(one.text.strip(), start)
                and (end := start + len(one.text.strip())) in ends
                and self._holds(one)
            ]
            if start < done or not here:
                continue
            if between := text[done:start].strip():
                parts.append(replace(hit, text=between))
            done, document = max(here, key=lambda one: one[0])
            parts.append(replace(document, score=hit.score))
        if not parts:
            return [hit]
        return [*parts, replace(hit, text=text[done:].strip())] if done < len(text) else parts

    def _biases(self, scores: Mapping[str, float], retrieved: Sequence[str]) -> dict[str, float]:
        """The bias of each document that the prior or a retriever has found."""
        biases = {name: self.model.config.bias_scale * score for name, score in scores.items()}
        best = max(biases.values(), default=0.0)
        for rank, name in enumerate(retrieved, 1):
            least = best + _FOUND_FIRST - _RANK_WEIGHT * math.log(rank)
            biases[name] = max(biases.get(name, least), least)
        return biases

    def _probable(self, questions: Sequence[str], allowed: Container[str] | None) -> list[dict[str, float]]:
        """The documents that the prior finds for each question, and their scores."""
        hits = self._prior.retrieve(questions, _CANDIDATES, allowed=allowed)
        found = [{hit.document_id: hit.score for hit in own} for own in hits]
        if self._sentences is not None:
            found = self._with_sentences(self._sentences, questions, found, allowed)
        for question, scores in zip(questions, found, strict=True):
            if self.model.use_years and years_in(question):
                texts = [document.text for document in self._prior.documents(list(scores))]
                for name, more in zip(scores, _of_year(question, texts), strict=True):
                    scores[name] += more
        return found

    def _with_sentences(
        self,
        sentences: SentenceKeys,
        questions: Sequence[str],
        found: Sequence[Mapping[str, float]],
        allowed: Container[str] | None,
    ) -> list[dict[str, float]]:
        """The documents that BM25 and the sentence encoder find for each question, and the scores of both together."""
        nearest = sentences.nearest(questions, _CANDIDATES, allowed)
        named = self.bank.documents_of([key for keys in nearest for key in keys])
        both = [{*own, *(named[key] for key in keys)} for own, keys in zip(found, nearest, strict=True)]
        names = sorted(set().union(*both))
        rows, words = self.bank.rows_of(names), self._prior.scores(questions, names, allowed=allowed)
        return [
            {
                name: score + _SENTENCE_WEIGHT * max(sentences.cosines(question, rows[name]))
                for name, score in zip(names, scores, strict=True)
                if name in own and name in rows
            }
            for question, own, scores in zip(questions, both, words, strict=True)
        ]

    def _candidates(self, question: str, biases: Mapping[str, float]) -> Iterator[tuple[int, float, int]]:
        """Key, bias and number of tokens of each row of some documents."""
        rows = self.bank.rows_of(list(biases))
        keys = [key for own in rows.values() for key in own]
        tokens = dict(zip(keys, self.bank.token_counts(keys), strict=True))
        for name, bias in biases.items():
            own = rows.get(name, [])
            lower = self._below_best(question, name, own) if len(own) > 1 else [0.0]
            for key, less in zip(own, lower):
                yield key, bias - self.model.config.bias_scale * less, tokens[key]

    def _best_rows(self, candidates: Sequence[tuple[int, float, int]], names: Sequence[str]) -> set[int]:
        """Of some documents the key of the best row each."""
        bias = {key: of_row for key, of_row, _ in candidates}
        return {max(keys, key=bias.__getitem__) for keys in self.bank.rows_of(names).values()}

    def _below_best(self, question: str, name: str, keys: Sequence[int]) -> list[float]:
        """For each row of a long document, by how much the prior scores it lower than the best of them."""
        known = keys[0], question, self.model.use_years
        if known not in self._scores:
            [document] = self._prior.documents([name])
            texts = self.model.chunks(document.text)
            parts = BM25Retriever()
            parts.add([Document(str(place), text) for place, text in enumerate(texts)])
            [scores] = parts.scores([question], [str(place) for place in range(len(parts))])
            if self._sentences is not None:
                cosines = self._sentences.cosines(question, keys)
                scores = [score + _SENTENCE_WEIGHT * cosine for score, cosine in zip(scores, cosines, strict=True)]
            if self.model.use_years:
                scores = [score + more for score, more in zip(scores, _of_year(question, texts), strict=True)]
            self._scores[known] = [max(scores) - score for score in scores]
            while len(self._scores) > 10 * _CANDIDATES:
                self._scores.popitem(last=False)
        return self._scores[known]

    def _decoded(self, keys: Sequence[int]) -> dict[int, Tensor]:
        """Keys and values of rows; those that are not kept are read and decoded."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._kept]
        if missing:
            self._kept |= zip(missing, self.model.decode_all(self.bank.codes(missing)), strict=True)
        for key in keys:
            self._kept.move_to_end(key)
        found = {key: self._kept[key] for key in keys}
        size = sum(part.nbytes for part in self._kept.values())
        while size > self.config.cache_bytes and self._kept:
            size -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _mass(self, chosen: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
        """The prior of each row that a question sees, as a share of 1, `[B, K]`."""
        mass = torch.zeros(len(chosen), len(self._row_keys))
        for row, keys in zip(mass, chosen, strict=True):
            if keys:
                places = torch.searchsorted(self._row_keys, torch.tensor([key for key, _ in keys]))
                row[places] = torch.tensor([bias for _, bias in keys]).softmax(0)
        return mass


def _of_year(question: str, texts: Sequence[str]) -> list[float]:
    """What the first year that a question names adds to the score of each text: 0 without one.

    "In 2001 he moved to Porto" answers "Which team did he play for in 2003?", so it is the more, the nearer the last
    year up to then is that a text names.
    """
    asked = years_in(question)[:1]
    scores = []
    for text in texts:
        gaps = [year - first for first in asked for year in years_in(text) if year <= first]
        scores.append(_YEAR_WEIGHT * math.exp(max(gaps) / _YEAR_DECAY) if gaps else 0.0)
    return scores


def _unseen(candidates: Sequence[tuple[int, float, int]], chosen: Sequence[tuple[int, float]]) -> float:
    """The share of the prior on candidates that were not chosen."""
    if not candidates:
        return 0.0
    shares: list[float] = torch.tensor([bias for _, bias, _ in candidates]).softmax(0).tolist()
    seen = {key for key, _ in chosen}
    return sum(share for (key, _, _), share in zip(candidates, shares, strict=True) if key not in seen)


class SentenceKeys:
    """The part of the document prior that also finds rows that share no word with a question.

    Args:
        encoder: the encoder that made the summaries of the bank's rows: of each half of a row one vector.
        bank: the bank, or a snapshot of it.
    """

    def __init__(self, encoder: Encoder, bank: Contents) -> None:
        self.encoder = encoder
        self._questions: OrderedDict[str, Tensor] = OrderedDict()
        self._row_keys = torch.empty(0, dtype=torch.int64)
        self._vectors = torch.empty(0, 2, encoder.width)  # [N, 2, P], of length 1: two halves of each row
        self.follow(bank)

    def follow(self, bank: Contents) -> None:
        """Reads another state of the bank. Rows come in the order in which they were added, new ones last."""
        self._bank = bank
        if bank.row_keys is self._row_keys:
            return
        first, remains = followed(self._row_keys, bank.row_keys)
        new = [functional.normalize(part.summaries.unflatten(1, (2, -1)), dim=-1) for part in bank.overview(first)]
        self._vectors = torch.cat([self._vectors[remains], *new])
        self._row_keys = bank.row_keys

    def nearest(self, questions: Sequence[str], count: int, allowed: Container[str] | None) -> list[list[int]]:
        """The keys of the rows with the highest cosines, for each question.

        Args:
            questions: texts.
            count: number of rows for each question, or all if there are fewer.
            allowed: ids of the documents that may be found; None for all.
        """
        rows = torch.arange(len(self._row_keys))
        if allowed is not None:
            rows = self._bank.visible_rows(allowed).nonzero()[:, 0]
        vectors = self._vectors if allowed is None else self._vectors[rows]
        cosines = (self._encoded(questions) @ vectors.flatten(0, 1).T).unflatten(1, (-1, 2)).amax(2)
        best = cosines.topk(min(count, len(rows))).indices
        found: list[list[int]] = self._row_keys[rows[best]].tolist()
        return found

    def cosines(self, question: str, row_keys: Sequence[int]) -> list[float]:
        """The cosine of a question with the nearer half of each of some rows, by their keys."""
        places = torch.searchsorted(self._row_keys, torch.tensor(row_keys, dtype=torch.int64))
        cosines = self._vectors[places].double() @ self._encoded([question])[0].double()
        nearer: list[float] = cosines.amax(1).tolist()
        return nearer

    def _encoded(self, questions: Sequence[str]) -> Tensor:
        """Vectors of questions, `[B, P]`, of length 1."""
        missing = [text for text in dict.fromkeys(questions) if text not in self._questions]
        if missing:
            vectors = self.encoder.questions(missing)
            check_finite(vectors, [f"question {text!r}" for text in missing])
            self._questions |= zip(missing, functional.normalize(torch.from_numpy(vectors)), strict=True)
        found = torch.stack([self._questions[text] for text in questions])
        for text in questions:
            self._questions.move_to_end(text)
        while len(self._questions) > _QUESTIONS:
            self._questions.popitem(last=False)
        return found
