"""Prompt tuning: the tokens of phi* stand in front of the prompt as if the LM had read them.

P-tuning v2 gives the LM keys and values, which stay as they are whatever is asked. Here each token of phi* is a token
of the LM (Lester et al., 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning"), which its layers change as
they change the tokens of a text. In an LM whose attention takes segments it sees the question, so the LM reads a memory
as it reads a text.

phi* has been through an amortization network already. So behind the LM's first layers, where a document needs no
question (Cao et al., 2020, "DeFormer"), the states of its tokens are given once more, as amortization made them; below,
their embeddings are what the question can look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, cat, nn, zeros

from mac_rag.nn.amortization import ResidualLinear
from mac_rag.nn.modulation import Change, HookedModulation, LMShape, Modulation, ModulationNetwork


class PromptModulation(Modulation):
    """P tokens in front of each prompt, whose states phi* gives.

    The LM runs over P tokens more, whichever they are: in the outputs of some of its modules they are replaced.

    Args:
        states: name of a module of the LM -> what it puts out for the P tokens, `[B, P, width]`.
        slots: S, of P / S tokens each; those of one slot do not see another.
        half: True for the first half of the LM's rows only.
    """

    def __init__(self, states: Mapping[str, Tensor], slots: int, half: bool = False) -> None:
        self._states = states
        self._half = half
        self.prefix_length = next(iter(states.values())).shape[1]
        self.slots = slots

    def beside_none(self) -> PromptModulation:
        return PromptModulation(self._states, self.slots, half=True)

    def shown_rows(self, rows: int) -> int:
        return rows // 2 if self._half else rows

    @contextmanager
    def attached(self, lm: nn.Module) -> Iterator[None]:
        changes = {name: Change(_replaced, (states,)) for name, states in self._states.items()}
        with HookedModulation(changes, self._half).attached(lm):
            yield

    def behind_cache(self, rows: Tensor) -> PromptModulation:
        kept = {name: states[rows.to(states.device)] for name, states in self._states.items()}
        return PromptModulation(kept, self.slots, self._half)


def _replaced(_: Tensor, output: Tensor, states: Tensor) -> Tensor:
    """A module's output with `states` in place of its first tokens; a single token is an answer's, behind a cache."""
    if output.shape[1] == 1:
        return output
    return cat([states.to(output), output[:, states.shape[1] :]], 1)


class PromptTuning(ModulationNetwork):
    """Prompt tuning from phi*: each token gives an embedding, and a state behind some layers.

    Args:
        shape: the LM's sizes.
        tokens: T, tokens of a slot of phi*.
        entry_layer: number of the LM's layers behind which phi* gives states.
    """

    def __init__(self, shape: LMShape, tokens: int, *, entry_layer: int) -> None:
        super().__init__()
        self.prefix_length = tokens
        self.entry_layer = entry_layer
        self._names = shape.embeddings, shape.blocks[entry_layer - 1]
        self.to_embeddings = nn.Linear(shape.width, shape.width)
        self.to_states = ResidualLinear(shape.width)
        self.shift = nn.Parameter(zeros(shape.width))

    def forward(self, phi: Tensor) -> PromptModulation:
        states = dict(zip(self._names, (self.to_embeddings(phi), self.to_states(phi) + self.shift), strict=True))
        return PromptModulation(states, phi.shape[1] // self.prefix_length)
