"""The protocol of the paper's published code (github.com/jihoontack/MAC, d75891d), beside ours.

| | ours (`strict`) | `published` |
|---|---|---|
| stream | the first documents | documents in a shuffled order; a title or article stays together |
| documents beyond the amortization network's limit | chunks | cut at the limit |
| decoding | the model's own: greedy, copied spans, `memory_weight` | `LM(d + x; phi*)`, 12 diverse beams in 4 groups |
| longest answer | the model's own | 16 tokens |
| reference | the accepted answer that fits best | the shortest accepted answer |
| exact match | equal after normalization | the prediction begins with the reference |

The prompt belongs to the model: the paper's presets ask the question alone, as published. In the published choice of
SQuAD's test documents, a paragraph is in the bank once for each of its questions; here it is there once, as the paper
says. Its lists of chosen documents were drawn with another generator, so a choice by our seeds has other documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eval.harness.scales import Protocol
from mac_rag.data.archivalqa import split_paragraph_id
from mac_rag.data.metrics import best_over, exact_match, f1, prefix_match
from mac_rag.data.types import Document, QADataset, Question, first_documents
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import AmortizedModel, MACModel
from mac_rag.nn.modulation import Modulation
from mac_rag.progress import progress_bar
from pipelines.tasks.open_book import generate

_BEAMS, _GROUPS, _PENALTY, _NEW_TOKENS = 12, 4, 10.0, 16
_NEVER = -1e9  # the score of a beam that does not exist yet


def answers_to(
    base_lm: BaseLM,
    prompts: Sequence[Sequence[int]],
    protocol: Protocol,
    *,
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Answers of an LM alone to prompts, decoded by a protocol; `max_new_tokens` is that of ours."""
    if protocol == "strict":
        return generate(base_lm, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    return in_batches(lambda batch: searched(base_lm, batch), prompts, batch_size)


def with_memory(model: AmortizedModel, prompts: Sequence[str | FittedPrompt], phi: Tensor | None) -> list[str]:
    """Answers by the published decoding: `LM(d + x; phi*)`, or `LM(d + x)` for None.

    Args:
        prompts: B questions, or what `MACModel.fit_to_window` returned.
        phi: phi* `[B, T, D]`.
    """
    fitted = [model.fit_to_window(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    read = [model.ids_read(prompt, with_memory=phi is not None) for prompt in fitted]
    return searched(model.base_lm, read, None if phi is None else model.modulation(phi))


def in_batches(answer: Callable[[Sequence[Any]], list[str]], asked: Sequence[Any], size: int) -> list[str]:
    """The answers to questions or prompts, of which `answer` takes so many at once."""
    texts: list[str] = []
    with progress_bar("answer", len(asked)) as bar:
        for first in range(0, len(asked), size):
            texts += answer(asked[first : first + size])
            bar.advance(min(size, len(asked) - first))
    return texts


def scores(protocol: Protocol, prediction: str, question: Question) -> dict[str, float]:
    """`em`, `f1` and `em_prefix` of an answer, 0 to 1, by a protocol.

    Examples:
        >>> asked = Question("q", "Where?", ("in Malmo", "Malmo"))
        >>> scores("published", "Malmo Harbour", asked) == {"em": 1.0, "f1": 2 / 3, "em_prefix": 1.0}
        True
        >>> scores("strict", "in Malmo", asked)["f1"]
        1.0
    """
    if protocol == "strict":
        exact, answers = exact_match, question.answers
    else:
        exact, answers = prefix_match, (min(question.answers, key=len),)
    metrics = {"em": exact, "f1": f1, "em_prefix": prefix_match}
    return {name: best_over(metric, prediction, answers) for name, metric in metrics.items()}


def shuffled_choice(dataset: QADataset, count: int | None, seed: int) -> QADataset:
    """At most `count` documents of a shuffled stream with their questions.

    Documents of one article (SQuAD: of one title; ArchivalQA: by their number) stay together, in order.
    """
    groups: dict[str, list[tuple[int, Document]]] = {}
    for document in dataset.documents:
        article, number = document.id, 0
        if dataset.name == "archivalqa":
            article, number = split_paragraph_id(document.id) or (document.id, 0)
        elif dataset.name == "squad":
            article = str(document.metadata["title"])
        groups.setdefault(article, []).append((number, document))
    articles = list(groups.values())
    random.Random(seed).shuffle(articles)
    documents = [document for article in articles for _, document in sorted(article, key=lambda pair: pair[0])]
    place = {document.id: index for index, document in enumerate(documents)}
    questions = sorted(dataset.questions, key=lambda question: place.get(question.document_id or "", len(place)))
    shuffled = replace(dataset, documents=tuple(documents), questions=tuple(questions))
    return shuffled if count is None else first_documents(shuffled, count)


def cut(model: AmortizedModel, documents: Sequence[Document]) -> list[Document]:
    """The documents, cut where the amortization network's limit ends."""
    return [replace(document, text=model.amortization.split(document.text)[0]) for document in documents]


def departures(protocol: Protocol, model: MACModel, *, greedy: bool = False) -> list[str]:
    """Notes for a result: where it departs from the published protocol. `greedy`: True if CCM is among its rows."""
    if protocol == "strict":
        return []
    notes = ["CCM, which the published code does not have, decodes greedily"] if greedy else []
    asked = model.config.prompt.question
    if asked != "{question}":
        notes.append(f"the model asks {asked!r}, as it learned; the published prompt is the question alone")
    return notes


@torch.no_grad()
def searched(
    base_lm: BaseLM,
    prompts: Sequence[Sequence[int]],
    modulation: Modulation | None = None,
    *,
    groups: int = _GROUPS,
    size: int = _BEAMS // _GROUPS,
    penalty: float = _PENALTY,
    most: int = _NEW_TOKENS,
) -> list[str]:
    """Answers by diverse beam search (Vijayakumar et al., 2016), as transformers had it until 4.56.

    Each step, a group of beams chooses its tokens after the groups before it: `penalty` is subtracted from the
    log-probability of a token for each beam before that chose it in this step. A group is done when it has as many
    ended answers as beams. The answer is that of the highest mean log-probability, penalties included.

    Args:
        prompts: token ids of B rows.
        modulation: modulation of the rows; None for the LM alone.
        groups, size: number of groups, and of beams in each.
        most: largest number of tokens of an answer.
    """
    rows, device, tokenizer = len(prompts), base_lm.device, base_lm.tokenizer
    ends, pad = set(base_lm.end_tokens), int(tokenizer.pad_token_id)
    totals = torch.full((rows, groups, size), _NEVER, device=device)
    totals[..., 0] = 0  # all beams are equal at first
    ended: list[list[list[tuple[float, Tensor]]]] = [[[] for _ in range(groups)] for _ in range(rows)]
    done = torch.zeros(rows, groups, dtype=torch.bool)
    written = torch.zeros(rows * groups * size, 0, dtype=torch.long, device=device)
    own = torch.arange(len(written), device=device).view(rows, groups, size)
    steps = base_lm.steps(prompts, modulation)
    logits = next(steps).repeat_interleave(groups * size, 0)  # a prompt is read once for all of its beams
    for length in range(1, most + 1):
        vocabulary = logits.shape[-1]
        log_probabilities = logits.float().log_softmax(-1).view(rows, groups, size, vocabulary)
        chosen, parents = torch.full_like(own, pad), own.clone()
        counts = torch.zeros(rows, vocabulary, device=device)
        for group in range(groups):
            candidates = log_probabilities[:, group] - penalty * counts[:, None] + totals[:, group, :, None]
            best, places = candidates.flatten(1).topk((1 + len(ends)) * size)
            for row in (~done[:, group]).nonzero()[:, 0].tolist():
                beam, answers, begin = 0, ended[row][group], int(own[row, group, 0])
                for rank, (total, place) in enumerate(zip(best[row].tolist(), places[row].tolist(), strict=True)):
                    parent, token = begin + place // vocabulary, place % vocabulary
                    if token not in ends:
                        chosen[row, group, beam], totals[row, group, beam] = token, total
                        parents[row, group, beam] = parent
                        beam += 1
                    elif rank < size:
                        answers.append((total / length, written[parent]))
                        answers.sort(key=lambda answer: -answer[0])
                        del answers[size:]
                    if beam == size:
                        break
                done[row, group] = len(answers) == size
            counts.scatter_add_(1, chosen[:, group], torch.ones_like(chosen[:, group], dtype=counts.dtype))
        followed = parents.flatten()
        written = torch.cat([written[followed], chosen.view(-1, 1)], 1)
        if length == most or done.all():
            break
        logits = steps.send((followed if length > 1 else followed // (groups * size), chosen.flatten()))
    texts = []
    for row, of_row in enumerate(ended):
        for group in (~done[row]).nonzero()[:, 0].tolist():
            mean = totals[row, group] / written.shape[1]
            open_beams = zip(mean.tolist(), written[own[row, group]], strict=True)
            of_row[group] = sorted([*of_row[group], *open_beams], key=lambda answer: -answer[0])[:size]
        answer = max((answer for group in of_row for answer in group), key=lambda pair: pair[0])[1]
        texts.append(tokenizer.decode(answer.tolist(), skip_special_tokens=True).strip())
    return texts
