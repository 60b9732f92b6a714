"""First marks of the slots of phi*: the less probable the document prior holds a slot's document, the less it is heard.

Without marks the LM reads the tokens of all slots alike, and documents that do not answer drown the one that does. A
mark can turn keys away from what the LM asks for. It is fitted by gradient descent: behind all slots the LM is to
predict the answers as it does behind the first one alone. What a slot says is still there, and training can make it
louder where that helps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.data.types import QADataset
from mac_rag.model import MACModel
from mac_rag.nn.memory_slots import RankedSlots
from mac_rag.nn.memory_tokens import MemoryTokens
from pipelines.initializers.progress import init_progress

_QUESTIONS = 128
_BATCH = 32
_PASSES = 20
_RATE = 3e-3
_ENOUGH = 0.1  # share of the divergence without marks at which the slots are quiet enough
_UNANSWERED = 40  # characters of its document that are predicted behind a question without an answer


@torch.no_grad()
def fit_slot_marks(model: MACModel, data: QADataset) -> None:
    """Fits the mark of faintness of a model's slots; a model without slots stays as it is.

    Args:
        model: a model in evaluation mode whose memory tokens the LM can read; it is changed in place.
        data: the training set, of which some documents and a question of each are used.
    """
    slots, prompts = model.aggregation.slots, model.base_lm.prompts
    if slots is None:
        return
    known = data.questions_by_document()
    pairs = [(document, question) for document in data.documents for question in known[document.id][:1]]
    pairs = pairs[:: -(-len(pairs) // _QUESTIONS)]
    bank = model.aggregation.project(
        MemoryTokens.cat([model.amortization([model.amortization.ids(document.text)]) for document, _ in pairs])
    )
    encoded = model.input_encoder([model.input_encoder.ids(question.question) for _, question in pairs])
    cutoff, slots.cutoff = slots.cutoff, None  # as in training, the LM hears all slots
    by_slot = model.aggregation(encoded, bank)[0].unflatten(1, (slots.count, -1))
    ranked = slots.ranked(slots.first(model.aggregation.prior_scores(encoded, bank)))
    slots.cutoff = cutoff
    questions = [prompts.prompt(question.question) for _, question in pairs]
    answers = [prompts.answer((q.answers or [d.text[:_UNANSWERED]])[0]) for d, q in pairs]
    batches = [slice(first, first + _BATCH) for first in range(0, len(pairs), _BATCH)]

    def predictions(part: slice, phi: Tensor) -> Tensor:
        return (
            model.base_lm.answer_logits(questions[part], answers[part], model.modulation(phi)).float().log_softmax(-1)
        )

    def divergence(part: slice, expected: Tensor) -> Tensor:
        of_part = RankedSlots(ranked.scores[part], ranked.left_out[part])
        found = predictions(part, slots.marked(by_slot[part].flatten(0, 1), of_part))
        return functional.kl_div(found, expected, log_target=True, reduction="batchmean")

    targets = [(part, predictions(part, by_slot[part, 0])) for part in batches]
    enough = _ENOUGH * sum(float(divergence(*target)) for target in targets)
    optimizer = torch.optim.Adam([slots.faint], lr=_RATE)
    with init_progress("fit the marks of slots", _PASSES) as bar:
        for _ in range(_PASSES):
            total = 0.0
            for target in targets:
                with torch.enable_grad():
                    loss = divergence(*target)
                    slots.faint.grad = torch.autograd.grad(loss, slots.faint)[0]
                optimizer.step()
                total += float(loss)
            bar.advance()
            if total <= enough:
                break
    slots.faint.grad = None
