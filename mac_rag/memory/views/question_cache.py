"""A cache of phi* for recent questions.

LlamaIndex's response mode `refine` asks the same question for one node after the other, and an evaluation asks it with
one retriever after the other; phi* depends on neither.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


class RecentQuestions:
    """Keeps phi* and the discarded prior of the most recent questions, until the state that they depend on changes.

    Args:
        max_bytes: memory for phi* of all cached questions; the least recently used ones go first.

    Attributes:
        hits, misses: questions that were found here, and that were not.
    """

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self.hits = self.misses = 0
        self._max_bytes = max_bytes
        self._state: Hashable = None
        self._results: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def look_up(
        self, questions: Sequence[str], state: Hashable, compute: Callable[[Sequence[str]], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns cached results, and computes the missing ones.

        Args:
            questions: B texts; equal ones are computed once.
            state: everything else that the result depends on; a new state empties the cache.
            compute: called with the questions that are not cached; returns phi* `[n, T, D]` and discarded prior `[n]`.

        Returns:
            phi* `[B, T, D]` and discarded prior `[B]`.
        """
        if state != self._state:
            self._results.clear()
            self._state = state
        new = [question for question in dict.fromkeys(questions) if question not in self._results]
        self.misses += len(new)
        self.hits += len(questions) - len(new)
        if new:
            # A copy of each row: a view of one would keep the whole batch.
            rows = ((phi.clone(), discarded.clone()) for phi, discarded in zip(*compute(new), strict=True))
            self._results.update(zip(new, rows, strict=True))
        for question in questions:
            self._results.move_to_end(question)
        phi, discarded = zip(*(self._results[question] for question in questions), strict=True)
        while len(self._results) * phi[0].nbytes > self._max_bytes:
            self._results.popitem(last=False)
        return torch.stack(phi), torch.stack(discarded)
