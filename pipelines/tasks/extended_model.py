"""A trained MAC model with another configuration."""

from __future__ import annotations

from mac_rag.config import MACConfig
from mac_rag.model import MACModel


def rebuilt(model: MACModel, config: MACConfig) -> MACModel:
    """The same encoders, LM and weights with another configuration, which adds to the model's own.

    What the configuration adds to the aggregation network begins untrained.

    Args:
        model: a model. Its parts go over to the new model; do not use it any more.
        config: its configuration with additions, such as a recency term.
    """
    again = MACModel(config, model.base_lm, model.amortization, model.input_encoder)
    again.aggregation.load_state_dict(model.aggregation.state_dict(), strict=False)
    again.modulation.load_state_dict(model.modulation.state_dict())
    again.base_lm_trained = model.base_lm_trained
    return again.train(model.training)
