"""Checkpoints: configurations, tokenizers and weights that lie, and code that wants to be run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from mac_rag.model import MACModel
from tests.helpers import mac_config, save_llama
from tests.torture.mutations import Mutations, Way, damage_bytes, damage_kind, mutate_json, refusal

# Numbers that cost memory or time where they are believed.
_LARGE = (1 << 16, 1 << 24, 1 << 31, 1 << 40, 10**18)
_CODE = "from pathlib import Path\nPath(__file__).with_name('was-run').touch()\n"


class Torture(Mutations):
    """A MAC around a small Llama, which the checkpoint embeds. It has no checksums."""

    def make(self, place: Path) -> list[Path]:
        model = MACModel.from_config(mac_config(save_llama(place / "lm")), device="cpu")
        model.save_pretrained(place / "checkpoint")
        return [place / "checkpoint"]

    def ways(self, folder: Path, *, sealed: bool) -> Sequence[Way]:
        return [] if sealed else [damage_bytes, damage_kind, _said, _said, _large, _large, _header, _code]

    def check(self, folder: Path) -> None:
        """Loads the checkpoint, and uses it where that succeeds."""

        def use() -> None:
            model = MACModel.from_pretrained(folder, device="cpu")
            modulation = model.aggregate(["Who?"], model.amortize(["Anna opened it."]))
            model.generate(["Who?"], modulation=modulation, max_new_tokens=4)

        refused = refusal(use)
        assert refused is None or len(refused) < 20_000
        assert not list(folder.rglob("was-run"))


def _said(folder: Path, rng: random.Random) -> str:
    path = _json(folder, rng)
    text = mutate_json(json.loads(path.read_bytes()), rng)
    path.write_text(text)
    return f"{path.relative_to(folder)}: {text[:300]}"


def _large(folder: Path, rng: random.Random) -> str:
    """A number of a configuration that is larger than anything."""
    path = _json(folder, rng)
    content = json.loads(path.read_bytes())
    names = [name for name, value in content.items() if type(value) is int]
    if not names:
        return _said(folder, rng)
    name, value = rng.choice(names), rng.choice(_LARGE)
    path.write_text(json.dumps({**content, name: value}))
    return f"{path.relative_to(folder)}: {name} = {value}"


def _header(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.rglob("*.safetensors")))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = mutate_json(json.loads(data[8 : 8 + length]), rng).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{path.relative_to(folder)}: {text[:200]!r}"


def _code(folder: Path, rng: random.Random) -> str:
    """A module beside a configuration that names it."""
    path = rng.choice([path for path in sorted(folder.rglob("*config.json")) if path.parent != folder])
    content = json.loads(path.read_bytes())
    classes = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "own.Own")
    content["auto_map"] = {**classes, "AutoTokenizer": ["own.Own", None]}
    if rng.random() < 0.5:
        content["model_type"] = "own"
    path.write_text(json.dumps(content))
    (path.parent / "own.py").write_text(_CODE)
    return str(path.relative_to(folder))


def _json(folder: Path, rng: random.Random) -> Path:
    return rng.choice([path for path in sorted(folder.rglob("*.json")) if path.stat().st_size < 20_000])
