"""The codec of keys and values, and k-means: against the plain quantizer, brute force, and numerical integration."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.errors import ConfigError
from mac_rag.nn.codec import QUANTIZERS, KVCodec, _packed, _unpacked, quantized, shared_bits
from mac_rag.nn.product_quantizer import k_means, nearest_codes

SHAPE = {"layers": 4, "kv_heads": 2, "head_width": 3, "group": 2}
NUMBERS = 4 * 2 * 2 * 3  # of a token


def alike(numbers: Tensor) -> Tensor:
    """Costs with which errors of a standard deviation cost the same in all heads."""
    return 1 / numbers.var(3, correction=0).mean(-1)


def keys_values(tokens: int, seed: int = 0) -> Tensor:
    """Numbers that depend on each other, with means and scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.Generator().manual_seed(99)  # the same for all seeds
    few = torch.randn(tokens, 6, generator=generator) * torch.tensor([9.0, 5, 3, 1, 0.5, 0.1])
    mixed = few @ torch.randn(6, NUMBERS, generator=mixing) + 0.2 * torch.randn(tokens, NUMBERS, generator=generator)
    mixed = mixed * torch.rand(NUMBERS, generator=mixing) + 20 * torch.randn(NUMBERS, generator=mixing)
    return mixed.T.reshape(4, 2, 2, 3, tokens).transpose(3, 4)


@pytest.fixture(scope="module")
def codec() -> KVCodec:
    fitted = KVCodec(**SHAPE)
    fitted.fit([keys_values(2000)], alike(keys_values(2000)))
    return fitted


def error(codec: KVCodec, numbers: Tensor, rate: int) -> float:
    """Mean squared error of coded numbers, each divided by its head's deviation, which is what bits are shared by."""
    squares = (codec.coded(numbers, rate) - numbers).square().mean((3, 4))
    return float((squares * alike(keys_values(2000))).mean())


class TestQuantizer:
    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    def test_steps_are_the_best_for_a_normal_variable(self, bits: int) -> None:
        def mean_error(step: float) -> float:
            """By integration over each interval in closed form."""

            def density(x: float) -> float:
                return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

            total, half = 0.0, 2**bits // 2
            for level in range(half):
                low, high = level * step, (level + 1) * step if level < half - 1 else 50.0
                middle = (level + 0.5) * step
                mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
                first, second = density(low) - density(high), mass + low * density(low) - high * density(high)
                total += second - 2 * middle * first + middle * middle * mass
            return 2 * total

        step, expected = QUANTIZERS[bits]
        assert mean_error(step) == pytest.approx(expected, rel=1e-3)
        assert mean_error(step) <= min(mean_error(step * 0.99), mean_error(step * 1.01))

    @given(
        st.lists(st.floats(0, 100), min_size=1, max_size=4).map(torch.tensor),
        st.integers(3, 20),
    )
    def test_no_other_way_to_share_bits_is_better(self, variances: Tensor, budget: int) -> None:
        """Upgrades of up to 4 bits cannot always fill a budget, so the rival has 3 bits fewer."""

        def total(bits: tuple[int, ...]) -> float:
            return sum(float(v) * QUANTIZERS[count][1] for v, count in zip(variances, bits, strict=True))

        shared = tuple(shared_bits(variances, budget).tolist())
        assert sum(shared) <= budget
        rivals = itertools.product(QUANTIZERS, repeat=len(variances))
        assert total(shared) <= min(total(rival) for rival in rivals if sum(rival) <= budget - 3) + 1e-9

    def test_components_without_variance_get_no_bits(self) -> None:
        assert shared_bits(torch.tensor([0.0, 1.0, 0.0]), 100).tolist() == [0, 8, 0]


class TestCodes:
    @pytest.mark.parametrize("rate", [1, 3, 7, 16, 48])
    def test_levels_are_those_of_the_plain_quantizer(self, codec: KVCodec, rate: int) -> None:
        numbers = keys_values(20, seed=1)
        decoded = codec.decode(codec.encode(numbers, rate))
        bits = shared_bits(codec.eigenvalues.flatten(), 8 * rate).view(codec.groups, codec.width)
        centred = (codec._grouped(numbers).double() - codec.mean[:, None].double()) / codec.scale[:, None].double()
        for group, token in itertools.product(range(codec.groups), range(20)):
            expected = torch.zeros(codec.width, dtype=torch.float64)
            for component in range(codec.width):
                count = int(bits[group, component])
                if count:
                    direction = codec.basis[group, :, component].double()
                    deviation = math.sqrt(codec.eigenvalues[group, component])
                    _, value = quantized(float(centred[group, token] @ direction), deviation, count)
                    expected += value * direction
            expected = expected * codec.scale[group] + codec.mean[group]
            torch.testing.assert_close(codec._grouped(decoded)[group, token].double(), expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("rate", [1, 5, 16, 48])
    def test_packed_codes_hold_exactly_what_training_sees(self, codec: KVCodec, rate: int) -> None:
        numbers = keys_values(50, seed=2)
        codes = codec.encode(numbers, rate)
        assert codes.shape == (50, rate)
        assert codes.dtype == torch.uint8
        assert torch.equal(codec.decode(codes), codec.coded(numbers, rate))

    @given(counts=st.fixed_dictionaries({bits: st.integers(0, 9) for bits in (8, 4, 2, 1)}), seed=st.integers(0, 99))
    @settings(max_examples=40, deadline=None)
    def test_a_code_is_one_level_after_the_other_bit_by_bit(self, counts: dict[int, int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        levels = {bits: torch.randint(2**bits, (3, counts[bits]), generator=generator).byte() for bits in (8, 4, 2, 1)}
        size = sum(bits * count for bits, count in counts.items()) // 8 + 2
        codes = _packed(levels, size)
        for row in range(3):
            number = place = 0
            for bits, own in levels.items():
                for level in own[row].tolist():
                    number |= level << place
                    place += bits
            assert bytes(codes[row].tolist()) == number.to_bytes(size, "little")
        assert all(torch.equal(own, levels[bits]) for bits, own in _unpacked(codes, counts).items())

    @pytest.mark.parametrize("rate", [3, 7])
    def test_products_in_half_precision_lose_no_more(self, codec: KVCodec, rate: int) -> None:
        numbers = keys_values(500, seed=5)
        errors = []
        for dtype in (torch.float32, torch.bfloat16):
            difference = codec.decode(codec.encode(numbers, rate, dtype), dtype).bfloat16() - numbers
            errors.append(float((codec._grouped(difference) / codec.scale[:, None]).norm()))
        assert errors[1] == pytest.approx(errors[0], rel=0.02)

    def test_more_bytes_lose_less(self, codec: KVCodec) -> None:
        numbers = keys_values(500, seed=3)
        errors = [error(codec, numbers, rate) for rate in (1, 2, 4, 8, 16, 48)]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] < 0.8 * 1.0
        assert errors[-1] < 1e-3

    def test_the_gradient_passes_where_there_are_bits_and_nowhere_else(self, codec: KVCodec) -> None:
        numbers = keys_values(5, seed=4).requires_grad_()
        wanted = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(5))
        (codec.coded(numbers, 4) * wanted).sum().backward()
        has_bits = (shared_bits(codec.eigenvalues.flatten(), 32) > 0).view(codec.groups, 1, codec.width)
        basis, scale = codec.basis, codec.scale[:, None]
        expected = ((codec._grouped(wanted) * scale) @ basis * has_bits) @ basis.mT / scale
        assert numbers.grad is not None
        torch.testing.assert_close(codec._grouped(numbers.grad), expected, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("rate", [0, NUMBERS + 1])
    def test_a_rate_that_cannot_be_had_is_refused(self, codec: KVCodec, rate: int) -> None:
        with pytest.raises(ConfigError, match=f"is {rate}; choose .* from 1 to {NUMBERS}"):
            codec.encode(keys_values(2), rate)


class TestFit:
    def test_parts_give_what_the_whole_gives(self, codec: KVCodec) -> None:
        other = KVCodec(**SHAPE)
        other.fit(list(keys_values(2000).split([1, 700, 1299], 3)), alike(keys_values(2000)))
        torch.testing.assert_close(other.eigenvalues, codec.eigenvalues, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.mean, codec.mean)

    def test_a_codec_that_was_loaded_forgets_how_it_shared_bits_before(self, codec: KVCodec) -> None:
        other = KVCodec(**SHAPE)
        assert not other.fitted
        other.fit([torch.randn(4, 2, 2, 100, 3)], torch.ones(4, 2, 2))
        numbers = keys_values(10, seed=6)
        other.coded(numbers, 4)
        other.load_state_dict(codec.state_dict())
        assert other.fitted
        assert torch.equal(other.coded(numbers, 4), codec.coded(numbers, 4))

    def test_heads_that_never_change_are_kept(self) -> None:
        numbers = keys_values(300)
        numbers[0, 0] = 7.0
        fitted = KVCodec(**SHAPE)
        fitted.fit([numbers], torch.ones(4, 2, 2))
        coded = fitted.coded(numbers, 16)
        assert torch.isfinite(coded).all()
        torch.testing.assert_close(coded[0, 0], numbers[0, 0])

    def test_heads_whose_errors_cost_more_get_more_bits(self, codec: KVCodec) -> None:
        numbers, cost = keys_values(500, seed=1), alike(keys_values(2000))
        cost[2, 0] *= 1e4
        weighted = KVCodec(**SHAPE)
        weighted.fit([keys_values(2000)], cost)
        before, after = ((one.coded(numbers, 6) - numbers).square().mean((3, 4)) for one in (codec, weighted))
        assert after[2, 0].max() < before[2, 0].min() / 4
        assert (after * cost).sum() < (before * cost).sum() / 4
        assert after.sum() > before.sum()
        same = KVCodec(**SHAPE)
        same.fit([keys_values(2000)], 1e-9 * cost)
        torch.testing.assert_close(same.coded(numbers, 6), weighted.coded(numbers, 6), rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("cost", [math.nan, math.inf])
    def test_costs_that_are_not_finite_are_refused(self, cost: float) -> None:
        with pytest.raises(ConfigError, match="cost is not finite"):
            KVCodec(**SHAPE).fit([keys_values(100)], torch.full((4, 2, 2), cost))

    def test_groups_that_do_not_divide_the_layers_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="30 layers cannot be divided into groups of 7"):
            KVCodec(layers=30, kv_heads=1, head_width=2, group=7)

    def test_one_token_is_too_few(self) -> None:
        with pytest.raises(ConfigError, match="1 tokens"):
            KVCodec(**SHAPE).fit([keys_values(1)], torch.ones(4, 2, 2))


VECTOR = 8


@pytest.mark.parametrize("rate", [4, 12, 40])
def test_a_compact_codec_writes_the_same_codes_when_it_is_loaded_or_compacted_again(codec: KVCodec, rate: int) -> None:
    numbers = keys_values(200, seed=1)
    before = error(codec, numbers, rate)
    own = copy.deepcopy(codec)
    state = own.compact(rate)
    again = own.compact(rate)
    loaded = KVCodec(**SHAPE)
    loaded.load_compact(again, rate)

    assert state["components"].dtype == torch.int8
    assert all(torch.equal(state[name], again[name]) for name in state)
    codes = own.encode(numbers, rate)
    assert torch.equal(loaded.encode(numbers, rate), codes)
    assert torch.equal(loaded.decode(codes), own.decode(codes))
    assert error(own, numbers, rate) < 1.02 * before + 1e-4


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distortion(vectors: Tensor, codebook: Tensor) -> float:
    return float(torch.cdist(vectors, codebook).min(1).values.square().mean())


@settings(max_examples=30, deadline=None)
@given(vectors=st.integers(1, 20), codes=st.integers(1, 20), seed=st.integers(0, 1000))
def test_the_nearest_codes_are_those_of_brute_force(vectors: int, codes: int, seed: int) -> None:
    some, codebook = random(seed, vectors, VECTOR), random(seed + 1, codes, VECTOR)
    nearest, squared = nearest_codes(some, codebook)
    distances = (some.double()[:, None] - codebook.double()).norm(dim=-1)
    chosen = distances.gather(1, nearest[:, None])[:, 0]
    torch.testing.assert_close(chosen, distances.min(1).values)
    torch.testing.assert_close(squared.double(), chosen.square(), atol=1e-4, rtol=1e-4)


def test_clusters_are_found() -> None:
    centres = 100 * random(0, 5, VECTOR)
    vectors = centres[torch.arange(60) % 5] + 0.01 * random(1, 60, VECTOR)
    best = min((k_means(vectors, 5, seed=seed) for seed in range(8)), key=lambda found: distortion(vectors, found))
    assert torch.cdist(centres, best).min(1).values.max() < 0.1


def test_every_code_is_the_mean_of_the_vectors_nearest_to_it() -> None:
    vectors = random(0, 120, VECTOR)
    codebook = k_means(vectors, 12, iterations=100)
    nearest = torch.cdist(vectors, codebook).argmin(1)
    for code in range(12):
        torch.testing.assert_close(codebook[code], vectors[nearest == code].mean(0))
    assert distortion(vectors, codebook) < distortion(vectors, k_means(vectors, 12, iterations=1))
    assert torch.equal(codebook, k_means(vectors, 12, iterations=100))
    assert not torch.equal(codebook, k_means(vectors, 12, iterations=100, seed=1))


def test_codes_without_vectors_are_put_to_use() -> None:
    """Even where most vectors are equal, so that most codes start at the same place."""
    vectors = torch.cat([torch.zeros(150, VECTOR), random(0, 12, VECTOR)])
    assert distortion(vectors, k_means(vectors, 13)) < 1e-6
