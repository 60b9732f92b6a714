"""The training loop: exact resume after a kill, accumulation, several processes, exports, schedules, batches."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mac_rag.errors import ConfigError, DataError, ModelLoadError
from pipelines.recipe import keep_recipe
from pipelines.trainer import Task, Trainer, TrainerConfig, shuffled
from tests.helpers import DEEP, DIGITS
from tests.pipelines.helpers import metrics
from tests.pipelines.toy_training import ITEMS, ToyTask, train
from tests.processes import run_in_process

ROOT = Path(__file__).parents[2]


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run / name / "model.safetensors")


def interrupted(run: Path, step: int = 13, **trainer: Any) -> Path:
    """Interrupts a run in a step, and returns its newest checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        train(run, stop=("batch", step), **trainer)
    return max((run / "checkpoints").iterdir())


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    run = tmp_path_factory.mktemp("whole")
    train(run, dropout=0.2)
    return run


class TestResume:
    @pytest.mark.parametrize("place", [("batch", 13), ("save", 17)], ids=["in-a-step", "in-an-export"])
    def test_a_killed_run_goes_on_exactly(self, whole: Path, tmp_path: Path, place: tuple[str, int]) -> None:
        assert run_in_process(train, tmp_path, dropout=0.2, kill=place) == -signal.SIGKILL
        assert len(metrics(tmp_path)) < len(metrics(whole))
        task, _ = train(tmp_path, dropout=0.2)
        assert len(task.drawn) < 24 * 8, "the run started over"
        assert metrics(tmp_path) == metrics(whole)
        for name in ("best", "last"):
            torch.testing.assert_close(weights(tmp_path, name), weights(whole, name), rtol=0, atol=0)

    def test_a_line_cut_by_a_crash_is_written_again(self, whole: Path, tmp_path: Path) -> None:
        interrupted(tmp_path, dropout=0.2)
        log = tmp_path / "metrics.jsonl"
        log.write_text(log.read_text()[:-9])
        train(tmp_path, dropout=0.2)
        assert metrics(tmp_path) == metrics(whole)

    @pytest.mark.parametrize(
        "content",
        [
            DEEP,
            f'{{"step": {DIGITS}, "best": null}}',
            '{"step": -1, "best": null, "passes": 1}',
            '{"step": 1}',
            '{"step": 1, "best": null, "passes": null}',
            "[]",
            "{",
        ],
    )
    def test_a_damaged_checkpoint_is_named(self, tmp_path: Path, content: str) -> None:
        (interrupted(tmp_path) / "trainer.json").write_text(content)
        with pytest.raises(DataError, match=r"trainer\.json is damaged: .* remove .*step-00000008"):
            train(tmp_path)

    def test_a_damaged_log_is_named(self, tmp_path: Path) -> None:
        interrupted(tmp_path, step=8)
        log = tmp_path / "metrics.jsonl"
        before = log.read_text()
        log.write_text('{"kind": "train", "step": 1, "loss": NaN}\n' + before)  # what json.dumps writes
        interrupted(tmp_path, step=8)
        assert before in log.read_text()
        for line in (DEEP, f'{{"kind": "train", "step": {DIGITS}}}', "null"):
            log.write_text(f"{before}{line}\n")
            with pytest.raises(DataError, match=rf"metrics\.jsonl is damaged: line {len(before.splitlines()) + 1} "):
                train(tmp_path)

    def test_a_finished_run_trains_no_further(self, tmp_path: Path) -> None:
        train(tmp_path)
        before = metrics(tmp_path)
        task, figures = train(tmp_path)
        assert task.drawn == []
        assert figures == {}
        assert metrics(tmp_path) == before
        (tmp_path / "last" / "model.safetensors").unlink()
        (tmp_path / "last").rmdir()
        with pytest.raises(DataError, match=r"was finished, but .*last is gone; delete"):
            train(tmp_path)

    def test_at_most_two_checkpoints_and_one_in_the_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, most = tmp_path / "checkpoints", []
        save = safetensors.torch.save_file

        def watched(tensors: dict[str, torch.Tensor], path: Path) -> None:
            save(tensors, path)
            most.append(len(list(folder.rglob("optimizer*"))))

        monkeypatch.setattr("pipelines.checkpoints.save_file", watched)
        with monkeypatch.context() as patched:
            patched.setattr("shutil.rmtree", _refused_for("step-00000002"))
            with pytest.raises(OSError, match="no more"):  # as by a kill before the older one was removed
                train(tmp_path, save_every=2)
        (folder / ".step-00000009.new").mkdir()
        (folder / ".step-00000009.new" / "optimizer.safetensors").touch()
        newest = interrupted(tmp_path, step=23, save_every=2)
        assert [path.name for path in folder.iterdir()] == ["step-00000022"]
        files = {"model.safetensors", "optimizer.safetensors", "trainer.json"}
        assert {path.name for path in newest.iterdir()} == files
        assert "frozen.weight" not in load_file(newest / "model.safetensors")
        assert max(most) == 2

    def test_a_finished_run_keeps_no_optimiser(self, whole: Path) -> None:
        assert [path.name for path in (whole / "checkpoints").rglob("*")] == ["step-00000024", "trainer.json"]

    def test_a_missing_last_export_is_made(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "_export", _failing_for("last"))
            with pytest.raises(OSError, match="no space"):
                train(tmp_path, dropout=0.2)
        task, _ = train(tmp_path, dropout=0.2)
        assert task.drawn == []
        torch.testing.assert_close(weights(tmp_path), weights(whole), rtol=0, atol=0)

    @pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
    def test_damaged_tensors_are_named(self, tmp_path: Path, file: str) -> None:
        path = interrupted(tmp_path) / file
        for damage in (lambda: path.write_bytes(path.read_bytes()[:-8]), path.unlink):
            damage()
            with pytest.raises(
                DataError, match=rf"step-00000008 is damaged \({path.stem}\): .*starts from the beginning"
            ):
                train(tmp_path)

    def test_a_step_of_another_number_of_passes_is_refused(self, tmp_path: Path) -> None:
        interrupted(tmp_path)
        with pytest.raises(ConfigError, match=r"with 1 passes a step .*, and now there are 2; start as many processes"):
            train(tmp_path, accumulate=2)

    @pytest.mark.parametrize("name", ["exp_avg/layers.0.weight", "step/layers.3.bias"])
    def test_an_optimiser_of_other_weights_is_refused(self, tmp_path: Path, name: str) -> None:
        path = interrupted(tmp_path) / "optimizer.safetensors"
        state = load_file(path)
        state["exp_avg/layers.9.weight"] = state.pop(name)
        save_file(state, path)
        with pytest.raises(ModelLoadError, match=rf"exp_avg/layers\.9\.weight.*|.*{name}"):
            train(tmp_path)

    def test_names_and_shapes_that_differ_are_refused(self) -> None:
        state = ToyTask().training_state()
        with pytest.raises(ModelLoadError, match=r"layers\.0\.weight$"):
            ToyTask().load_training_state({**state, "layers.0.weight": torch.zeros(2, 6)})
        state["layers.9.weight"] = state.pop("layers.0.weight")
        with pytest.raises(ModelLoadError, match=r"layers\.0\.weight, layers\.9\.weight"):
            ToyTask().load_training_state(state)

    def test_another_configuration_in_the_folder_is_refused(self, tmp_path: Path) -> None:
        config = TrainerConfig(steps=5, batch_size=2, learning_rate=0.1)
        keep_recipe(config.model_dump(mode="json"), tmp_path)
        keep_recipe(config.model_dump(mode="json"), tmp_path)
        with pytest.raises(ConfigError, match="another configuration: steps was 5 and is now 6"):
            keep_recipe(config.model_dump(mode="json") | {"steps": 6}, tmp_path)


def _refused_for(name: str) -> Callable[..., None]:
    remove = shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).name == name:
            raise OSError("no more")
        remove(path, ignore_errors=ignore_errors)

    return refuse


def _failing_for(name: str) -> Callable[[Trainer, str], None]:
    export = Trainer._export

    def failing(self: Trainer, exported: str) -> None:
        if exported == name:
            raise OSError("no space")
        export(self, exported)

    return failing


def test_training_state_holds_what_steps_change_each_once() -> None:
    class Tied(ToyTask):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.layers

    names = {"layers.0.weight", "layers.0.bias", "layers.3.weight", "layers.3.bias", "seen"}
    assert set(Tied().training_state()) == names
    other = Tied()
    other.load_training_state({name: tensor + 1 for name, tensor in Tied().training_state().items()})
    torch.testing.assert_close(other.again[0].weight, Tied().layers[0].weight + 1)


@pytest.mark.parametrize("best", ["error", "gain"])  # of which one is better the lower it is, the other the higher
def test_best_is_the_best_validation_and_last_the_final_weights(tmp_path: Path, best: str) -> None:
    task, figures = train(tmp_path, learning_rate=0.1, validate_every=1, best=best)
    errors = [line["error"] for line in metrics(tmp_path) if line["kind"] == "val"]
    assert len(errors) == 24
    assert errors[-1] == figures["error"]
    torch.testing.assert_close(weights(tmp_path), dict(task.layers.state_dict()))
    task.layers.load_state_dict(weights(tmp_path, "best"))
    with torch.no_grad():
        assert task.eval().validate()["error"] == min(errors)


def test_the_last_weights_may_be_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    _, figures = train(tmp_path / "mean", schedule="constant", average_from=0.875)
    for steps in (22, 23, 24):
        train(tmp_path / str(steps), schedule="constant", steps=steps)
    parts = [weights(tmp_path / str(steps)) for steps in (22, 23, 24)]
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    torch.testing.assert_close(weights(tmp_path / "mean"), mean)
    task = ToyTask()
    task.layers.load_state_dict(mean)
    with torch.no_grad():
        assert figures["error"] == pytest.approx(task.eval().validate()["error"])


@pytest.mark.parametrize("step", [10, 13, 20], ids=["before-the-mean", "at-its-start", "in-it"])
def test_a_mean_goes_on_where_it_was_interrupted(tmp_path: Path, step: int) -> None:
    settings = {"dropout": 0.2, "save_every": 3, "average_from": 0.5}
    train(tmp_path / "whole", **settings)
    interrupted(tmp_path / "parts", step, **settings)
    train(tmp_path / "parts", **settings)
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_each_example_counts_once_however_a_step_is_divided(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "1x16", batch_size=16)
    parts, _ = train(tmp_path / "2x8", batch_size=8, accumulate=2)
    assert whole.drawn == parts.drawn
    torch.testing.assert_close(weights(tmp_path / "2x8"), weights(tmp_path / "1x16"))
    for name in ("loss", "gradient_norm"):
        one, two = ([line[name] for line in metrics(tmp_path / n) if name in line] for n in ("1x16", "2x8"))
        assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_as_one_that_accumulates(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finished = command(*launch, "-m", "tests.pipelines.toy_training", str(tmp_path / "two"))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("threads:") == 2
    assert "gloo" not in finished.stdout  # a thread of the process group at the interpreter's end may abort the process
    train(tmp_path / "one", accumulate=2)
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"))
    one, two = ([line["loss"] for line in metrics(tmp_path / n) if line["kind"] == "train"] for n in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-4)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class Diverging(ToyTask):
        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(batch)["loss"] * float("inf")}

    config = TrainerConfig(steps=3, batch_size=4, learning_rate=0.1, cpu=True)
    with pytest.raises(ConfigError, match=r"inf at step 0; lower trainer\.learning_rate"):
        Trainer(Diverging(), config, tmp_path).run()
    assert not (tmp_path / "checkpoints").exists()


def test_an_unknown_figure_for_the_best_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'bleu'; validation gives \\['error', 'gain', 'seen'\\]"):
        train(tmp_path, best="bleu")


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@settings(deadline=None)
@given(warmup=st.integers(0, 50), steps=st.integers(1, 100))
def test_schedules_warm_up_and_never_rise_again(schedule: Any, warmup: int, steps: int) -> None:
    config = TrainerConfig(steps=steps, batch_size=1, learning_rate=1.0, warmup_steps=warmup, schedule=schedule)
    rates = [config.rate(step) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:warmup] == [(i + 1) / warmup for i in range(min(warmup, steps))]
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)
    if after:
        assert after[0] == 1
        assert schedule != "constant" or after[-1] == 1


@settings(deadline=None)
@given(
    length=st.integers(1, 60), size=st.integers(1, 9), passes=st.integers(1, 4), seed=st.integers(0, 5), data=st.data()
)
def test_an_epoch_draws_every_index_once(length: int, size: int, passes: int, seed: int, data: st.DataObject) -> None:
    def draw(number: int) -> list[int]:
        step, micro = divmod(number, passes)
        return list(shuffled(length, step, micro, size, seed=seed, per_step=size * passes))

    epochs = 3
    drawn = [index for number in range(-(-epochs * length // size)) for index in draw(number)]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * length : (epoch + 1) * length]) == list(range(length))
    number = data.draw(st.integers(0, 1000))
    torch.manual_seed(number)
    assert draw(number) == draw(number)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return list(shuffled(ITEMS, number, 0, ITEMS, seed=seed, per_step=ITEMS))

    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1), epoch(1, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_matrices_decay_and_vectors_do_not() -> None:
    task: Task = ToyTask()
    matrices, vectors = task.parameter_groups()
    assert [p.ndim for p in matrices["params"]] == [2, 2]
    assert [p.ndim for p in vectors["params"]] == [1, 1]
    assert vectors["weight_decay"] == 0
