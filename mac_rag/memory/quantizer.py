"""The codebook of a bank that keeps each memory token as one code: how it is learned, and what it loses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mac_rag.errors import BankError
from mac_rag.memory.parts import Part
from mac_rag.nn.product_quantizer import k_means


def used_codes_only(codebook: Tensor, parts: Iterable[Part]) -> Tensor:
    """A codebook without the codes that no live row uses. Codes keep their numbers.

    A code that goes becomes equal to the first one in use. So no row needs to be written again, and new tokens find the
    nearest of the codes that are left, as if there were no others. If none is in use, all become zero.

    Args:
        codebook: `[C, D]`.
        parts: all parts of the bank, with codes `[n, T]`.

    Returns:
        The codebook `[C, D]`; the very same tensor if no code goes.
    """
    _, group = torch.unique(codebook, dim=0, return_inverse=True)  # equal codes stay or go together
    used = torch.zeros(len(codebook), dtype=torch.bool)
    for part in parts:
        used[part.rows(slice(None)).main.flatten().long()] = True
    gone = ~torch.isin(group, group[used])
    if not gone.any():
        return codebook
    left = codebook.clone()
    left[gone] = codebook[int(used.nonzero()[0])] if used.any() else 0.0
    return codebook if torch.equal(left, codebook) else left


def fit(phi: Tensor, codes: int, *, seed: int = 0, iterations: int = 25) -> Tensor:
    """Learns a codebook by k-means (Lloyd's algorithm) on memory tokens.

    The initial codes are randomly drawn tokens. A code without tokens moves to a token that is far from its own code.

    Args:
        phi: `[N, T, D]`, memory tokens of representative documents; at most 256 tokens per code are used.
        codes: C, the number of codes.
        seed: random seed of the initial codes.
        iterations: maximum number of iterations; learning stops earlier when no code moves.

    Returns:
        The codebook `[C, D]` in float32.

    Raises:
        BankError: for fewer tokens than codes, or fewer than one code.
    """
    tokens = phi.detach().float().flatten(0, 1)
    if not 1 <= codes <= len(tokens):
        raise BankError(f"a codebook of {codes} codes takes at least as many memory tokens, got {len(tokens)}")
    return k_means(tokens, codes, seed=seed, iterations=iterations)
