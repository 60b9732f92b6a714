"""A trained MAC model with other settings."""

from __future__ import annotations

from typing import Any

from mac_rag.config import AggregationConfig, MACConfig, YearsConfig
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel


def with_aggregation(model: MACModel, changes: dict[str, Any]) -> MACModel:
    """The same networks with other settings of aggregation; the model itself, if it has them already.

    Weights that it has stay, and what the settings add begins untrained: slots, the recency term.

    Args:
        model: a model. Its parts go over to the new model; do not use it any more.
        changes: settings of `mac_rag.config.AggregationConfig` and their new values.

    Raises:
        ConfigError: for settings that contradict each other, or under which weights have other shapes.
    """
    sizes = AggregationConfig.parse(model.config.aggregation.model_dump() | changes, "aggregation")
    if sizes == model.config.aggregation:
        return model
    try:
        again, unknown = rebuilt(model, model.config.model_copy(update={"aggregation": sizes}))
    except RuntimeError as error:
        raise ConfigError(
            f"the model's weights do not fit the aggregation settings {changes}: {str(error).splitlines()[-1].strip()}"
        ) from None
    if unknown:
        raise ConfigError(f"the aggregation settings {changes} would leave out trained weights: {', '.join(unknown)}")
    return again


def with_years(model: MACModel, years: YearsConfig) -> MACModel:
    """The same networks and weights with these years; banks of the model without them are not its own.

    Args:
        model: a model with hashed BM25. Its parts go over to the new model; do not use it any more.
        years: the new settings.
    """
    lexical = model.config.hashed_bm25
    assert lexical is not None
    hashed_bm25 = lexical.model_copy(update={"years": years})
    return rebuilt(model, model.config.model_copy(update={"hashed_bm25": hashed_bm25}))[0]


def rebuilt(model: MACModel, config: MACConfig) -> tuple[MACModel, list[str]]:
    """The model with another configuration of the same encoders and LM, and its weights that have no place there."""
    again = MACModel(config, model.base_lm, model.amortization, model.input_encoder)
    _, unknown = again.aggregation.load_state_dict(model.aggregation.state_dict(), strict=False)
    again.modulation.load_state_dict(model.modulation.state_dict())
    again.base_lm_trained = model.base_lm_trained
    return again.train(model.training), unknown
