"""For all tests: no test reaches for a model hub, and tiny models are built once."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.places import IN_MEMORY
from tests.processes import forking

# The same examples at each run, so that a change is what makes a test fail; HYPOTHESIS_PROFILE=default draws new ones,
# and where a test does not say how many, twice as many.
settings.register_profile("short", settings.get_profile("ci"), max_examples=50)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on models this small, threads only wait for each other
os.environ.setdefault("TRITON_INTERPRET", "1")  # before transformers imports Triton: kernels run on the CPU


def pytest_configure() -> None:
    """Temporary folders are in memory, where there is room."""
    if IN_MEMORY is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's own cache folder, which is not used: what training keeps for later runs stays out of it."""
    from mac_rag.lm.fetched import CACHE_VARIABLE, cache_folder

    own = cache_folder()
    os.environ[CACHE_VARIABLE] = str(tmp_path_factory.mktemp("cache"))
    return own


@pytest.fixture(scope="session", autouse=True)
def _forking(user_cache: Path) -> Iterator[None]:
    """Before the first test, while there are no threads."""
    with forking():
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background may ignore SIGINT, and Python then installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny saved model: `llama`, `instruct`, `gpt2`, `t5` or `bert`; the same whichever test asks first."""
    import torch

    from tests import helpers

    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        place = root / name
        if not place.exists():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                getattr(helpers, f"save_{name}")(place)
        return place

    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny MAC checkpoint with random weights: a Llama, decoder-only encoders, a document prior."""
    import torch

    from mac_rag.model import MACModel
    from tests.helpers import mac_config

    config = mac_config(model_folder("llama"))
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("checkpoint") / "tiny"
    MACModel.from_config(config, device="cpu").save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def chat_checkpoint(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny MAC checkpoint around an instruct LM; its prompt format is `chat`."""
    import torch

    from mac_rag.config import PromptFormat
    from mac_rag.model import MACModel
    from tests.helpers import mac_config

    config = mac_config(model_folder("instruct"), prompt=PromptFormat(chat=True))
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("checkpoint") / "chat"
    MACModel.from_config(config, device="cpu").save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def loaded_tiny_model(tiny_checkpoint: Path):  # type: ignore[no-untyped-def]
    """A tiny MAC model that no test changes."""
    from mac_rag.model import MACModel

    return MACModel.from_pretrained(tiny_checkpoint, device="cpu")


@pytest.fixture(scope="session")
def mac_small():  # type: ignore[no-untyped-def]
    """The shipped model, which no test changes."""
    from mac_rag.model import MACModel

    return MACModel.from_pretrained("mac-small", device="cpu")


@pytest.fixture
def tiny_model(loaded_tiny_model):  # type: ignore[no-untyped-def]
    """A tiny MAC model of the test's own."""
    from tests.helpers import copy_of

    return copy_of(loaded_tiny_model)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest tests first, so that no worker waits for one that another has begun last."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Spares what importing has made later garbage collections, of which Accelerate makes one after each training."""
    gc.collect()
    gc.freeze()
