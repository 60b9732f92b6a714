"""What options of evaluations stand for: streams, numbers, and the sizes of both scales."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.harness.command import whole_numbers
from eval.harness.streams import named_data, open_stream
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, DataError


def test_a_data_set_is_named_by_its_folder_or_before_a_colon() -> None:
    assert named_data("corpora/squad") == ("squad", Path("corpora/squad"))
    assert named_data("archivalqa:/tmp/nyt") == ("archivalqa", Path("/tmp/nyt"))
    assert named_data("own:corpora/squad") == ("own", Path("corpora/squad"))


def test_any_other_file_or_folder_is_data_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a:b.csv").touch()
    for path in (tmp_path, tmp_path / "a:b.csv"):
        assert named_data(str(path)) == ("own", path)
    for name in ("hub:someone/questions", "hub:someone/questions/en:test"):
        assert named_data(name) == named_data(f"own:{name}") == ("own", Path(name))


@pytest.mark.parametrize("data", ["corpora", "newswire", "nyt:folder", ""])
def test_an_unknown_data_set_is_refused(data: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"names no data set; give a folder of the name squad, streamingqa, archivalqa, timeqa or real",
    ):
        named_data(data)


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
    (tmp_path / "mine.csv").write_text("document,question,answers\nRain fell.,What fell?,rain\n")
    own, source = open_stream(str(tmp_path / "mine.csv"), "all", 6, seed=0, scale="tiny")
    assert (own.questions[0].answers, source) == (("rain",), str(tmp_path / "mine.csv"))
    with pytest.raises(DataError):
        open_stream(f"squad:{tmp_path}", "test", 6, 3, seed=0, scale="tiny")


def test_sizes_are_sorted_and_at_least_one() -> None:
    assert whole_numbers("--sizes", "256, 32,32") == [32, 256]
    with pytest.raises(ConfigError, match="at least 1, got '0,5'"):
        whole_numbers("--sizes", "0,5")
