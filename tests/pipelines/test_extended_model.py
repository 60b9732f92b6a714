"""A trained model with other settings of aggregation. What they add begins untrained; contradictions are refused."""

from __future__ import annotations

import pytest
import torch

from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from pipelines.objective import LossWeights, mac_loss
from pipelines.tasks.extended_model import with_aggregation
from tests.helpers import copy_of
from tests.pipelines.test_objective import BATCH


def test_slots_begin_in_a_model_without(loaded_tiny_model: MACModel) -> None:
    """The model's own weights stay, and a training reaches what is new."""
    model = with_aggregation(copy_of(loaded_tiny_model), {"slots": 2})
    old, new = loaded_tiny_model.aggregation.state_dict(), model.aggregation.state_dict()
    assert all(torch.equal(value, new[name]) for name, value in old.items())
    mac_loss(model, BATCH, LossWeights())[0]["loss"].backward()
    assert model.aggregation.slots is not None
    assert model.aggregation.slots.places.grad is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 1}, "would leave out trained weights: blocks.1"),
        ({"head_width": 4}, "do not fit the aggregation settings"),
        ({"slots": 1, "slot_cutoff": 4}, r"slot_cutoff is 4\.0, but slots is 1"),
        ({"slotz": 2}, "slotz: Extra inputs are not permitted"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    loaded_tiny_model: MACModel, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_aggregation(copy_of(loaded_tiny_model), changes)


def test_settings_that_a_model_has_leave_it_as_it_is(loaded_tiny_model: MACModel) -> None:
    assert with_aggregation(loaded_tiny_model, {"slots": 1}) is loaded_tiny_model
