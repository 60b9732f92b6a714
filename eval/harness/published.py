"""The protocol of the paper's published code (github.com/jihoontack/MAC, d75891d), beside ours.

| | ours (`strict`) | `published` |
|---|---|---|
| stream | the first documents | documents in a shuffled order; a title or article stays together |
| documents beyond the amortization network's limit | chunks | cut at the limit |
| decoding | the model's own: greedy, or copied spans | diverse beam search: 12 beams in 4 groups, penalty 10 |
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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.harness.scales import Protocol
from mac_rag.data.archivalqa import split_paragraph_id
from mac_rag.data.metrics import best_over, exact_match, f1, prefix_match
from mac_rag.data.types import Document, QADataset, Question, first_documents
from mac_rag.lm.decoding import BeamSearch
from mac_rag.model import AmortizedModel, MACModel

_BEAMS, _GROUPS, _PENALTY, _NEW_TOKENS = 12, 4, 10.0, 16
_NEVER = -1e9  # the score of a beam that does not exist yet


def decoding(protocol: Protocol) -> dict[str, Any]:
    """Arguments of `BaseLM.generate` and `MACModel.generate` that decode as a protocol says."""
    if protocol == "strict":
        return {}
    search: BeamSearch = partial(diverse_beam_search, groups=_GROUPS, penalty=_PENALTY)
    return {"num_beams": _BEAMS, "beam_search": search, "max_new_tokens": _NEW_TOKENS}


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


def diverse_beam_search(
    lm: Any,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    generation_config: Any,
    *,
    groups: int,
    penalty: float,
    **inputs: Any,
) -> Tensor:
    """Diverse beam search (Vijayakumar et al., 2016), as transformers had it until 4.56.

    Each step, a group of beams chooses its tokens after the groups before it: `penalty` is subtracted from the
    log-probability of a token for each beam before that chose it in this step. A group is done when it has as many
    ended answers as beams. The answer is that of the highest mean log-probability, penalties included.

    Args:
        lm: the LM.
        input_ids: padded prompts `[B * beams, L]`, each repeated for its beams.
        logits_processor: changes log-probabilities before the search sees them.
        generation_config: with the number of beams, which `groups` divides, the largest length, and the end tokens.
        inputs: the LM's further inputs, a cache with the prefix of a modulation among them.

    Returns:
        Prompt and answer of each of the B rows, padded on the right.
    """
    inputs.pop("stopping_criteria", None)  # of transformers: the largest length, which the loop sees itself
    beams, start = generation_config.num_beams, input_ids.shape[1]
    size, rows, device = beams // groups, len(input_ids) // beams, input_ids.device
    ends, pad = set(generation_config._eos_token_tensor.tolist()), int(generation_config._pad_token_tensor)
    totals = torch.full((rows, groups, size), _NEVER, device=device)
    totals[..., 0] = 0  # all beams are equal at first
    ended: list[list[list[tuple[float, Tensor]]]] = [[[] for _ in range(groups)] for _ in range(rows)]
    done = torch.zeros(rows, groups, dtype=torch.bool)
    written = input_ids
    while written.shape[1] < generation_config.max_length and not done.all():
        first = written.shape[1] == start
        read = lm.prepare_inputs_for_generation(
            written, next_sequence_length=start if first else 1, is_first_iteration=first, **inputs
        )
        output = lm(**read, return_dict=True)
        inputs = lm._update_model_kwargs_for_generation(output, inputs)
        log_probabilities = logits_processor(written, output.logits[:, -1].float().log_softmax(-1))
        vocabulary = log_probabilities.shape[-1]
        log_probabilities = log_probabilities.view(rows, groups, size, vocabulary)
        chosen = torch.full((rows, groups, size), pad, device=device)
        own = torch.arange(len(input_ids), device=device).view(rows, groups, size)
        parents = own.clone()
        counts = torch.zeros(rows, vocabulary, device=device)
        length = written.shape[1] + 1 - start
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
                        answers.append((total / length, written[parent, start:]))
                        answers.sort(key=lambda answer: -answer[0])
                        del answers[size:]
                    if beam == size:
                        break
                done[row, group] = len(answers) == size
            counts.scatter_add_(1, chosen[:, group], torch.ones_like(chosen[:, group], dtype=counts.dtype))
        inputs["past_key_values"].reorder_cache(parents.flatten())
        written = torch.cat([written[parents.flatten()], chosen.view(-1, 1)], 1)
    open_beams = written.view(rows, groups, size, -1)[..., start:]
    found = torch.full((rows, generation_config.max_length), pad, device=device)
    found[:, :start] = input_ids[::beams]
    for row in range(rows):
        for group in (~done[row]).nonzero()[:, 0].tolist():
            mean = totals[row, group] / open_beams.shape[-1]
            answers = [*ended[row][group], *zip(mean.tolist(), open_beams[row, group], strict=True)]
            ended[row][group] = sorted(answers, key=lambda answer: -answer[0])[:size]
        answer = max((answer for group in ended[row] for answer in group), key=lambda pair: pair[0])[1]
        found[row, start : start + len(answer)] = answer
    return found
