"""Documents that are read in parallel: each one with the question, and none sees another.

Several documents in a row are a longer text than a small LM has been trained on, and it mixes up what they say. Here
each document stands in a prompt of its own, `d_i + x`, at the positions that it would have alone. Last comes `x`, which
sees all of them, and the answer, as in Fusion-in-Decoder (Izacard and Grave, 2021, "Leveraging Passage Retrieval with
Generative Models for Open Domain Question Answering") and Parallel Context Windows (Ratner et al., 2023). So any number
of documents takes the positions of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

# The segment of a memory's first slot where its tokens stand in front of a prompt; those of the other slots follow.
MEMORY = 1_000_000


def segments_of(ids: Sequence[int], start: Sequence[int]) -> list[int]:
    """The segment of each token of a prompt, as `mac_rag.lm.prefix_lm.prefix_mask` takes them.

    Args:
        ids: token ids of a prompt; one that is read in parallel holds several prompts, one behind the other.
        start: ids that stand in front of a prompt and nowhere else, one at least.

    Returns:
        -1, -2 and so on for prompts that others follow, and 1 for the last one.
    """
    places = [place for place, token in enumerate(ids) if token == start[0]]
    if len(places) < 2:
        return [1] * len(ids)
    ends = [*places[1:], len(ids)]
    lengths = [end - begin for begin, end in zip([0, *ends], ends)]  # what stands before the first start belongs to it
    numbers = [*range(-1, -len(lengths), -1), 1]
    return [number for number, length in zip(numbers, lengths, strict=True) for _ in range(length)]


def positions_of(segment_ids: Sequence[int]) -> list[int]:
    """The position of each token, given the segments: those in parallel begin at 0, the others behind the longest.

    Examples:
        >>> positions_of([-1, -1, -1, -2, -2, 1, 1])
        [0, 1, 2, 0, 1, 3, 4]
    """
    positions: list[int] = []
    place, longest, last = 0, 0, None
    for segment in segment_ids:
        if segment != last and (last is None or _parallel(last)):
            place = 0 if _parallel(segment) else longest
        positions.append(place)
        place += 1
        longest, last = max(longest, place), segment
    return positions


def _parallel(segment: int) -> bool:
    return segment < 0 or segment >= MEMORY


def slot_segments(slots: int, length: int) -> list[int]:
    """The segments of `length` memory tokens that stand in front of a prompt, in S slots."""
    return [MEMORY + slot for slot in range(slots) for _ in range(length // slots)]
