from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock import fs
from penstock.errors import ResumeError
from penstock.train import Checkpoint, ModelConfig, build_model, find_latest
from penstock.train.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    STATE_NAME,
    checkpoint_folders,
    load_parameters,
    plain_parameters,
    prune_checkpoints,
    read_tensors,
    remove_unfinished_saves,
    save_checkpoint,
)

pytestmark = pytest.mark.torture(lane="E", sample=True)

Seam = Callable[[Callable[[str, str], None] | None], None]


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours may catch it and carry on."""


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.norm.weight": torch.full((3,), float(step)), "lm_head.weight": torch.full((2, 3), step + 0.5)}


def save(run: Path, step: int, *, keep: int = 2) -> Checkpoint:
    checkpoint = save_checkpoint(
        run, step=step, model_tensors=tensors(step), optimizer_tensors={}, state={"note": f"of step {step}"}
    )
    prune_checkpoints(run, keep=keep, verified=checkpoint)
    return checkpoint


def assert_whole(checkpoint: Checkpoint | None, *, steps: set[int]) -> None:
    assert checkpoint is not None
    assert checkpoint.step in steps
    found = read_tensors(checkpoint.path / MODEL_NAME)
    assert all(torch.equal(found[name], value) for name, value in tensors(checkpoint.step).items())
    assert checkpoint.state["note"] == f"of step {checkpoint.step}"


def steps_of(run: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in checkpoint_folders(run)]


def test_the_newest_is_found_and_older_ones_go(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    for step in (5, 10, 100_000_000, 100_000_005):
        save(tmp_path, step)
        assert_whole(find_latest(tmp_path), steps={step})
    assert steps_of(tmp_path) == [100_000_005, 100_000_000]


def test_a_save_cut_short_at_any_operation_leaves_a_whole_one(tmp_path: Path, set_before_operation: Seam) -> None:
    for count in range(1, 100):
        run = tmp_path / f"run-{count}"
        save(run, 1)
        operations = iter(range(1, 1000))

        def kill(_operation: str, _path: str, operations: object = operations, count: int = count) -> None:
            if next(operations) == count:  # type: ignore[call-overload]
                raise Killed

        set_before_operation(kill)
        try:
            save(run, 2, keep=1)
        except Killed:
            set_before_operation(None)
            assert_whole(find_latest(run), steps={1, 2})
            remove_unfinished_saves(run)
            save(run, 3, keep=1)
            assert steps_of(run) == [3]
            assert [path for path in run.rglob("*") if fs.TEMPORARY_MARK in path.name] == []
        else:
            assert count > 15  # the loop met every operation
            return
    pytest.fail("a save never ended")


KILL_EVERY_SAVE = """
import os, signal, sys
from pathlib import Path
import torch
from penstock import fs
from penstock.train.checkpoint import save_checkpoint, prune_checkpoints

def save(run, step):
    tensors = {"model.norm.weight": torch.full((3,), float(step)), "lm_head.weight": torch.full((2, 3), step + 0.5)}
    saved = save_checkpoint(
        run, step=step, model_tensors=tensors, optimizer_tensors={}, state={"note": f"of step {step}"})
    prune_checkpoints(run, keep=1, verified=saved)

def kill_at(count):
    left = [count]
    def seam(operation, path):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return seam

for count in range(1, 100):
    run = Path(sys.argv[1], f"run-{count}")
    save(run, 1)
    child = os.fork()
    if child == 0:
        fs.before_operation = kill_at(count)
        save(run, 2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        print(count - 1, os.WEXITSTATUS(status))
        break
"""


def test_a_save_killed_at_any_operation_leaves_a_whole_one(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", KILL_EVERY_SAVE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    num_kills, exit_status = map(int, answer.stdout.split())
    assert exit_status == 0
    assert num_kills > 15
    found = [find_latest(tmp_path / f"run-{count}") for count in range(1, num_kills + 1)]
    for checkpoint in found:
        assert_whole(checkpoint, steps={1, 2})
    assert {checkpoint.step for checkpoint in found if checkpoint} == {1, 2}


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(checkpoint_folders(tmp_path)[0], tmp_path / "checkpoints" / "step-00000002.tmp-77-0123abcd")
    assert steps_of(tmp_path) == [1]
    assert remove_unfinished_saves(tmp_path) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def every_kind_of_damage(folder: Path) -> list[tuple[str, Callable[[], object]]]:
    def flip(name: str, position: int) -> Callable[[], object]:
        data = bytearray((folder / name).read_bytes())
        data[position] ^= 1
        return lambda: (folder / name).write_bytes(data)

    def cut(name: str, length: int) -> Callable[[], object]:
        data = (folder / name).read_bytes()
        return lambda: (folder / name).write_bytes(data[:length])

    found: list[tuple[str, Callable[[], object]]] = []
    for name in (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME):
        size = (folder / name).stat().st_size
        found += [(name, flip(name, position)) for position in {0, 9, size // 2, size - 1}]
        found += [(name, cut(name, length)) for length in (0, 1, size // 2, size - 1)]
        found += [(name, (folder / name).unlink)]
    return found


def test_a_damaged_newest_is_passed_over_and_named(tmp_path: Path) -> None:
    for number in range(27):
        run = tmp_path / str(number)
        save(run, 1)
        save(run, 2)
        name, damage = every_kind_of_damage(checkpoint_folders(run)[0])[number]
        damage()
        warnings: list[str] = []
        assert_whole(find_latest(run, warn=warnings.append), steps={1})
        assert len(warnings) == 1
        assert f"step-00000002/{name}" in warnings[0]
    assert len(every_kind_of_damage(checkpoint_folders(tmp_path / "0")[1])) == 27


def test_damaged_ones_do_not_displace_whole_ones(tmp_path: Path) -> None:
    """8 is damaged, the run went back to 4 and saves 6, then 8 again: each time what was just saved must stay."""
    save(tmp_path, 4)
    save(tmp_path, 8)
    (tmp_path / "checkpoints" / "step-00000008" / MODEL_NAME).unlink()
    save(tmp_path, 6, keep=1)
    assert steps_of(tmp_path) == [6]
    save(tmp_path, 8)
    (tmp_path / "checkpoints" / "step-00000008" / MODEL_NAME).unlink()
    save(tmp_path, 8)
    assert_whole(find_latest(tmp_path), steps={8})


def test_no_whole_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (checkpoint_folders(tmp_path)[0] / STATE_NAME).write_text("{}")
    with pytest.raises(ResumeError, match="step-00000001"):
        find_latest(tmp_path)


def test_a_state_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    os.rename(tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / "step-00000009")
    with pytest.raises(ResumeError):
        find_latest(tmp_path)


def test_a_deeply_nested_state_is_damage_not_a_crash(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (checkpoint_folders(tmp_path)[0] / STATE_NAME).write_text("[" * 100_000)
    with pytest.raises(ResumeError):
        find_latest(tmp_path)


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_refusing_disk_leaves_the_older_one_and_no_rest(
    tmp_path: Path, set_before_operation: Seam, error_number: int
) -> None:
    save(tmp_path, 1)

    def refuse(operation: str, path: str) -> None:
        if operation in ("write", "fsync") and OPTIMIZER_NAME in path:
            raise OSError(error_number, os.strerror(error_number), path)

    set_before_operation(refuse)
    with pytest.raises(OSError, match=os.strerror(error_number)):
        save(tmp_path, 2)
    set_before_operation(None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert_whole(find_latest(tmp_path), steps={1})


def test_state_comes_back_as_it_went(tmp_path: Path) -> None:
    state = {"loader": {"position": 2**60, "text": "ü\n"}, "numbers": [0.1, 1e-300, -0.0], "none": None}
    save_checkpoint(tmp_path, step=3, model_tensors=tensors(3), optimizer_tensors={}, state=state)
    found = find_latest(tmp_path)
    assert found is not None
    assert {key: found.state[key] for key in state} == state
    assert found.num_bytes == sum(path.stat().st_size for path in found.path.iterdir())
    assert json.loads((found.path / STATE_NAME).read_bytes()) == found.state


def test_names_carry_no_wrappers() -> None:
    shape = ModelConfig(num_layers=2, num_heads=2, hidden_size=16, feed_forward_size=16).shape(vocab_size=64, seq_len=8)
    model = build_model(shape, seed=1)
    names = list(plain_parameters(model))
    wrapped = [torch.compile(model), torch.nn.DataParallel(model), torch.nn.DataParallel(torch.compile(model))]
    for each in wrapped:
        assert any(("_orig_mod." in name or "module." in name) for name, _ in each.named_parameters())
        assert list(plain_parameters(each)) == names
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert list(plain_parameters(model)) == names


def test_parameters_of_another_model_are_refused() -> None:
    shape = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, feed_forward_size=16).shape(vocab_size=64, seq_len=8)
    model, other = build_model(shape, seed=1), build_model(shape, seed=2)
    saved = {name: parameter.detach() for name, parameter in plain_parameters(other).items()}
    load_parameters(model, saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    name = "model.norm.weight"
    for wrong in ({**saved, name: torch.ones(3)}, {**saved, "extra": torch.ones(3)}):
        with pytest.raises(ResumeError):
            load_parameters(model, wrong)
