"""A bank split over processes gives what the whole bank gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import Chunk, direct_attention
from mac_rag.nn.bank_view import BankProjection
from mac_rag.nn.sharded import ShardedAttention
from tests.helpers import run_in_processes
from tests.nn.helpers import network, random, random_texts

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
# How many of the bank's rows each process holds.
SPLITS = [[7, 2], [3, 0, 6], [1, 1, 4, 3]]


def case() -> tuple[Tensor, Chunk]:
    bias = random(2, 3, 9, seed=3)
    bias[0, :, :3] = -torch.inf  # for one question, all that the first processes hold
    return 5 * random(2, 3, 4, 8), Chunk(random(3, 9, 2, 8, seed=1), random(3, 9, 2, 8, seed=2), bias)


def recent_case() -> tuple[AggregationNetwork, BankProjection]:
    """A network with a recency term and slots, and the whole bank with dates."""
    built = network(recency=True, slots=3)
    assert built.slots is not None
    for marks in built.slots.parameters():
        torch.nn.init.normal_(marks)
    dates = torch.tensor([5, 3, 8, 1, 9, 2, 7, 3, 4])
    return built, replace(built.project(random_texts(9, seed=1)), dates=dates)


def process(rank: int, folder: str) -> None:
    """One of four processes, the first of which form a group of their own for each split."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=max(map(len, SPLITS)))
    for number, split in enumerate(SPLITS):
        group = distributed.new_group(list(range(len(split))))
        if rank < len(split):
            attend_to_own_rows(rank, split, group, f"{folder}/{number}-{rank}.safetensors")
    distributed.destroy_process_group()


def attend_to_own_rows(rank: int, split: list[int], group: distributed.ProcessGroup, file: str) -> None:
    rows = slice(sum(split[:rank]), sum(split[: rank + 1]))
    attend = ShardedAttention(group)
    query, chunk = case()
    own = Chunk(chunk.keys[:, rows], chunk.values[:, rows], chunk.bias[..., rows])
    attended, mass = attend(query, [own], mass=True)
    assert attend(query, [own])[1] is None
    built, question = network(), random_texts(3)
    with torch.no_grad():
        bank = built.project(random_texts(9, seed=1)[rows])
        phi, shares = built(question, bank, attention=attend, mass=True)
    results = {"attended": attended, "mass": mass, "phi": phi, "shares": shares}
    newer, whole = recent_case()
    assert whole.dates is not None
    own_rows = replace(newer.project(random_texts(9, seed=1)[rows]), dates=whole.dates[rows])
    with torch.no_grad():
        recent, recent_shares = newer(question, own_rows, attention=attend, parts=attend, mass=True)
    results |= {"recent": recent, "recent_shares": recent_shares}
    save_file({name: result.contiguous() for name, result in results.items()}, file)


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each process found under each split; one start of the processes serves all, for it takes seconds."""
    folder = tmp_path_factory.mktemp("sharded")
    run_in_processes(process, str(folder), count=max(map(len, SPLITS)))
    return folder


@pytest.mark.parametrize("number", range(len(SPLITS)))
def test_processes_with_parts_of_a_bank_agree_with_one_that_has_it_all(number: int, results_folder: Path) -> None:
    query, chunk = case()
    built, question = network(), random_texts(3)
    bank: BankProjection = built.project(random_texts(9, seed=1))
    results = [*direct_attention(query, [chunk], mass=True), *built(question, bank, mass=True)]
    expected = dict(zip(["attended", "mass", "phi", "shares"], results, strict=True))
    newer, dated = recent_case()
    recent, recent_shares = newer(question, dated, mass=True)
    assert not torch.allclose(recent, newer(question, replace(dated, dates=None))[0])  # the term matters
    expected |= {"recent": recent, "recent_shares": recent_shares}
    first = load_file(results_folder / f"{number}-0.safetensors")
    for rank in range(len(SPLITS[number])):
        for name, found in load_file(results_folder / f"{number}-{rank}.safetensors").items():
            torch.testing.assert_close(found, expected[name].detach(), **CLOSE)
            assert found.equal(first[name])
