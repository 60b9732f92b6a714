"""The two most alike of a changing set of vectors, without a distance matrix."""

from __future__ import annotations

import torch
from torch import Tensor

# Vectors whose neighbours are searched in one pass over the set: reading it costs more than the arithmetic.
_BLOCK = 128
# Neighbours that float32 proposes and float64 decides between.
_CANDIDATES = 4


class ClosestPair:
    """A set of vectors that always knows its pair of highest cosine similarity.

    Each vector keeps the nearest of those that were there when it came, and that similarity as a bound. A neighbour
    that has gone leaves the bound too high, never too low: what remains was farther away, and whatever comes later
    looks for its own neighbour among all. So only vectors whose bound is at the top and whose neighbour has gone are
    searched again, all of them in one pass over the set.

    A change of the set costs about one such pass, O(n W); only the first pair of n vectors costs as much as all
    similarities, but block by block and never in memory at once. The set keeps one float32 copy of the vectors.
    Similarities are decided in float64.

    Args:
        capacity: most vectors at a time.
        width: W, of a vector.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self._vectors = torch.empty(capacity, width)
        self._norms = torch.ones(capacity, dtype=torch.float64)
        self._keys = torch.full((capacity,), -1)  # of each slot; -1 is a free one
        self._bounds = torch.full((capacity,), -torch.inf, dtype=torch.float64)
        self._nearest = torch.zeros(capacity, dtype=torch.int64)  # slot of the neighbour,
        self._nearest_keys = torch.full((capacity,), -2)  # and whose it was then: the slot may have changed hands
        self._seen = torch.zeros(capacity, dtype=torch.int64)  # slots that were in use when the vector came
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity))[::-1]
        self._used = 0  # slots from here on were never taken, and their memory never touched

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, key: int, vector: Tensor) -> None:
        """Adds a vector `[W]` under a key of 0 or more that the set does not hold."""
        slot = self._free.pop()
        self._used = max(self._used, slot + 1)
        self._slots[key] = slot
        self._keys[slot] = key
        self._vectors[slot] = vector
        self._norms[slot] = vector.double().norm().clamp(min=1e-300)
        self._bounds[slot] = torch.inf
        self._nearest_keys[slot] = -2
        self._seen[slot] = self._used

    def remove(self, key: int) -> None:
        slot = self._slots.pop(key)
        self._free.append(slot)
        self._keys[slot] = -1
        self._bounds[slot] = -torch.inf

    def pair(self) -> tuple[int, int]:
        """The keys of the most similar pair, the lower first.

        Raises:
            ValueError: for fewer than two vectors.
        """
        if len(self) < 2:
            raise ValueError(f"a pair takes two vectors, the set holds {len(self)}")
        while True:
            keys, bounds = self._keys[: self._used], self._bounds[: self._used]
            gone = self._keys[self._nearest[: self._used]] != self._nearest_keys[: self._used]
            best_known, best = bounds.masked_fill(gone, -torch.inf).max(0)
            unknown = (gone & (bounds > best_known)).nonzero().squeeze(1)
            if not len(unknown):
                first, second = sorted((int(keys[best]), int(self._nearest_keys[best])))
                return first, second
            # Those never searched for come first, in order: the early ones have few others to be compared with.
            new = unknown[bounds[unknown] == torch.inf]
            highest = new if len(new) else unknown[bounds[unknown].topk(min(_BLOCK, len(unknown))).indices]
            self._search(highest[:_BLOCK])

    def _search(self, slots: Tensor) -> None:
        """Finds the nearest neighbours of the vectors in some slots."""
        seen = int(self._seen[slots].max())
        vectors, norms = self._vectors[:seen], self._norms[:seen]
        similarity = (vectors @ self._vectors[slots].T).T / norms.float()  # [n, seen], short of the slots' own norms
        similarity[:, self._keys[:seen] < 0] = -torch.inf
        similarity.scatter_(1, slots[:, None], -torch.inf)
        proposed = similarity.topk(min(_CANDIDATES, seen)).indices  # [n, c]
        exact = (vectors[proposed].double() @ self._vectors[slots].double()[:, :, None]).squeeze(2)
        exact /= norms[proposed] * norms[slots, None]
        exact[similarity.gather(1, proposed) == -torch.inf] = -torch.inf
        self._bounds[slots], chosen = exact.max(1)
        self._nearest[slots] = proposed.gather(1, chosen[:, None]).squeeze(1)
        self._nearest_keys[slots] = self._keys[self._nearest[slots]]
