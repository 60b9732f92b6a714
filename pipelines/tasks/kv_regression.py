"""First weights of MAC around an LM that reads: memory tokens yield the keys and values that the LM computes of a text.

An LM answers by the keys and values of the words it has read. The encoders start from the same LM, so a linear map of
their states predicts these keys and values; it is fitted here by ridge regression. Training then begins with a memory
that the LM can read. It remains to be learned what to keep, as there are fewer memory tokens than words, and how to
find it.

If the prefix has an attention sink, the LM reads the text after the sink, and keys are predicted before rotation.

A memory that is a part of the LM's prompt yields the LM's states at its entry layer instead.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.config import MACConfig
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.attention_sink import key_rotation
from mac_rag.model import AmortizedModel
from mac_rag.nn.amortization import EncoderPooling
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.modulation import ModulationNetwork, PrefixModulation, PrefixTuning, PromptTuning
from mac_rag.nn.prior import DocumentPrior
from mac_rag.progress import ProgressBar, progress_bar

_READ = 256  # texts to which the maps are fitted
_FLOOR = 0.3  # share of the mean variance that is added to all variances before whitening
_SCALES = (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)  # candidates for the document prior's scale
_WORD_REACH = 0.2  # standard deviation of a memory token's attention, in stretches, at which it is one word's state
_BATCH = 4096  # tokens that an encoder reads at once
_RIDGE = 1e-4  # ridge penalty, as a share of the inputs' mean square


class _Start(NamedTuple):
    """First weights of aggregation.

    Attributes:
        mark: size of the vectors that tell memory tokens apart, relative to the tokens.
        sharp: factor on those vectors in the comparisons of attention.
        prior_scale: weight of the document prior.
    """

    mark: float
    sharp: float
    prior_scale: float


# Keys and values of a prefix may be blends of neighbours. Tokens of a prompt must come out as they are.
_PREFIX, _PROMPT = _Start(0.3, 4.0, 1.0), _Start(1.0, 3.0, 4.0)


@torch.no_grad()
def init_by_kv_regression(model: AmortizedModel, data: QADataset) -> None:
    """Fits the maps between the encoders and the base LM, and makes aggregation keep memory tokens in their order.

    Args:
        model: a model whose encoders are both of design `encoder-pooling` and start from the base LM's weights, with a
            prefix or a prompt; it is changed in place.
        data: the training set. All documents count for how rare words are; the maps are fitted to some of them and
            their questions.

    Raises:
        ConfigError: for other networks.
    """
    config, network, prefix = model.config, model.amortization.network, model.modulation
    if (
        not isinstance(network, EncoderPooling)
        or not _can_be_fitted(prefix, config)
        or config.amortization != config.input_encoder
        or config.amortization.name is not None
    ):
        raise ConfigError(
            "init: kv_regression needs encoders of design encoder-pooling without a name, both alike, and a prefix "
            "without bottleneck, or a prompt that enters after as many layers as the encoders have"
        )
    training = model.training
    model.eval()
    questions_of = data.questions_by_document()
    documents = [document for document in data.documents if questions_of[document.id]]
    rows = []
    with _progress_bar("tokenize", len(documents)) as bar:
        for document in documents:
            rows.append(model.amortization.ids(document.text))
            bar.advance()
    if network.hashed_bm25 is not None:
        network.hashed_bm25.count(rows)
    some = range(0, len(rows), -(-len(rows) // _READ))
    rows_read = [rows[i] for i in some]
    questions = [model.input_encoder.ids(questions_of[documents[i].id][0].question) for i in some]
    with _progress_bar("read documents", len(rows_read)) as bar:
        states = [_states(network, row, bar.advance) for row in rows_read]
    if isinstance(prefix, PromptTuning):
        # A memory token starts as the state of the word in the middle of its stretch; all words have the same room.
        network.log_reach.fill_(math.log(_WORD_REACH))
        network.mlps.outer.zero_()
    else:
        _fit_salience(network, rows, rows_read, states)
    count = len(network.queries)
    unmarked = torch.stack([_read_by_mlps(network, state) for state in states])
    start = _PROMPT if isinstance(prefix, PromptTuning) else _PREFIX
    places = _least_used(unmarked.flatten(0, 1), count) * (start.mark * unmarked.square().mean((0, 1)).sum().sqrt())
    network.mlps.outer_bias.add_(places)
    model.input_encoder.load_state_dict(model.amortization.state_dict())
    phi = MemoryTokens.cat([_memory_tokens(network, row, state) for row, state in zip(rows_read, states, strict=True)])
    if isinstance(prefix, PromptTuning):
        _fit_prompt(model, prefix, phi.tokens[:, -count:], unmarked, rows_read, states)
    else:
        assert isinstance(prefix, PrefixTuning)
        _fit_prefix(model, prefix, phi.tokens, rows_read, states)
    if model.aggregation.prior is not None:
        with _progress_bar("read questions", len(questions)) as bar:
            encoded = model.input_encoder.encode(questions, _BATCH, bar.advance)
        _fit_prior(model.aggregation.prior, encoded, phi)
    along = places.T @ torch.linalg.pinv(places.T)  # the projection onto the marks
    for block in model.aggregation.blocks:
        assert isinstance(block, CrossAttentionBlock)
        for linear in (block.to_query, block.to_key):
            linear.weight.add_(linear.weight @ along, alpha=start.sharp - 1)
        if block.prior_scale is not None:
            block.prior_scale.fill_(start.prior_scale)
    model.train(training)


def _can_be_fitted(network: ModulationNetwork, config: MACConfig) -> bool:
    if isinstance(network, PromptTuning):
        return network.entry_layer == config.amortization.layers
    return isinstance(network, PrefixTuning) and isinstance(network.to_keys_values, nn.Linear)


def _states(network: EncoderPooling, row: Sequence[int], advance: Callable[[], None]) -> Tensor:
    """`[L, backbone width]`"""
    ids = torch.tensor([row], device=network.queries.device)
    states = network.text_states(ids, torch.ones_like(ids))[0]
    advance()
    return states


def _read_by_mlps(network: EncoderPooling, states: Tensor) -> Tensor:
    """Memory tokens as the MLPs make them, `[learned vectors, D]`, of a text whose states `[L, w]` are known."""
    tokens: Tensor = network.mlps(network.pooled(states[None], torch.ones(1, len(states), device=states.device)))[0]
    return tokens.float()


def _memory_tokens(network: EncoderPooling, row: Sequence[int], states: Tensor) -> MemoryTokens:
    """Memory tokens of one text whose states `[L, backbone width]` are known."""
    ids = torch.tensor([row], device=states.device)
    mask = torch.ones_like(ids)
    return network.memory_tokens(network.pooled(states[None], mask), ids, mask).to(torch.float32)


def _pooling(network: EncoderPooling, states: Tensor, skipped: int) -> Tensor:
    """Share of each word in each memory token, `[T, L - skipped]`; the sentence encoder's token is of all words.

    Args:
        states: `[L, backbone width]`.
        skipped: number of words at the beginning that are left out.
    """
    mask = torch.ones(1, len(states), dtype=torch.long, device=states.device)
    weights: Tensor = network.places(states[None], mask)[0, ..., skipped:].softmax(-1).mean(0)
    return weights if network.sentence_encoder is None else torch.cat([weights.mean(0, keepdim=True), weights])


def _fit_salience(
    network: EncoderPooling, rows: Sequence[Sequence[int]], rows_read: Sequence[Sequence[int]], states: Sequence[Tensor]
) -> None:
    """Salience starts as the rarity of a word: the log of the share of documents that hold it."""
    holding = Counter(token for row in rows for token in set(row))
    rarity = [math.log(len(rows) / holding[token]) for row in rows_read for token in row]
    salience = torch.tensor(rarity, device=network.queries.device).clamp(min=1e-2)
    before_softplus = salience + (-(-salience).expm1()).log()
    ridge = Ridge(states[0].shape[1], 1, salience.device)
    ridge.add(torch.cat(list(states)), before_softplus[:, None])
    weight, bias = ridge.solve()
    network.salience.weight.copy_(weight.T)
    network.salience.bias.copy_(bias)


def _fit_prompt(
    model: AmortizedModel,
    prompt: PromptTuning,
    tokens: Tensor,
    pooled: Tensor,
    rows: Sequence[Sequence[int]],
    states: Sequence[Tensor],
) -> None:
    """Fits the prompt of memory tokens `[N, T, D]` to their words' embeddings, and to their words' pooled states."""
    network, embeddings = model.amortization.network, model.base_lm.model.get_input_embeddings()
    assert isinstance(network, EncoderPooling)
    width = tokens.shape[-1]
    to_embeddings, to_states = Ridge(width, width, tokens.device), Ridge(width, width, tokens.device)
    for row, text, own, text_states in zip(rows, tokens, pooled, states, strict=True):
        words = embeddings(torch.tensor(row, device=tokens.device)).float()
        to_embeddings.add(text, _pooling(network, text_states, 0)[-len(text) :] @ words)
        to_states.add(text, own - text)
    weight, bias = to_embeddings.solve()
    prompt.to_embeddings.weight.copy_(weight.T)
    prompt.to_embeddings.bias.copy_(bias)
    weight, bias = to_states.solve()
    prompt.to_states.added.weight.copy_(weight.T)
    prompt.shift.copy_(bias)


def _least_used(phi: Tensor, count: int) -> Tensor:
    """Directions `[count, D]` in which memory tokens `[N, D]` differ least: there a mark disturbs least."""
    directions = torch.linalg.eigh(torch.cov(phi.T)).eigenvectors  # ascending
    if count > len(directions):
        raise ConfigError(
            f"init: kv_regression marks tokens ({count}) by directions of the LM's width ({len(directions)})"
        )
    least: Tensor = directions[:, :count].T
    return least


def _fit_prefix(
    model: AmortizedModel, prefix: PrefixTuning, phi: Tensor, rows: Sequence[Sequence[int]], states: Sequence[Tensor]
) -> None:
    """Fits the prefix of memory tokens to the keys and values that the LM keeps of the text, pooled alike."""
    network, base_lm, sink = model.amortization.network, model.base_lm, prefix.sink
    assert isinstance(network, EncoderPooling)
    front = None if sink is None else PrefixModulation(sink.keys_values[None])
    start = base_lm.prompts.start
    linear: Any = prefix.to_keys_values
    ridge = Ridge(linear.in_features, linear.out_features, phi.device)
    if sink is not None:
        longest = sink.length + max(map(len, rows))
        rotation = key_rotation(base_lm.model, range(sink.length, longest), longest)
    with _progress_bar("fit", len(rows)) as bar:
        for row, tokens, text in zip(rows, phi, states, strict=True):
            # The sink holds the tokens that the tokenizer puts before a text, if any.
            skipped = len(start) if sink is not None and list(row[: len(start)]) == start else 0
            keys_values = base_lm.keys_values(row[skipped:], front).float()  # [layers, 2, H, L, d]
            if sink is not None:
                keys, values = keys_values.unbind(1)
                keys_values = torch.stack([rotation.inverse(keys), values], 1)
            targets = torch.einsum("tl,nkhld->tnkhd", _pooling(network, text, skipped), keys_values).flatten(1)
            ridge.add(prefix.norm(tokens), targets)
            bar.advance()
    weight, bias = ridge.solve()
    linear.weight.copy_(weight.T)
    linear.bias.copy_(bias)


def _fit_prior(prior: DocumentPrior, questions: MemoryTokens, phi: MemoryTokens) -> None:
    """The document prior starts in the space where documents differ alike in all directions, as sharp as it is right.

    Whitening is what makes means of an LM's states comparable (Su et al., 2021, "Whitening Sentence Representations").
    A sentence encoder's tokens are made to be compared as they are.
    """
    summaries = prior.summary(phi)
    values, directions = torch.linalg.eigh(torch.cov(summaries.T))
    most = slice(-len(prior.key.weight), None)  # the directions in which documents differ most
    whitening = (directions * (values + _FLOOR * values.mean()).rsqrt())[:, most]
    for linear, texts in ((prior.key, summaries), (prior.query, prior.summary(questions))):
        mean = functional.normalize(texts.mean(0), dim=0)
        plain = directions[:, most] if prior.sentence_token else whitening - mean[:, None] * (mean @ whitening)
        linear.weight.copy_(plain.T)
    cosines = prior.score(prior.queries(questions), prior.keys(phi)) / prior.log_scale.exp()
    own = torch.arange(len(cosines), device=cosines.device)
    losses = {scale: float(functional.cross_entropy(scale * cosines, own)) for scale in _SCALES}
    prior.log_scale.fill_(math.log(min(losses, key=losses.__getitem__)))


class Ridge:
    """The linear map of least squared error from inputs `[N, D]` to outputs `[N, E]`, which come in parts.

    It keeps the sums of products `[D, D]` and `[D, E]` in float64, and no sample.

    Examples:
        >>> inputs = torch.randn(64, 3)
        >>> ridge = Ridge(3, 3)
        >>> for part in inputs.split(10):
        ...     ridge.add(part, 2 * part + 1)
        >>> weight, bias = ridge.solve()
        >>> weight.diagonal().round(decimals=2), bias.round(decimals=2)
        (tensor([2., 2., 2.]), tensor([1., 1., 1.]))

    Args:
        width_in, width_out: D and E.
        device: device of the samples.
    """

    def __init__(self, width_in: int, width_out: int, device: torch.device | None = None) -> None:
        self._count = 0
        self._sums = [torch.zeros(width, dtype=torch.float64, device=device) for width in (width_in, width_out)]
        self._products = [torch.zeros(width_in, len(total)).to(total) for total in self._sums]

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Adds samples, of any number."""
        x = inputs.double()
        self._count += len(x)
        for total, product, part in zip(self._sums, self._products, (x, outputs.double()), strict=True):
            total += part.sum(0)
            product.addmm_(x.T, part)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight `[D, E]` and bias `[E]` in float32."""
        means = [total / self._count for total in self._sums]
        moments, cross = (
            product - self._count * torch.outer(means[0], mean)
            for product, mean in zip(self._products, means, strict=True)
        )
        penalty = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)
        weight = torch.linalg.solve(moments + penalty, cross)
        return weight.float(), (means[1] - means[0] @ weight).float()


def _progress_bar(label: str, total: int) -> ProgressBar:
    """A bar of one phase of `init: kv_regression`; of several processes, the first shows it."""
    return progress_bar(f"kv_regression: {label}", total, disable=os.environ.get("RANK", "0") != "0")
