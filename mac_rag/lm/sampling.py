"""How the next token of an answer is chosen, and which strings end it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mac_rag.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How an answer is decoded; the default is greedy.

    Examples:
        >>> from mac_rag import MACModel
        >>> model, warm = MACModel.from_pretrained("mac-tiny"), Sampling(temperature=0.8, top_p=0.9, seed=7)
        >>> model.generate(["Who?"], sampling=warm) == model.generate(["Who?"], sampling=warm)
        True

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_p: draws from the most probable tokens whose probabilities sum to at least this.
        seed: random seed of each answer. Equal seeds give equal answers to equal prompts, whatever else is in a batch,
            up to rounding of the logits. None draws other answers each time, from torch's default generator.
        stop: strings that end an answer, which does not contain them.

    Raises:
        ConfigError: for a value outside of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; give a number of at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; give a number above 0 and at most 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigError(f"stop is {self.stop!r}; give a tuple of strings that are not empty")

    def until_stop(self, text: str) -> tuple[str, bool]:
        """The text before the first stop string, and True if there is one."""
        places = [place for place in (text.find(string) for string in self.stop) if place >= 0]
        return (text[: min(places)], True) if places else (text, False)

    def settled(self, text: str) -> str:
        """The part of an unfinished text that no stop string can take away: without an end that begins one."""
        begun = (
            length
            for string in self.stop
            for length in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:length])
        )
        return text[: len(text) - max(begun, default=0)]


GREEDY = Sampling()


class TokenChoice:
    """Chooses the next token of each of B rows.

    Each row draws from a generator of its own, so that rows do not depend on each other.

    Args:
        sampling: how to choose.
        rows: B.
    """

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self._sampling = sampling
        self._generators: list[torch.Generator] = []
        if sampling.temperature > 0:
            drawn = torch.randint(2**62, (rows,)).tolist() if sampling.seed is None else [sampling.seed] * rows
            self._generators = [torch.Generator().manual_seed(seed) for seed in drawn]

    def of(self, rows: Tensor) -> TokenChoice:
        """The choice for some of the rows, by their numbers; each goes on with its own generator."""
        chosen = TokenChoice(self._sampling, 0)
        chosen._generators = [self._generators[row] for row in rows.tolist()] if self._generators else []
        return chosen

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens `[N]` from logits `[N, vocabulary]`: N is B, or 2B where the second half equals the first."""
        if not self._generators:
            return logits.argmax(-1)
        rows = len(self._generators)
        probabilities = (logits[:rows].float() / self._sampling.temperature).softmax(-1)
        descending, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = descending.double().cumsum(-1)
        kept = mass - descending < self._sampling.top_p  # always the most probable token
        total = (descending * kept).double().sum(-1, keepdim=True)
        uniform = torch.cat([torch.rand(1, dtype=torch.double, generator=part) for part in self._generators])
        place = (mass < uniform.to(mass.device)[:, None] * total).sum(-1, keepdim=True)
        last_kept = kept.sum(-1, keepdim=True) - 1
        return tokens.gather(-1, torch.minimum(place, last_kept))[:, 0].repeat(len(logits) // rows)
