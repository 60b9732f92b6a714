"""The most similar pair of a changing set of vectors, without a distance matrix."""

from __future__ import annotations

import torch
from torch import Tensor

# Vectors whose neighbours are searched in one pass over the set: reading the set costs more than the arithmetic.
_BLOCK = 128
# Nearest neighbours by float32 similarity, among which float64 decides.
_CANDIDATES = 4


class ClosestPair:
    """A set of vectors that finds its pair of highest cosine similarity.

    Each vector knows its nearest neighbour among the vectors that were added before it, and keeps their similarity as
    an upper bound. When that neighbour is removed, the bound becomes too high, never too low: the remaining earlier
    vectors are farther away, and later vectors search for their own neighbour among all. So `pair` searches again only
    for vectors that have lost their neighbour and have one of the highest bounds, many in one pass over the set.

    A change of the set costs about one pass, O(n W). Only the first pair of n vectors costs all n² similarities; they
    are computed block by block. The set keeps one float32 copy of the vectors. Similarities are compared in float64.

    Args:
        capacity: maximum number of vectors at a time.
        width: W, the length of a vector.

    Examples:
        >>> import torch
        >>> from mac_rag.memory.closest_pair import ClosestPair
        >>> vectors = ClosestPair(capacity=3, width=2)
        >>> for key, vector in enumerate([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]):
        ...     vectors.add(key, torch.tensor(vector))
        >>> vectors.pair()
        (0, 2)
    """

    def __init__(self, capacity: int, width: int) -> None:
        self._vectors = torch.empty(capacity, width)
        self._norms = torch.ones(capacity, dtype=torch.float64)
        self._keys = torch.full((capacity,), -1)  # the key of the vector in each slot; -1 if it is free
        self._bounds = torch.full((capacity,), -torch.inf, dtype=torch.float64)
        self._nearest = torch.zeros(capacity, dtype=torch.int64)  # the slot of the nearest neighbour,
        self._nearest_keys = torch.full((capacity,), -2)  # and its key: the slot may hold another vector now
        self._seen = torch.zeros(capacity, dtype=torch.int64)  # slots that were in use when the vector was added
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity))[::-1]
        self._used = 0  # slots from here on were never used, and their memory is not touched

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, key: int, vector: Tensor) -> None:
        """Adds a vector `[W]` under a new key, an integer of at least 0."""
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
        """Removes the vector of this key."""
        slot = self._slots.pop(key)
        self._free.append(slot)
        self._keys[slot] = -1
        self._bounds[slot] = -torch.inf

    def pair(self) -> tuple[int, int]:
        """The keys of the most similar pair, the lower key first.

        Raises:
            ValueError: for fewer than two vectors.
        """
        if len(self) < 2:
            raise ValueError(f"a pair takes two vectors, the set holds {len(self)}")
        while True:
            keys, bounds = self._keys[: self._used], self._bounds[: self._used]
            is_stale = self._keys[self._nearest[: self._used]] != self._nearest_keys[: self._used]
            best_known, best = bounds.masked_fill(is_stale, -torch.inf).max(0)
            unknown = (is_stale & (bounds > best_known)).nonzero().squeeze(1)
            if not len(unknown):
                first, second = sorted((int(keys[best]), int(self._nearest_keys[best])))
                return first, second
            # Vectors that were never searched for come first, in order: early ones have few vectors to compare with.
            new = unknown[bounds[unknown] == torch.inf]
            highest = new if len(new) else unknown[bounds[unknown].topk(min(_BLOCK, len(unknown))).indices]
            self._search(highest[:_BLOCK])

    def _search(self, slots: Tensor) -> None:
        """Finds the nearest neighbours of the vectors in these slots `[n]`."""
        seen = int(self._seen[slots].max())
        vectors, norms = self._vectors[:seen], self._norms[:seen]
        similarity = (vectors @ self._vectors[slots].T).T / norms.float()  # [n, seen], up to the norms of `slots`
        similarity[:, self._keys[:seen] < 0] = -torch.inf
        similarity.scatter_(1, slots[:, None], -torch.inf)
        candidates = similarity.topk(min(_CANDIDATES, seen)).indices  # [n, c]
        exact = (vectors[candidates].double() @ self._vectors[slots].double()[:, :, None]).squeeze(2)
        exact /= norms[candidates] * norms[slots, None]
        exact[similarity.gather(1, candidates) == -torch.inf] = -torch.inf
        self._bounds[slots], best = exact.max(1)
        self._nearest[slots] = candidates.gather(1, best[:, None]).squeeze(1)
        self._nearest_keys[slots] = self._keys[self._nearest[slots]]
