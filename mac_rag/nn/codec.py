"""The codec of an LM's own keys and values: centred and weighted, a PCA over groups of layers, a few bits a component.

A token's keys (before rotation) and values in all layers are thousands of correlated numbers. The codec projects those
of a group of neighbouring layers onto their principal components, and gives each component 0, 1, 2, 4 or 8 bits
according to its eigenvalue: reverse water-filling (Cover and Thomas, *Elements of Information Theory*, section 10.3),
as KVTC does for the caches of large LMs. Every token takes the same number of bytes.

The same error in one layer costs a thousand times as much as in another, so numbers are weighted by what their errors
cost: the mean squared gradient of the LM's loss, head by head, a diagonal Fisher information.

`KVCodec` is the fast path. `quantized` is the plain one, component by component in float64; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.errors import ConfigError
from mac_rag.nn.cpu_linear import is_supported, onednn_linear

# Bits -> step of the best uniform quantizer with 2^bits levels for a standard normal variable, and its mean squared
# error (J. Max, "Quantizing for minimum distortion", 1960). With 0 bits the error is the variance.
QUANTIZERS = {
    0: (0.0, 1.0),
    1: (1.5958, 0.36338),
    2: (0.9957, 0.11885),
    4: (0.3352, 0.011543),
    8: (0.030762, 0.00008769),
}
_UPGRADES = ((0, 1), (1, 2), (2, 4), (4, 8))
_LARGEST_WIDTH = 4096  # numbers of a group; eigenvectors of more take minutes
_AT_ONCE = 2048  # tokens
_LOWEST_COST = 1e-6  # of errors in a head, as a share of the mean of all heads


class Allocation(NamedTuple):
    """How the components share a token's bytes. Only components with bits count.

    A code is the levels of the components with 8 bits, then of those with 4, 2 and 1, each the first group's first, one
    after the other, beginning with the lowest bit of a byte.

    Attributes:
        local: for each group the columns of its basis that have bits, those with most bits first.
        counts: bits -> for each group how many of its components have so many.
    """

    local: list[Tensor]
    counts: dict[int, list[int]]


class KVCodec(nn.Module):
    """Encodes tokens' keys (before rotation) and values to a fixed number of bytes a token, and decodes them.

    One codec serves every rate: with fewer bytes, fewer components have bits, and fewer each. It is empty until `fit`.

    Examples:
        >>> keys_values = torch.randn(2, 2, 1, 500, 4)  # 2 layers, 1 head of 4: 16 numbers a token
        >>> codec = KVCodec(layers=2, kv_heads=1, head_width=4, group=1)
        >>> codec.fit([keys_values], torch.ones(2, 2, 1))
        >>> codes = codec.encode(keys_values, bytes_per_token=12)
        >>> codes.shape, codes.dtype, codec.decode(codes).shape
        (torch.Size([500, 12]), torch.uint8, torch.Size([2, 2, 1, 500, 4]))

    Args:
        layers: number of the LM's layers.
        kv_heads: number of its heads of keys and values.
        head_width: width of a head.
        group: number of neighbouring layers that share one PCA; it must divide the number of layers. None for as many
            as have 4,096 numbers together at most.

    Attributes:
        mean: `[groups, W]`, mean of each of the `W = group * 2 * kv_heads * head_width` numbers.
        scale: `[groups, W]`, errors of this size cost the same everywhere; one number for each layer, for keys and for
            values, and for each head.
        basis: `[groups, W, W]`, the principal components as columns, the largest eigenvalue first.
        eigenvalues: `[groups, W]`, the variances of the components.

    Raises:
        ConfigError: if the layers cannot be divided into groups.
    """

    mean: Tensor
    scale: Tensor
    basis: Tensor
    eigenvalues: Tensor

    def __init__(self, *, layers: int, kv_heads: int, head_width: int, group: int | None = None) -> None:
        super().__init__()
        if group is None:
            fits = [size for size in range(1, layers + 1) if size * 2 * kv_heads * head_width <= _LARGEST_WIDTH]
            group = max((size for size in fits if not layers % size), default=1)
        if layers % group:
            raise ConfigError(f"the LM's {layers} layers cannot be divided into groups of {group}; choose a divisor")
        self._shape = (layers, 2, kv_heads, head_width)
        self.groups, self.width = layers // group, group * 2 * kv_heads * head_width
        for name in ("mean", "scale", "eigenvalues"):
            self.register_buffer(name, torch.zeros(self.groups, self.width))
        self.register_buffer("basis", torch.zeros(self.groups, self.width, self.width))
        self._allocations: dict[int, Allocation] = {}
        self._matrices: dict[tuple[int, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        self.register_load_state_dict_post_hook(lambda *_: self._forget())  # type: ignore[no-untyped-call]

    def _forget(self) -> None:
        self._allocations.clear()
        self._matrices.clear()
        _PACKED.pop(self, None)

    @property
    def fitted(self) -> bool:
        """True after `fit`, or after the buffers of a fitted codec have been loaded."""
        return bool(self.scale.any())

    def fit(self, keys_values: Sequence[Tensor], sensitivity: Tensor) -> None:
        """Fits the codec to tokens; it needs many more of them than `W`.

        Args:
            keys_values: keys before rotation and values, `[layers, 2, kv_heads, tokens, head_width]` each.
            sensitivity: what a squared error costs in each layer, in keys and in values, and in each head,
                `[layers, 2, kv_heads]`: the mean squared gradient of a loss. Only ratios count.

        Raises:
            ConfigError: if there are fewer than two tokens, or a sensitivity is not finite.
        """
        count = sum(part.shape[3] for part in keys_values)
        if count < 2:
            raise ConfigError(
                f"a codec cannot be fitted to {count} tokens; give it the keys and values of several thousand"
            )
        total = sum(self._grouped(part).sum(1, dtype=torch.float64) for part in keys_values)
        mean = torch.as_tensor(total) / count
        covariance = self.basis.new_zeros(self.basis.shape, dtype=torch.float64)
        for some in _batches(keys_values):
            numbers = torch.cat([self._grouped(part) for part in some], 1) - mean.float()[:, None]
            covariance += numbers.mT @ numbers / count
        cost = sensitivity.double() / sensitivity.double().mean().clamp(min=torch.finfo(torch.float64).tiny)
        if not cost.isfinite().all():
            raise ConfigError("what errors of keys and values cost is not finite; load the LM in bf16 or fp32")
        per_head = cost.clamp(min=_LOWEST_COST).rsqrt().reshape(self.groups, -1)
        scale = per_head.repeat_interleave(self._shape[-1], 1).to(covariance)
        covariance /= scale[:, :, None] * scale[:, None, :]
        for group in range(self.groups):
            # In fp32: float64 takes three times as long and makes no difference at 8 bits a component.
            values, vectors = torch.linalg.eigh(covariance[group].float())
            self.eigenvalues[group], self.basis[group] = values.flip(0).clamp(min=0), vectors.flip(1)
        self.mean.copy_(mean)
        self.scale.copy_(scale)
        self._forget()

    def encode(self, keys_values: Tensor, bytes_per_token: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Encodes tokens.

        Args:
            keys_values: keys before rotation and values, `[layers, 2, kv_heads, tokens, head_width]`.
            bytes_per_token: at least 1.
            dtype: dtype of the products, as for `decode`.

        Returns:
            Codes `[tokens, bytes_per_token]`, uint8.
        """
        allocation = self.allocation(bytes_per_token)
        levels = _by_bits(self._values(keys_values, bytes_per_token, dtype), allocation)
        return _packed({bits: _level(values, bits) for bits, values in levels.items()}, bytes_per_token)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Keys before rotation and values from codes `[tokens, bytes]`: inverts `encode` up to rounding.

        Args:
            codes: the codes.
            dtype: dtype of the products; half precision is several times as fast, and as exact as keys and values are
                in an LM of that dtype.

        Returns:
            `[layers, 2, kv_heads, tokens, head_width]`, in that dtype.
        """
        rate = codes.shape[1]
        allocation = self.allocation(rate)
        counts = {bits: sum(of_groups) for bits, of_groups in allocation.counts.items()}
        middles = {bits: _middle(levels, bits, dtype) for bits, levels in _unpacked(codes, counts).items()}
        return self._numbers(_by_group(middles, allocation), rate, dtype)

    def coded(self, keys_values: Tensor, bytes_per_token: int) -> Tensor:
        """The result of `encode` and then `decode`, with a gradient as if nothing had been rounded (straight-through).

        The gradient of components without bits is zero. Under autocast, products are computed in half precision, which
        may move a value near the border of two levels to the other level.

        Args:
            keys_values, bytes_per_token: as for `encode`.
        """
        allocation = self.allocation(bytes_per_token)
        values = self._values(keys_values, bytes_per_token, torch.float32)
        rounded = {
            bits: _middle(_level(part, bits), bits, torch.float32)
            for bits, part in _by_bits(values, allocation).items()
        }
        # The sum equals what is rounded exactly.
        passed = [
            own + (part - part.detach()) for own, part in zip(_by_group(rounded, allocation), values, strict=True)
        ]
        return self._numbers(passed, bytes_per_token, torch.float32)

    def compact(self, bytes_per_token: int) -> dict[str, Tensor]:
        """What codes of one rate need, for `load_compact`: of the basis only the components with bits, in int8.

        The codec is left in the state that `load_compact` gives, so that codes are equal before and after. On keys and
        values of SmolLM2-135M, int8 adds 0.6 % to the squared error of 1,152 bytes a token, and 0.2 % to that of 576.
        """
        local = self.allocation(bytes_per_token).local
        columns = torch.cat([basis.mT[own] for basis, own in zip(self.basis, local, strict=True)])
        # Steps are in fp16, so that products with int8 are exact and a second call changes nothing.
        steps = (columns.abs().amax(1) / 127).half()
        state = {name: getattr(self, name).clone() for name in ("mean", "scale", "eigenvalues")}
        state["components"] = (columns / steps.float()[:, None]).round().to(torch.int8)
        state["component_steps"] = steps
        self.load_compact(state, bytes_per_token)
        return state

    def load_compact(self, state: Mapping[str, Tensor], bytes_per_token: int) -> None:
        """Loads the result of `compact`; other rates than this one have no components then.

        Raises:
            ConfigError: for tensors of another codec or rate.
        """
        try:
            if not all(tensor.isfinite().all() for tensor in state.values()):
                raise ValueError("a number is not finite")
            for name in ("mean", "scale", "eigenvalues"):
                getattr(self, name).copy_(state[name].reshape(self.mean.shape))
            self._forget()
            self.basis.zero_()
            local = self.allocation(bytes_per_token).local
            columns = state["components"].float() * state["component_steps"].float()[:, None]
            parts = columns.split([len(places) for places in local])
            for basis, places, part in zip(self.basis, local, parts, strict=True):
                basis[:, places] = part.mT.to(basis)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the codec does not fit an LM with {self.groups} groups of {self.width:,} numbers at "
                f"{bytes_per_token:,} bytes a token: {error}; make it again for this LM"
            ) from None
        self._forget()

    def check_rate(self, bytes_per_token: int) -> None:
        """Refuses an impossible number of bytes per token.

        Raises:
            ConfigError: for fewer than one byte a token, or more than one byte for each number.
        """
        if not 1 <= bytes_per_token <= self.eigenvalues.numel():
            raise ConfigError(
                f"bytes per token is {bytes_per_token}; choose a number from 1 to {self.eigenvalues.numel():,}"
            )

    def allocation(self, bytes_per_token: int) -> Allocation:
        """How the components share `bytes_per_token` bytes.

        Raises:
            ConfigError: as `check_rate`.
        """
        if bytes_per_token not in self._allocations:
            self.check_rate(bytes_per_token)
            self._allocations[bytes_per_token] = self._allocated(bytes_per_token)
        return self._allocations[bytes_per_token]

    def _allocated(self, bytes_per_token: int) -> Allocation:
        shared = shared_bits(self.eigenvalues.flatten(), 8 * bytes_per_token).view(self.groups, self.width)
        local = [torch.argsort(bits, descending=True, stable=True)[: int((bits > 0).sum())] for bits in shared]
        counts = {bits: (shared == bits).sum(1).tolist() for _, bits in reversed(_UPGRADES)}
        return Allocation(local, counts)

    def _of_rate(self, bytes_per_token: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """For each group the map from centred numbers to components in steps of their quantizers, and the map back.

        `[components, W]` and `[W, components]`, in a dtype.
        """
        key = bytes_per_token, dtype
        if key not in self._matrices:
            allocation = self.allocation(bytes_per_token)
            self._matrices[key] = []
            for group, own in enumerate(allocation.local):
                steps = [
                    QUANTIZERS[bits][0] for bits, counts in allocation.counts.items() for _ in range(counts[group])
                ]
                lengths = torch.tensor(steps, device=own.device) * self.eigenvalues[group, own].sqrt()
                columns, scale = self.basis[group][:, own], self.scale[group][:, None]
                maps = (columns / lengths / scale).mT.contiguous(), columns * lengths * scale
                self._matrices[key].append((maps[0].to(dtype), maps[1].to(dtype)))
        return self._matrices[key]

    def _values(self, keys_values: Tensor, bytes_per_token: int, dtype: torch.dtype) -> list[Tensor]:
        """For each group its components that have bits, in steps of their quantizers: `[tokens, components]`."""
        centred = (self._grouped(keys_values) - self.mean[:, None]).to(dtype)
        maps = self._of_rate(bytes_per_token, dtype)
        return [functional.linear(numbers, encoder) for numbers, (encoder, _) in zip(centred, maps, strict=True)]

    def _numbers(self, values: Sequence[Tensor], bytes_per_token: int, dtype: torch.dtype) -> Tensor:
        """The inverse of `_values`: `[layers, 2, kv_heads, tokens, head_width]`."""
        decoders = [decoder for _, decoder in self._of_rate(bytes_per_token, dtype)]
        packs = dtype == torch.bfloat16 and decoders[0].device.type == "cpu" and is_supported()
        if packs:
            of_codec = _PACKED.setdefault(self, {})
            if bytes_per_token not in of_codec:
                of_codec[bytes_per_token] = [torch.ops.mkldnn._reorder_linear_weight(one) for one in decoders]
            decoders = of_codec[bytes_per_token]
        layers, _, heads, width = self._shape
        numbers = values[0].new_empty(self.groups, layers // self.groups, 2, heads, len(values[0]), width)
        for group, (part, decoder, mean) in enumerate(zip(values, decoders, self.mean, strict=True)):
            # The mean is not rounded before it is added: keys can be much farther from 0 than from each other.
            own = onednn_linear(part, decoder, mean) if packs else functional.linear(part, decoder) + mean
            numbers[group] = own.unflatten(1, (-1, 2, heads, width)).movedim(0, 3)
        return numbers.flatten(0, 1)

    def _grouped(self, keys_values: Tensor) -> Tensor:
        """`[layers, 2, kv_heads, tokens, head_width]` to `[groups, tokens, W]`."""
        numbers: Tensor = keys_values.float().movedim(3, 1).unflatten(0, (self.groups, -1))
        return numbers.transpose(1, 2).flatten(2)


# Decoders of codecs in oneDNN's layout, in bf16, by rate; here, because they cannot be copied with their codec.
_PACKED: WeakKeyDictionary[KVCodec, dict[int, list[Tensor]]] = WeakKeyDictionary()


def _batches(keys_values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The same tensors, in lists of `_AT_ONCE` tokens or more: adding up a covariance takes as long as making one."""
    batch: list[Tensor] = []
    for part in keys_values:
        batch.append(part)
        if sum(one.shape[3] for one in batch) >= _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _by_bits(values: Sequence[Tensor], allocation: Allocation) -> dict[int, Tensor]:
    """Components of each group to components by their bits, as a code holds them."""
    parts = [
        part.split([counts[group] for counts in allocation.counts.values()], 1) for group, part in enumerate(values)
    ]
    return {bits: torch.cat(some, 1) for bits, some in zip(allocation.counts, zip(*parts, strict=True), strict=True)}


def _by_group(components: Mapping[int, Tensor], allocation: Allocation) -> list[Tensor]:
    """The inverse of `_by_bits`."""
    parts = [components[bits].split(counts, 1) for bits, counts in allocation.counts.items()]
    return [torch.cat(some, 1) for some in zip(*parts, strict=True)]


def _level(values: Tensor, bits: int) -> Tensor:
    """Index, from 0, of the interval that each value (in steps) falls into; uint8."""
    half = (1 << bits) // 2
    return values.floor().clamp(-half, half - 1).add(half).to(torch.uint8)


def _middle(levels: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The middle of each interval, in steps: exact even in bf16."""
    return levels.to(dtype) - ((1 << bits) // 2 - 0.5)


def _packed(levels: Mapping[int, Tensor], size: int) -> Tensor:
    """Levels of the components with 1, 2, 4 and 8 bits, each `[tokens, n]` uint8, to codes `[tokens, size]`."""
    packed = levels[1]
    for bits in (1, 2, 4):
        packed = functional.pad(packed, (0, packed.shape[1] % 2))
        packed = torch.cat([levels[2 * bits], packed[:, ::2] | packed[:, 1::2] << bits], 1)
    return functional.pad(packed, (0, size - packed.shape[1]))


def _unpacked(codes: Tensor, counts: Mapping[int, int]) -> dict[int, Tensor]:
    """The inverse of `_packed`. `counts`: bits -> number of components."""
    levels = {}
    for bits in (8, 4, 2, 1):
        levels[bits], rest = codes[:, : counts[bits]], codes[:, counts[bits] :]
        lower = bits // 2
        codes = torch.stack([rest & (1 << lower) - 1, rest >> lower], 2).flatten(1)
    return levels


def shared_bits(variances: Tensor, budget: int) -> Tensor:
    """Shares bits among the components of a Gaussian so that their mean squared error is smallest.

    Each upgrade (0 to 1, 1 to 2, 2 to 4, 4 to 8 bits) lowers the error of a component by its variance times a constant.
    A later upgrade of the same component gains less per bit than an earlier one, so it is best to take the upgrades in
    the order of gain per bit. If one no longer fits, smaller ones fill the rest.

    Examples:
        >>> shared_bits(torch.tensor([100.0, 1.0, 0.0]), 5)
        tensor([4, 1, 0])

    Args:
        variances: `[n]`, not negative.
        budget: number of bits.

    Returns:
        `[n]`, 0, 1, 2, 4 or 8.
    """
    gains = torch.stack(
        [variances.double() * (QUANTIZERS[low][1] - QUANTIZERS[high][1]) / (high - low) for low, high in _UPGRADES], 1
    )
    order = torch.argsort(gains.flatten(), descending=True, stable=True)
    bits = [0] * len(variances)
    left = budget
    for place in order.tolist():
        if not left:
            break
        component, upgrade = divmod(place, len(_UPGRADES))
        low, high = _UPGRADES[upgrade]
        if bits[component] == low and high - low <= left and variances[component] > 0:
            bits[component] = high
            left -= high - low
    return torch.tensor(bits, device=variances.device)


def quantized(value: float, deviation: float, bits: int) -> tuple[int, float]:
    """The plain quantizer of one value of a normal variable: its level, counted from 0, and the level's value.

    Examples:
        >>> quantized(0.9, deviation=2.0, bits=2)
        (2, 0.9957)
    """
    step = QUANTIZERS[bits][0]
    half = 2**bits // 2
    level = min(max(math.floor(value / deviation / step), -half), half - 1) + half
    return level, (level - half + 0.5) * step * deviation
