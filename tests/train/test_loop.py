from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import fs
from penstock.errors import ConfigError, DiskError, StoreBusyError, TrainingError
from penstock.runlog import RunLog, read_records
from penstock.store import Store
from penstock.train import Decoder, TrainResult, find_latest, train
from penstock.train.checkpoint import checkpoint_folders

from .conftest import Train, assert_same_tensors, events, losses, saved_tensors, tiny_config

Seam = Callable[[Callable[[str, str], None] | None], None]

STEP_FIELDS = {"step", "loss", "learning_rate", "grad_norm", "tokens", "seconds", "data_seconds", "position"}


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(folder) if record["kind"] == kind]


def test_a_run_learns_and_records_what_it_did(tmp_path: Path, run_training: Train, store: Store) -> None:
    seen: list[dict[str, Any]] = []
    result = run_training(tmp_path, "steps=30", "eval_every_steps=10", on_progress=seen.append)
    assert result.first_loss is not None
    assert result.final_loss is not None
    assert result.final_loss < 0.8 * result.first_loss
    assert result.first_loss == pytest.approx(math.log(320), rel=0.05)  # an untrained model knows nothing

    steps = of_kind(tmp_path, "step")
    assert [record["step"] for record in steps] == list(range(1, 31))
    assert all(record.keys() == STEP_FIELDS | {"kind", "time"} for record in steps)
    assert [record["position"] for record in steps] == [4 * step for step in range(1, 31)]
    assert all(0 <= record["data_seconds"] <= record["seconds"] for record in steps)
    assert result.tokens == sum(record["tokens"] for record in steps) < 30 * 4 * 32  # masked borders don't count
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)

    evaluations = of_kind(tmp_path, "evaluation")
    assert [record["step"] for record in evaluations] == [10, 20, 30]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert (result.val_loss, result.val_bits_per_byte) == (evaluations[-1]["loss"], evaluations[-1]["bits_per_byte"])
    assert [record["step"] for record in of_kind(tmp_path, "sample")] == [10, 20, 30]

    checkpoints = of_kind(tmp_path, "checkpoint")
    assert [record["step"] for record in checkpoints] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-00000030", "step-00000028"]
    assert tmp_path / checkpoints[-1]["path"] == result.checkpoint

    choices = {record["name"]: record for record in of_kind(tmp_path, "choice")}
    expected = {"device", "dtype", "micro_batch_rows", "num_threads", "fused_optimizer", "attention", "packing"}
    expected |= {"document_mask", "optimizer", "warmup_steps", "gradient_accumulation_steps", "learning_rate"}
    assert expected <= set(choices)
    assert all(record["reason"] for record in choices.values())
    assert choices["warmup_steps"]["value"] == 3
    assert of_kind(tmp_path, "hardware")[-1]["memory_bytes"] > 0
    assert [record for record in seen if record["kind"] == "step"] == steps


def test_the_same_run_twice_gives_the_same_losses(tmp_path: Path, run_training: Train) -> None:
    for name in ("a", "b"):
        run_training(tmp_path / name)
    run_training(tmp_path / "c", "seed=7")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_the_micro_batch_does_not_change_the_run(tmp_path: Path, run_training: Train) -> None:
    for rows in (1, 3, 4):
        run_training(tmp_path / str(rows), f"micro_batch_rows={rows}")
    one, three, four = (dict(losses(tmp_path / str(rows))) for rows in (1, 3, 4))
    assert one == pytest.approx(four, rel=1e-4)
    assert three == pytest.approx(four, rel=1e-4)


def test_borders_off_changes_what_is_learned(tmp_path: Path, run_training: Train) -> None:
    with_borders = run_training(tmp_path / "on")
    without = run_training(tmp_path / "off", "document_boundaries=false")
    assert without.tokens > with_borders.tokens  # labels that cross documents count too


def test_records_may_be_thinned_out(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path, "log_every_steps=3")
    assert [step for step, _ in losses(tmp_path)] == [3, 6, 8]


@contextmanager
def not_finite_at(steps: set[int], *, calls_per_step: int = 2) -> Iterator[None]:
    """Makes the decoder's last micro-batch of these training steps answer with NaN."""
    calls = iter(range(1, 10_000))

    def spoil(module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(module, Decoder) or not module.training:
            return None
        call = next(calls)
        is_last = call % calls_per_step == 0
        return output * float("nan") if is_last and call // calls_per_step in steps else None

    handle = torch.nn.modules.module.register_module_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def test_an_update_that_is_not_finite_is_not_applied(tmp_path: Path, run_training: Train) -> None:
    with not_finite_at({3}):
        result = run_training(tmp_path, "checkpoint_every_steps=1", "keep_checkpoints=9", "max_grad_norm=null")
    assert result.status == "completed"
    folders = {path.name: path for path in checkpoint_folders(tmp_path)}
    assert_same_tensors(saved_tensors(folders["step-00000002"]), saved_tensors(folders["step-00000003"]))
    found = dict(losses(tmp_path))
    assert math.isnan(found[3])
    assert all(math.isfinite(loss) for step, loss in found.items() if step != 3)
    (message,) = [message for message in events(tmp_path) if "not applied" in message]
    assert "step 3, rows 8 to 11" in message
    assert result.final_loss == found[8]


def test_three_in_a_row_stop_the_run_and_fewer_do_not(tmp_path: Path, run_training: Train) -> None:
    with not_finite_at({1, 2, 4, 5, 7, 8}):
        assert run_training(tmp_path / "scattered").status == "completed"
    with not_finite_at({3, 4, 5}), pytest.raises(TrainingError, match="step 5, rows 16 to 19"):
        run_training(tmp_path / "row")
    assert [step for step, _ in losses(tmp_path / "row")] == [1, 2, 3, 4, 5]


def test_skips_are_counted_across_a_resume(tmp_path: Path, run_training: Train) -> None:
    with not_finite_at({3, 4}):
        run_training(tmp_path, "stop_after_steps=4")
    with not_finite_at({1}), pytest.raises(TrainingError, match="step 5"):
        run_training(tmp_path, resume=True)


def disk_full_for(name: str) -> Callable[[str, str], None]:
    def refuse(operation: str, path: str) -> None:
        if operation == "write" and name in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    return refuse


def test_a_full_disk_while_saving_does_not_end_the_run(
    tmp_path: Path, run_training: Train, set_before_operation: Seam
) -> None:
    run_training(tmp_path / "whole")
    set_before_operation(disk_full_for("step-00000004"))
    result = run_training(tmp_path / "full")
    assert result.status == "completed"
    (message,) = [message for message in events(tmp_path / "full") if "not saved" in message]
    assert "step 4" in message
    assert os.strerror(errno.ENOSPC) in message
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-00000008"]
    assert losses(tmp_path / "full") == losses(tmp_path / "whole")


def test_a_full_disk_at_the_last_save_is_an_error(
    tmp_path: Path, run_training: Train, set_before_operation: Seam
) -> None:
    set_before_operation(disk_full_for("step-00000008"))
    with pytest.raises(DiskError) as caught:
        run_training(tmp_path)
    assert os.strerror(errno.ENOSPC) in caught.value.message
    assert "--resume" in caught.value.hint
    set_before_operation(None)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 4
    assert run_training(tmp_path, resume=True).status == "completed"


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path, "stop_after_steps=2")
    before = losses(tmp_path)
    with pytest.raises(ConfigError) as caught:
        run_training(tmp_path)
    assert "step-00000002" in caught.value.message
    assert "--resume" in caught.value.hint
    assert losses(tmp_path) == before


def test_one_process_trains_in_a_folder(tmp_path: Path, run_training: Train) -> None:
    with fs.FolderLock(tmp_path / "train.lock"), pytest.raises(StoreBusyError):
        run_training(tmp_path)
    assert run_training(tmp_path).status == "completed"
    assert not (tmp_path / "train.lock").exists()


def test_training_in_a_thread_leaves_signals_alone(tmp_path: Path, store: Store) -> None:
    results: list[TrainResult] = []

    def work() -> None:
        with RunLog(tmp_path) as log:
            results.append(train(tiny_config("steps=2"), store, tmp_path, log))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [result.status for result in results] == ["completed"]


def test_process_wide_switches_come_back(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path, "deterministic=true", "steps=2")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1


def test_cuda_without_a_gpu_is_refused(tmp_path: Path, run_training: Train) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError):
        run_training(tmp_path, "device=cuda")


def test_bfloat16_on_request(tmp_path: Path, run_training: Train) -> None:
    result = run_training(tmp_path, "dtype=bfloat16", "steps=12")
    assert result.final_loss is not None
    assert result.first_loss is not None
    assert result.final_loss < result.first_loss
    tensors = saved_tensors(checkpoint_folders(tmp_path)[0])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}  # the weights themselves stay wide
