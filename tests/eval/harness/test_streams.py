"""Streams: generated newswire, and data sets by folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.harness.streams import named_folder, open_stream
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, DataError


def test_a_data_set_is_named_by_its_folder_or_before_a_colon() -> None:
    assert named_folder("corpora/squad") == ("squad", Path("corpora/squad"))
    assert named_folder("archivalqa:/tmp/nyt") == ("archivalqa", Path("/tmp/nyt"))


@pytest.mark.parametrize("data", ["corpora", "newswire", "nyt:folder", ""])
def test_an_unknown_data_set_is_refused(data: str) -> None:
    with pytest.raises(ConfigError, match=r"names no data set; give a folder of the name squad, streamingqa or archiv"):
        named_folder(data)


def test_without_data_the_newswire_is_generated_at_the_tiny_scale_only() -> None:
    dataset, source = open_stream(None, "test", 6, 3, seed=5, scale="tiny")
    assert source == "generated"
    assert dataset.documents == generate("test", 6, seed=5).documents
    assert len(dataset.questions) == 3
    with pytest.raises(ConfigError, match="give one with --data"):
        open_stream(None, "test", 6, 3, seed=5, scale="paper")


def test_a_data_set_is_read_from_its_folder(tmp_path: Path) -> None:
    stream = generate("test", 8)
    write_archivalqa(stream, tmp_path / "test.csv")
    dataset, source = open_stream(f"archivalqa:{tmp_path}", "test", 6, seed=0, scale="paper")
    assert (dataset.documents, dataset.questions) == (stream.documents[:6], stream.questions[:6])
    assert source == str(tmp_path)
    with pytest.raises(DataError):
        open_stream(f"squad:{tmp_path}", "test", 6, 3, seed=0, scale="tiny")
