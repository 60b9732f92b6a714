"""The checkpoints of a run: trained tensors and one optimiser state, in safetensors, whole or in rows of each process.

    checkpoints/step-00000500/
      trainer.json                              step, best validation, passes of a step
      model.safetensors                         what training changes; frozen weights are not stored
      optimizer.safetensors                     the optimiser's state, `exp_avg/NAME` and so on for the weight NAME
      model-00000-of-00002.safetensors, ...     in place of these two, where parameters are sharded: each process's rows

A newer checkpoint is complete before the older one goes, so there are never more than two. When the run has exported
its last weights, `trainer.json` alone is left.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mac_rag.atomic_files import write_folder, write_text
from mac_rag.errors import DataError, ModelLoadError
from mac_rag.untrusted_files import ROW, MalformedError, lines_of, open_file, read_json

_STATE = "trainer.json"
_MODEL, _OPTIMIZER = "model", "optimizer"
_PER_WEIGHT = ("exp_avg", "exp_avg_sq")  # of a weight's shape; `step` is a scalar

_LARGEST_STATE = 1 << 16  # bytes
_LOGGED = re.compile(rb'\{"kind": "\w+", "step": (\d{1,18})[,}]')

Load: TypeAlias = Callable[[dict[str, Tensor]], None]


class Progress(NamedTuple):
    """Progress of a run.

    Attributes:
        step: number of optimiser steps done.
        best: the best validation so far; None before the first.
        passes: forward passes of one step over all processes.
        finished: True once the run has exported its last weights. Its checkpoint then holds nothing else.
    """

    step: int
    best: float | None
    passes: int
    finished: bool


def finished_steps(output: Path) -> int:
    """Number of steps in the newest checkpoint of the run in a folder; 0 without a checkpoint."""
    checkpoints = checkpoints_in(output / "checkpoints")
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return sorted(folder.glob("step-*"))


def progress_of(checkpoint: Path) -> Progress:
    """Reads the progress of a run from its checkpoint."""
    path = checkpoint / _STATE
    try:
        state = read_json(path, _LARGEST_STATE)
        step, best, passes, finished = state["step"], state["best"], state["passes"], state.get("finished", False)
        if type(step) is not int or step < 0 or isinstance(best, bool) or not isinstance(best, int | float | None):
            raise MalformedError(f"step is {step!r:.40}, and best is {best!r:.40}")
        if type(passes) is not int or passes < 1 or type(finished) is not bool:
            raise MalformedError(f"passes is {passes!r:.40}, and finished is {finished!r:.40}")
        return Progress(step, best, passes, finished)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged: {error}; remove {checkpoint}, and the run starts from the beginning"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def logged_until(log: Path, step: int) -> str:
    """The lines of a log until a step; a last line that a crash has cut is left out."""
    lines = []
    try:
        with open_file(log, follow=True) as file:
            for number, line in enumerate(lines_of(file, ROW), 1):
                if not line.endswith(b"\n"):
                    break
                begun = _LOGGED.match(line)  # its figures are copied, and may be NaN, which is no JSON
                if begun is None:
                    raise MalformedError(f"line {number} names no step")
                if int(begun[1]) > step:
                    break
                lines.append(line.decode())
    except ValueError as error:
        raise DataError(f"{log} is damaged: {error}; remove it, and the run continues with a new one") from None
    return "".join(lines)


class Checkpoints:
    """The checkpoints in a run's folder, which all processes see. They call the same methods in the same order."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder = folder
        self._accelerator = accelerator

    def write(self, state: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], progress: Progress) -> None:
        """Writes a checkpoint of the trained tensors and of `optimizer_tensors`, and removes the older one."""
        accelerator = self._accelerator
        with ExitStack() as stack:
            new = [""]
            if accelerator.is_main_process:
                new = [str(stack.enter_context(write_folder(self.folder / f"step-{progress.step:08d}")))]
            if accelerator.num_processes > 1:
                new = broadcast_object_list(new)  # the others wait here until the folder exists
            for kind, tensors in ((_MODEL, state), (_OPTIMIZER, optimizer)):
                self._write_tensors(Path(new[0]), kind, tensors)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (Path(new[0]) / _STATE).write_text(_state(progress))
        self.tidy()

    def _write_tensors(self, folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> None:
        rank, count = self._accelerator.process_index, self._accelerator.num_processes
        whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        if len(whole) == len(tensors):
            if rank == 0:
                save_file(whole, folder / f"{kind}.safetensors")
            return
        rows = {name: tensor.to_local().contiguous() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        save_file(rows | (whole if rank == 0 else {}), folder / f"{kind}-{rank:05d}-of-{count:05d}.safetensors")

    def tidy(self) -> None:
        """Removes all checkpoints but the newest, and leftovers of killed processes."""
        if self._accelerator.is_main_process:
            for path in (*checkpoints_in(self.folder)[:-1], *self.folder.glob(".step-*")):
                shutil.rmtree(path)
        self._accelerator.wait_for_everyone()

    def finish(self, progress: Progress) -> None:
        """Records that the run is finished, and removes the tensors of its checkpoint: nothing will start from them."""
        if self._accelerator.is_main_process:
            newest = checkpoints_in(self.folder)[-1]
            write_text(newest / _STATE, _state(progress._replace(finished=True)))
            for path in newest.iterdir():
                if path.name != _STATE:
                    path.unlink()
        self._accelerator.wait_for_everyone()

    def read(self, load: Load, state: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, task: nn.Module) -> None:
        """Restores the newest checkpoint.

        Args:
            load: takes the trained tensors.
            state: the present ones, for names, shapes and the rows of this process.
            optimizer: gets its state.
            task: has the optimiser's weights.

        Raises:
            DataError: for a damaged or missing file, which it names.
            ModelLoadError: if a name or a shape differs; names them.
        """
        newest = checkpoints_in(self.folder)[-1]
        with _opened(newest, _MODEL) as files:
            require_same_shapes(_shapes(state), files.shapes)
            load({name: files.like(name, tensor) for name, tensor in state.items()})
        with _opened(newest, _OPTIMIZER) as files:
            _load_optimizer(files, optimizer, task)

    def newest_progress(self) -> Progress | None:
        """Progress in the newest checkpoint; None without one."""
        checkpoints = checkpoints_in(self.folder)
        return progress_of(checkpoints[-1]) if checkpoints else None


def _state(progress: Progress) -> str:
    best = progress.best if progress.best is not None and math.isfinite(progress.best) else None  # JSON has no others
    finished = {"finished": True} if progress.finished else {}
    return json.dumps({"step": progress.step, "best": best, "passes": progress.passes, **finished})


def optimizer_tensors(optimizer: torch.optim.Optimizer, task: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as tensors: `STATE/NAME` for each state of a weight NAME that has had a gradient."""
    named = {parameter: name for name, parameter in task.named_parameters()}
    return {
        f"{key}/{named[parameter]}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _load_optimizer(files: _Files, optimizer: torch.optim.Optimizer, task: nn.Module) -> None:
    parameters = dict(task.named_parameters())
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = {name for name, parameter in parameters.items() if parameter in trained}
    stored = {full.partition("/")[2] for full in files.shapes}
    like = {f"{key}/{name}": parameters[name] for name in stored & names for key in _PER_WEIGHT}
    steps = {f"step/{name}": torch.zeros(()) for name in stored & names}
    require_same_shapes(_shapes(like) | _shapes(steps), files.shapes)
    for name in sorted(stored):
        parameter = parameters[name]
        step = files.like(f"step/{name}", steps[f"step/{name}"]).to(parameter.device)
        moments = {key: files.like(f"{key}/{name}", parameter.detach()) for key in _PER_WEIGHT}
        optimizer.state[parameter] = {"step": step, **moments}


def require_same_shapes(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the tensors of a run with those of its checkpoint.

    Raises:
        ModelLoadError: if a name or a shape differs; names them.
    """
    differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differ:
        raise ModelLoadError(f"the checkpoint belongs to another configuration; these differ: {', '.join(differ)}")


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class _Files:
    """The files of one kind in a checkpoint: one with whole tensors, or one of each process with its rows.

    Attributes:
        shapes: shapes of the whole tensors, by name.
    """

    def __init__(self, files: list[Any]) -> None:
        self._holding: dict[str, list[Any]] = {}
        for file in files:
            for name in file.keys():  # noqa: SIM118, a file is no mapping
                self._holding.setdefault(name, []).append(file)
        self.shapes = {name: self._shape(name) for name in self._holding}

    def _shape(self, name: str) -> tuple[int, ...]:
        shapes = [tuple(file.get_slice(name).get_shape()) for file in self._holding[name]]
        if len(shapes) == 1:
            return shapes[0]
        if any(shape[1:] != shapes[0][1:] or not shape for shape in shapes):
            raise ValueError(f"the processes have {name} in different shapes")
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A stored tensor on the device of another tensor of its shape, whole or sharded as that one is."""
        if not isinstance(tensor, DTensor):
            return self._rows(name, 0, tensor.shape[0] if tensor.ndim else 1).to(tensor.device)
        mesh = tensor.device_mesh
        first = min(mesh.get_local_rank() * -(-tensor.shape[0] // mesh.size()), tensor.shape[0])
        local = tensor.to_local()
        rows = self._rows(name, first, first + len(local)).to(local.device)
        return DTensor.from_local(
            rows, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def _rows(self, name: str, first: int, end: int) -> Tensor:
        """The rows from `first` to `end`; a scalar as it is."""
        if not self.shapes[name]:
            scalar: Tensor = self._holding[name][0].get_tensor(name)
            return scalar
        parts, start = [], 0
        for file in self._holding[name]:
            part = file.get_slice(name)
            count = part.get_shape()[0]
            if max(first, start) < min(end, start + count):
                parts.append(part[max(first - start, 0) : min(end - start, count)])
            start += count
        if not parts:  # a process may have no rows of a small tensor
            none: Tensor = self._holding[name][0].get_tensor(name)[:0]
            return none
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def _opened(checkpoint: Path, kind: str) -> Any:
    """Opens the files of one kind."""
    whole = checkpoint / f"{kind}.safetensors"
    paths = [whole] if whole.exists() else sorted(checkpoint.glob(f"{kind}-*-of-*.safetensors"))
    try:
        if not paths or (paths != [whole] and paths[0].name != f"{kind}-00000-of-{len(paths):05d}.safetensors"):
            raise ValueError(f"of the files {kind}-*.safetensors, some are missing")
        with ExitStack() as stack:
            yield _Files([stack.enter_context(safe_open(path, framework="pt")) for path in paths])
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"{checkpoint} is damaged ({kind}): {error}; remove it, and the run starts from the beginning"
        ) from None
