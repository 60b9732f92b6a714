"""The guide's table of fields: what this server does with each of them is what the table says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mac_rag.model import OwnKVModel
from tests.helpers import Folder, own_kv
from tests.server.helpers import serving

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
QUESTION = "Who opened the bridge?"
SAID: dict[str, Any] = {
    "chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}]},
    "completions": {"model": "tiny", "prompt": QUESTION},
    "responses": {"model": "tiny", "input": QUESTION},
    "embeddings": {"model": "all-MiniLM-L6-v2", "input": QUESTION},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TOOL = {"type": "function", "function": {"name": "weather"}}
DRAWN = {"temperature": 2.0, "seed": 0}
LONG = {"ignore_eos": True, "max_tokens": 24}
# Field -> a value that has an effect where the field is applied. `{}` is written over the whole body.
VALUES: dict[str, Any] = {
    "max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1, "temperature": 2.0, "top_p": 1e-6, "top_k": 1,
    "min_p": 1.0, "seed": 1, "n": 2, "presence_penalty": 2.0, "frequency_penalty": 2.0, "ignore_eos": True,
    "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, "tools": [TOOL],
    "tool_choice": "required", "response_format": {"type": "json_object"}, "instructions": "Be brief.",
    "encoding_format": "base64", "user": "ada", "store": True, "metadata": {"a": "b"}, "service_tier": "flex",
    "verbosity": "low", "cache_control": {"type": "ephemeral"}, "reasoning_effort": "low", "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False}, "typical_p": 0.5, "mirostat": 2, "dry_multiplier": 0.8,
    "functions": [TOOL["function"]], "prediction": {"type": "content", "content": "a"}, "audio": {"voice": "ash"},
    "web_search_options": {}, "repetition_penalty": 1.1, "min_tokens": 4, "stop_token_ids": [1], "bad_words": ["a"],
    "prompt_logprobs": 1, "structured_outputs": {"regex": "a"}, "repeat_penalty": 1.1, "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"}, "echo": True, "previous_response_id": "resp_1", "suffix": "a", "best_of": 2,
    "background": True, "dimensions": 64,
    "images": {"messages": [{"role": "user", "content": [IMAGE]}]}, "token ids": {"prompt": [1, 2]},
}  # fmt: skip
# What the field is sent with, and the response compared with.
BESIDE: dict[str, Any] = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "seed", "typical_p", "mirostat", "dry_multiplier"), DRAWN),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "logit_bias", "stop"), LONG),
    "temperature": {"seed": 0}, "top_logprobs": {"logprobs": True}, "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
}  # fmt: skip


def rows() -> Iterator[tuple[str, str, str]]:
    """The route, the field, and what becomes of it."""
    table = GUIDE.read_text().partition("| field | here | vLLM | llama.cpp |")[2].partition("\n\n")[0]
    for line in table.strip().splitlines()[1:]:
        cell, here, *_ = (part.strip() for part in line.strip("|").split("|"))
        for part in cell.split("; "):
            in_route = re.match(r"in (\w+) ", part)
            for field in re.findall(r"`(\w+)`|(images|token ids)", part):
                name = field[0] or field[1]
                route = "completions" if name in ("echo", "suffix", "best_of", "token ids") else "chat/completions"
                yield in_route[1] if in_route else route, name, here


@pytest.fixture(scope="module")
def model(model_folder: Folder) -> OwnKVModel:
    """An instruct LM, whose weights are random, so that each change of a prompt changes the answer."""
    return own_kv(model_folder("instruct"))


@pytest.fixture(scope="module")
def client(model: OwnKVModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("fields"), model) as running, running.client() as made:
        yield made


def told(response: httpx.Response) -> Any:
    """A response without what is new each time."""
    text = re.sub(r'"(id|created|created_at|item_id)": ?("[^"]*"|\d+)', "", response.text)
    return response.status_code, re.sub(r'"notes": ?\[[^]]*\]', "", text)


@pytest.mark.parametrize(("route", "field", "here"), list(rows()))
def test_a_field_is_treated_as_the_guide_says(
    client: httpx.Client, model: OwnKVModel, route: str, field: str, here: str
) -> None:
    plain = SAID[route] | (BESIDE.get(field, {}) if route == "chat/completions" else {})
    if field == "ignore_eos":  # the answer is to end at once without it
        plain |= {"logit_bias": {str(token): 100 for token in model.base_lm.end_tokens}, "max_tokens": 24}
    before = client.post(f"/v1/{route}", json=plain)
    assert before.status_code == 200, before.text
    value = VALUES.get(field)
    if field == "stop":
        value = before.json()["choices"][0]["message"]["content"][1:3]
    elif field == "logit_bias":
        value = {str(token): -100 for token in range(0, min(len(model.base_lm.tokenizer), 2_000), 2)}
    response = client.post(f"/v1/{route}", json=plain | (value if field in ("images", "token ids") else {field: value}))
    if here == "refused":
        assert response.status_code == 400, response.text
        param = response.json()["error"]["param"]
        assert param.startswith({"images": "messages", "token ids": "prompt"}.get(field, field))
    elif here == "applied":
        assert response.status_code in (200, 422), response.text
        assert told(response) != told(before)
    else:
        assert here in ("ignored", "ignored, with a note")
        notes = json.loads(response.text).get("notes", [])
        assert (told(response), any(field in note for note in notes)) == (told(before), "note" in here)


def test_the_table_names_each_field_once() -> None:
    named = [(route, field) for route, field, _ in rows()]
    assert len(named) == len(set(named)) > 40
    assert {field for _, field, _ in rows()} == {*VALUES, "logit_bias", "stop"}
