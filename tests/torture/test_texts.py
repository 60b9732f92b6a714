"""A small sample of nasty texts in every place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.model import MACModel
from tests.torture.texts import PIECES, check, readable, storable, texts


@pytest.fixture(scope="module")
def model() -> MACModel:
    return MACModel.from_pretrained("mac-tiny", device="cpu")


@pytest.mark.parametrize(
    "text",
    [
        "\ud83d", "\ud83d\ude00", "a\0b", " \n\t", "\x1b[2J\x07", "\N{RIGHT-TO-LEFT OVERRIDE}txt.exe",
        "a\nerror: lost", "\N{ZERO WIDTH JOINER}", "👩‍👩‍👧‍👦", "e" + "\N{COMBINING TILDE}" * 900, "Ab3/" * 500,
        "漢" * 600, "--bank", "-",
    ],
)  # fmt: skip
def test_a_text_is_kept_exactly_or_refused_with_its_place(model: MACModel, text: str) -> None:
    check(text, model)


@settings(deadline=None, max_examples=2)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=6).map("".join))
def test_mixtures(model: MACModel, text: str) -> None:
    check(text, model)


def test_the_sample_holds_texts_of_each_kind() -> None:
    sample = list(texts(seed=0, count=600))
    kinds = [(storable(text), readable(text)) for text in sample]
    assert all(kinds.count(kind) > 20 for kind in [(True, True), (True, False), (False, False)])
    assert max(map(len, sample)) > 100_000
