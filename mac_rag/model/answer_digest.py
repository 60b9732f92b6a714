"""A digest of everything in a model that changes an answer, so that others can repeat a result.

The fingerprint says which banks a model may read, so it covers only what a bank depends on. The answer digest leaves
out only what cannot change an answer: where the weights came from; and the versions of libraries, whose rounding
differs no more than that of devices. Results record fingerprint and versions beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mac_rag.lm.devices import require_weights
from mac_rag.model.checkpoint import Parts

# Fields of `MACConfig`'s parts that say where weights and tokenizer come from; the digest covers these themselves.
_PLACES = frozenset(("name", "revision", "gguf_file"))
# Fields of transformers' configurations that say where a model comes from, or which version wrote it.
_ORIGINS = frozenset(
    ("_name_or_path", "name_or_path", "transformers_version", "architectures", "_from_model_config", "dtype")
)
# State of a tokenizer that its calls change.
_CALLS = ("truncation", "padding")


def answer_digest(parts: Parts, state: Mapping[str, Any]) -> str:
    """The digest; see `MACModel.answer_digest`.

    Args:
        parts: the parts of the model.
        state: all of its weights and buffers, by name.

    Raises:
        ConfigError: if weights of the LM are offloaded and so cannot be read.
    """
    require_weights(parts.base_lm.model, "an answer digest")
    digest = hashlib.sha256()
    for name, value in _described(parts):
        digest.update(f"{name}: {json.dumps(value, sort_keys=True, default=str)}\n".encode())
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _described(parts: Parts) -> Iterator[tuple[str, Any]]:
    """Everything except weights, by name, as values for JSON."""
    yield "configuration", _without(parts.config.model_dump(mode="json", exclude={"languages"}), _PLACES)
    lm = parts.base_lm.model
    yield "LM", _without(lm.config.to_dict(), _ORIGINS)
    yield "generation", _without(lm.generation_config.to_dict(), _ORIGINS)
    yield "tokenizer", _tokenizer(parts.base_lm.tokenizer)
    for name, encoder in parts.encoders.items():
        yield name, _without(encoder.network.backbone.config.to_dict(), _ORIGINS)
        yield f"{name} tokenizer", _tokenizer(encoder.tokenizer)
        sentence_encoder = encoder.network.sentence_encoder
        if sentence_encoder is not None:
            yield f"{name} sentence encoder", _without(sentence_encoder.config.to_dict(), _ORIGINS)


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {name: value for name, value in rules.items() if name not in _CALLS}
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return {
        "content": content,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat": getattr(tokenizer, "chat_template", None),
    }


def _without(values: Any, names: frozenset[str]) -> Any:
    """A copy of nested values without the fields in `names`."""
    if isinstance(values, Mapping):
        return {str(name): _without(value, names) for name, value in values.items() if name not in names}
    if isinstance(values, list | tuple):
        return [_without(value, names) for value in values]
    return values
