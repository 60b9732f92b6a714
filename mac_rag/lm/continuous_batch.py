"""Continuous batching: answers that an LM writes together, token by token, and others that join them meanwhile.

Prompts that come later are read in a pass of their own. Then their rows move into the cache of those that are being
written, so that one pass of the LM gives a token of every answer. Answers that have ended leave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mac_rag.data.types import Decoded, Token
from mac_rag.lm.decoding import ExtractiveDecoding, MaxRuleEnsemble, Sampling, TokenChoice, log_probabilities
from mac_rag.nn.growing_cache import Taken, growing, is_growing, side_by_side, stacked
from mac_rag.nn.modulation import Modulation

# Positions of all rows in a cache, up to which others join: 32 questions with a usual memory each.
_MOST_POSITIONS = 1 << 16
# Ended answers leave their batch once at most this share of its rows continues; dropping few costs more than they do.
_MOST_KEPT = 0.75


class CachedRows:
    """B rows that an LM has read into a cache, and what it needs to read one more token of each.

    Args:
        read: one pass of the LM, from ids, mask, positions, cache, modulation and segments to its output.
        cache: their keys and values.
        mask: `[B, T]`, 0 for positions of the cache that a row does not see.
        positions: `[B]`, position of each row's last token.
        modulation: modulation of the rows; None for the LM alone.
    """

    def __init__(
        self, read: Callable[..., Any], cache: Any, mask: Tensor, positions: Tensor, modulation: Modulation | None
    ) -> None:
        self._read = read
        self._cache, self._mask, self._positions, self._modulation = growing(cache), mask, positions, modulation

    def __len__(self) -> int:
        return len(self._mask)

    @property
    def length(self) -> int:
        """T, number of positions in the cache."""
        return self._mask.shape[1]

    @property
    def prefix_length(self) -> int:
        """P, number of the first positions, which are the prefix of the modulation."""
        return self._modulation.prefix_length if self._modulation else 0

    def read(self, tokens: Tensor) -> Tensor:
        """Reads one more token of each row, `[B]`; returns the logits of the next ones, `[B, vocabulary]`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        self._positions = self._positions + 1
        output = self._read(tokens[:, None], self._mask, self._positions[:, None], self._cache, self._modulation, {})
        self._cache = growing(output.past_key_values)
        logits: Tensor = output.logits[:, -1]
        return logits

    def of(self, rows: Tensor) -> CachedRows:
        """Some of the rows, by their indices, which may repeat; these rows must not be used any more."""
        modulation = self._modulation and self._modulation.after_cache(rows)
        if is_growing(self._cache):
            taken = self._taken(rows, modulation)
            cache: Any = side_by_side([self._cache], [taken])
            mask = stacked([self._mask[..., None]], [taken])[..., 0]
        else:
            cache, mask = self._cache, self._mask[rows]
            cache.reorder_cache(rows)  # every kind of cache layer supports this
        return CachedRows(self._read, cache, mask, self._positions[rows], modulation)

    def followed_by(self, own: Tensor, other: CachedRows, others: Tensor) -> CachedRows | None:
        """Some of these rows and then some of another's, by their indices; None if they cannot share a pass."""
        first = self._modulation and self._modulation.after_cache(own)
        second = other._modulation and other._modulation.after_cache(others)
        if not is_growing(self._cache) or not is_growing(other._cache) or (first is None) != (second is None):
            return None
        modulation = first and second and first.followed_by(second)
        if first is not None and modulation is None:
            return None
        taken = [self._taken(own, first), other._taken(others, second)]
        cache = side_by_side([self._cache, other._cache], taken)
        mask = stacked([self._mask[..., None], other._mask[..., None]], taken)[..., 0]
        positions = torch.cat([self._positions[own], other._positions[others]])
        return CachedRows(self._read, cache, mask, positions, modulation)

    def _taken(self, rows: Tensor, modulation: Modulation | None) -> Taken:
        """What some of the rows need of the cache: what is left of the prefix, and all that one of them sees after it.

        Args:
            rows: indices of the rows.
            modulation: their modulation, as `after_cache` gives it.
        """
        text = self._mask[rows, self.prefix_length :]
        unseen = int(text.any(0).int().argmax())
        return Taken(rows, modulation.prefix_length if modulation else 0, text.shape[1] - unseen)


class Answers:
    """The answers to B prompts that are read together; each of them may end at another token.

    Args:
        rows: B.
        most: largest number of tokens of an answer.
        sampling: how tokens are chosen, and which strings end an answer early.
        processors: change the logits of the next tokens, in this order. They see the answers without their prompts.
        ensemble: combines the logits with and without memory, at last; None if there is no second half of rows.
        end_tokens: ids of the tokens that end an answer.
        write: from tokens `[B, L]` to texts.
        tell: called with the number and the text of each answer that ends; it must not raise an exception.
        hear: called with the number and the tokens of each answer that goes on, after each token; an answer of which it
            says True ends there. It must not raise an exception.

    Attributes:
        said: for each prompt the tokens of its answer so far, without one that ends it.
        ended: the answers that have ended, by the numbers of their prompts.
        error: what went wrong when the prompts were read; then there will be no answers.
    """

    def __init__(
        self,
        rows: int,
        *,
        most: int,
        sampling: Sampling,
        processors: Sequence[Any],
        ensemble: MaxRuleEnsemble | None,
        end_tokens: Collection[int],
        write: Callable[[Tensor], list[str]],
        tell: Callable[[int, Decoded], object] | None = None,
        hear: Callable[[int, Sequence[Token]], bool] | None = None,
    ) -> None:
        self.said: list[list[Token]] = [[] for _ in range(rows)]
        self.ended: dict[int, Decoded] = {}
        self.error: Exception | None = None
        self._most, self._sampling, self._end_tokens = most, sampling, frozenset(end_tokens)
        self._choose = TokenChoice(sampling, rows)
        self._processors, self._ensemble = list(processors), ensemble
        self._write, self._tell, self._hear = write, tell, hear
        self._live = list(range(rows))  # the numbers of the answers that the LM goes on with, ended ones among them
        self._tokens: Tensor | None = None  # [rows of the LM, L], the answers so far

    def __len__(self) -> int:
        """Number of the LM's rows: an answer with and without memory takes two."""
        return len(self._live) * (1 if self._ensemble is None else 2)

    @property
    def left(self) -> int:
        """The most tokens that an answer may still have."""
        return self._most - (0 if self._tokens is None else self._tokens.shape[1])

    @property
    def over(self) -> bool:
        """True once all answers have ended."""
        return self.error is not None or len(self.ended) == len(self.said)

    def check(self) -> None:
        """Raises what went wrong, if anything did."""
        if self.error is not None:
            raise self.error

    def take(self, logits: Tensor) -> Tensor:
        """The next token of each of the LM's rows, `[N]`, from logits `[N, vocabulary]`."""
        so_far = logits.new_empty(len(logits), 0, dtype=torch.int64) if self._tokens is None else self._tokens
        for processor in (*self._processors, self._ensemble):
            if processor is not None:
                logits = processor(so_far, logits)
        tokens = self._choose(logits, so_far)
        self._tokens = torch.cat([so_far, tokens[:, None]], 1)
        self._note(tokens[: len(self._live)], logits[: len(self._live)])
        return tokens

    def _note(self, tokens: Tensor, logits: Tensor) -> None:
        """Adds the next tokens to the answers, and ends those that have come to their end."""
        assert self._tokens is not None
        sampling = self._sampling
        ids = tokens.tolist()
        told = [Token(token) for token in ids]
        if sampling.log_probabilities is not None:
            told = log_probabilities(logits, tokens, sampling.log_probabilities)
        for place, row in enumerate(self._live):
            if row in self.ended:
                continue
            is_last = ids[place] in self._end_tokens
            if not is_last:
                self.said[row].append(told[place])
            text: str | None = None
            has_ended = is_last
            if sampling.stop:
                [text] = self._write(self._tokens[place : place + 1])
                has_ended = is_last or sampling.until_stop(text)[1]
            if has_ended or not self.left or (self._hear is not None and self._hear(row, self.said[row])):
                if text is None:
                    [text] = self._write(self._tokens[place : place + 1])
                answer = self.ended[row] = Decoded(sampling.until_stop(text)[0].strip(), self.said[row], has_ended)
                if self._tell is not None:
                    self._tell(row, answer)

    @property
    def going(self) -> list[int]:
        """The places of the answers that have not ended, among those that the LM goes on with."""
        return [place for place, row in enumerate(self._live) if row not in self.ended]

    def rows_of(self, places: Sequence[int]) -> list[int]:
        """Places of answers as indices of the LM's rows."""
        return [*places] if self._ensemble is None else [*places, *(place + len(self._live) for place in places)]

    def keep(self, places: Sequence[int]) -> None:
        """Goes on with some of the answers only, by their places."""
        if len(places) == len(self._live):
            return
        assert self._tokens is not None
        index = torch.tensor(places, dtype=torch.int64)
        self._tokens = self._tokens[self.rows_of(places)]
        self._choose = self._choose.of(index)
        self._processors = [one.of(index) if isinstance(one, ExtractiveDecoding) else one for one in self._processors]
        self._ensemble = self._ensemble and self._ensemble.of(index)
        self._live = [self._live[place] for place in places]

    def drop(self) -> None:
        """Ends all answers where they are; nobody is told."""
        self._tell = self._hear = None
        for row in range(len(self.said)):
            self.ended.setdefault(row, Decoded(""))


@dataclass(eq=False)
class _Stack:
    """Rows in one cache, the next token of each, and the answers that they write, in the order of the rows."""

    rows: CachedRows
    tokens: Tensor
    parts: list[Answers]

    def step(self) -> None:
        logits = self.rows.read(self.tokens).split([len(part) for part in self.parts])
        self.tokens = torch.cat([part.take(own) for part, own in zip(self.parts, logits)])
        index = self.going()
        if len(index) > _MOST_KEPT * len(self.tokens):
            return
        if len(index):
            self.rows, self.tokens = self.rows.of(index), self.tokens[index]
        self.keep()

    @property
    def longest_text(self) -> int:
        """Positions that prompt and answer may come to take, padding included."""
        return self.rows.length - self.rows.prefix_length + max(part.left for part in self.parts)

    def going(self) -> Tensor:
        """Indices of the rows whose answers have not ended."""
        rows, first = list[int](), 0
        for part in self.parts:
            rows += [first + row for row in part.rows_of(part.going)]
            first += len(part)
        return torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)

    def keep(self) -> None:
        """Leaves only these rows in the answers; those without any go."""
        for part in self.parts:
            part.keep(part.going)
        self.parts = [part for part in self.parts if len(part)]

    def join(self, new: _Stack) -> bool:
        """Takes the rows of another one in, if they can share passes of the LM; else nothing changes."""
        own, others = self.going(), new.going()
        rows = self.rows.followed_by(own, new.rows, others)
        if rows is None:
            return False
        self.rows, self.tokens = rows, torch.cat([self.tokens[own], new.tokens[others]])
        self.keep()
        new.keep()
        self.parts += new.parts
        return True


@dataclass(eq=False)
class _Waiting:
    """Prompts that are to be read; see `ContinuousBatch.add`."""

    answers: Answers
    read: Callable[[], tuple[CachedRows, Tensor]]
    prefix: int
    text: int


class ContinuousBatch:
    """Answers that are being written. `BaseLM.begin` adds some at any time; each `step` is one pass of the LM.

    Prompts are read in the order in which they came. Between two of them, those that are being written go on by a
    token. Rows that cannot stand in one cache, such as those of an LM with a state, are written in turns.

    Args:
        most: positions of all rows together. Prompts wait until there is room, but for those that find none others.

    Examples:
        >>> from mac_rag import MACModel
        >>> lm, batch = MACModel.from_pretrained("mac-tiny").base_lm, ContinuousBatch()
        >>> first = lm.begin(batch, [lm.prompts.prompt("Who opened the museum?")], None, max_new_tokens=8)
        >>> batch.step()  # the prompt is read
        >>> second = lm.begin(batch, [lm.prompts.prompt("Who?")], None, max_new_tokens=2)
        >>> while batch:
        ...     batch.step()
        >>> first.over, second.over
        (True, True)
    """

    def __init__(self, most: int = _MOST_POSITIONS) -> None:
        self._most = most
        self._waiting: deque[_Waiting] = deque()
        self._stacks: deque[_Stack] = deque()
        self._writes = False  # True if it is the turn of those that are being written

    def __bool__(self) -> bool:
        """True as long as there is something to do."""
        return bool(self._waiting or self._stacks)

    def add(self, answers: Answers, read: Callable[[], tuple[CachedRows, Tensor]], *, prefix: int, text: int) -> None:
        """Adds answers to prompts that a later `step` reads.

        Args:
            answers: the answers.
            read: reads the prompts; returns their rows, and the logits of the first tokens, `[B, vocabulary]`.
            prefix: positions of a row's prefix.
            text: positions of prompt and answer, at most.
        """
        self._waiting.append(_Waiting(answers, read, prefix, text))

    @torch.no_grad()
    def step(self) -> None:
        """One pass of the LM: reads prompts, or goes on with answers by a token.

        Raises:
            Exception: what went wrong while answers went on; it is over with all of them. What goes wrong while prompts
                are read is an error of these alone (`Answers.error`).
        """
        if self._waiting and self._has_room and not (self._writes and self._stacks):
            self._begin(self._waiting.popleft())
            self._writes = True
        elif self._stacks:
            self._writes = False
            stack = self._stacks.popleft()
            stack.step()
            if stack.parts:
                self._stacks.append(stack)

    def drop(self, answers: Answers) -> None:
        """Takes answers away that nobody waits for any more."""
        answers.drop()
        self._waiting = deque(one for one in self._waiting if one.answers is not answers)
        self._stacks = deque(one for one in self._stacks if len(one.going()))

    @property
    def _has_room(self) -> bool:
        new, stacks = self._waiting[0], self._stacks
        rows = len(new.answers) + sum(len(stack.rows) for stack in stacks)
        prefix = max([new.prefix, *(stack.rows.prefix_length for stack in stacks)])
        text = max([new.text, *(stack.longest_text for stack in stacks)])
        return not stacks or rows * (prefix + text) <= self._most

    def _begin(self, new: _Waiting) -> None:
        try:
            rows, logits = new.read()
            stack = _Stack(rows, new.answers.take(logits), [new.answers])
            if new.answers.over or any(other.join(stack) for other in self._stacks):
                return
        except Exception as error:
            new.answers.error = error
            return
        self._stacks.append(stack)
