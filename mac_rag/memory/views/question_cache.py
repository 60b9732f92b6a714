"""What recent questions found in a bank, so that a question asked again costs nothing.

Response modes of LlamaIndex such as `refine` ask the same question of one node after the other, and an evaluation asks
it with one retriever after the other; phi* depends on neither.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

_BYTES = 128 << 20  # of phi* that are kept


class RecentQuestions:
    """Keeps phi* and the discarded prior of the questions asked last, as long as the state they depend on lasts."""

    def __init__(self) -> None:
        self._state: Hashable = None
        self._found: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def look_up(
        self, questions: Sequence[str], state: Hashable, compute: Callable[[Sequence[str]], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """phi* `[B, T, D]` and discarded prior `[B]` of each question.

        Args:
            questions: B texts; of equal ones, one is computed.
            state: all else that the result depends on.
            compute: gives both for questions that are new in this state.
        """
        if state != self._state:
            self._found.clear()
            self._state = state
        new = [question for question in dict.fromkeys(questions) if question not in self._found]
        if new:
            self._found.update(zip(new, zip(*compute(new), strict=True), strict=True))
        for question in questions:
            self._found.move_to_end(question)
        phi, discarded = zip(*(self._found[question] for question in questions), strict=True)
        while len(self._found) * phi[0].nbytes > _BYTES:
            self._found.popitem(last=False)
        return torch.stack(phi), torch.stack(discarded)
