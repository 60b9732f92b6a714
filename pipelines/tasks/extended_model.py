"""A trained MAC model whose aggregation network gets further parts, which begin untrained."""

from __future__ import annotations

from typing import Any

from mac_rag.config import AggregationConfig
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel


def with_aggregation(model: MACModel, changes: dict[str, Any]) -> MACModel:
    """The same networks with other settings of aggregation; the model itself, if it has them already.

    Weights that it has stay, and what the settings add begins untrained: slots, hops between them, the recency term.

    Args:
        model: a model. Its parts go over to the new model; do not use it any more.
        changes: settings of `mac_rag.config.AggregationConfig` and their new values.

    Raises:
        ConfigError: for settings that contradict each other, or under which weights have other shapes.
    """
    sizes = AggregationConfig.parse(model.config.aggregation.model_dump() | changes, "aggregation")
    if sizes == model.config.aggregation:
        return model
    config = model.config.model_copy(update={"aggregation": sizes})
    again = MACModel(config, model.base_lm, model.amortization, model.input_encoder)
    try:
        _, unknown = again.aggregation.load_state_dict(model.aggregation.state_dict(), strict=False)
        again.modulation.load_state_dict(model.modulation.state_dict())
    except RuntimeError as error:
        raise ConfigError(
            f"the model's weights do not fit the aggregation settings {changes}: {str(error).splitlines()[-1].strip()}"
        ) from None
    if unknown:
        raise ConfigError(f"the aggregation settings {changes} would leave out trained weights: {', '.join(unknown)}")
    again.base_lm_trained = model.base_lm_trained
    return again.train(model.training)
