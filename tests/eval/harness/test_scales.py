"""The sizes of each experiment at its two scales, and the options that override them."""

from __future__ import annotations

from eval.harness.scales import PAPER_SCALE, TINY_SCALE, Setup

SETUP = Setup("mac-tiny", 6, 3)


def test_options_override_the_setup() -> None:
    assert SETUP.override() == SETUP
    assert SETUP.override(model="folder", documents=9, questions=1) == Setup("folder", 9, 1)
    assert SETUP.options({"model": None, "seed": 4}) == {"model": "mac-tiny", "documents": 6, "questions": 3, "seed": 4}


def test_every_experiment_has_both_scales() -> None:
    assert TINY_SCALE.keys() == PAPER_SCALE.keys()
    assert {setup.model for setup in TINY_SCALE.values()} == {"mac-tiny"}
