from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.train import ModelConfig, TrainConfig, load_config
from penstock.train.config import FREE_KEYS


def test_a_file_and_overrides_make_a_config(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 20\nlearning_rate: 1e-3\nmodel:\n  preset: small\n  num_layers: 3\n")
    config = load_config(path, ["model.num_layers=5", "betas=[0.8, 0.9]", "max_grad_norm=null", "deterministic=true"])
    assert (config.steps, config.learning_rate, config.model.preset, config.model.num_layers) == (20, 1e-3, "small", 5)
    assert (config.betas, config.max_grad_norm, config.deterministic) == ((0.8, 0.9), None, True)


def test_json_reads_as_yaml_does(tmp_path: Path) -> None:
    settings = {"steps": 7, "model": {"num_layers": 2}}
    (tmp_path / "a.json").write_text(json.dumps(settings))
    (tmp_path / "a.yaml").write_text("steps: 7\nmodel: {num_layers: 2}\n")
    assert load_config(tmp_path / "a.json") == load_config(tmp_path / "a.yaml") == TrainConfig.model_validate(settings)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    assert load_config(tmp_path / "a.yaml") == TrainConfig()


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("learning_rat=1", "learning_rate"), ("model.num_layer=2", "model.num_layers"), ("warmup_step=3", "warmup_steps")],
)
def test_an_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert repr(override.partition("=")[0]) in caught.value.message
    assert caught.value.hint.removeprefix("known settings: ").split(", ")[0] == nearest


def test_a_file_is_blamed_for_what_it_says_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("steps: 3\nmodel: {preset: tiny, adapter: {rank: 0}}\n")
    with pytest.raises(ConfigError, match=r"'stepss'$"):
        load_config(config, ["stepss=3"])
    with pytest.raises(ConfigError, match=r"model\.adapter\.alpha is 'x':"):
        load_config(config, ["model.adapter.rank=4", "model.adapter.alpha=x"])
    with pytest.raises(ConfigError, match=r"model\.adapter\.rank is 0 in .*config\.yaml"):
        load_config(config, ["model.adapter.alpha=8"])


@pytest.mark.parametrize(
    ("override", "meant"), [("preset=tiny", "model.preset"), ("model.rank=8", "model.adapter.rank")]
)
def test_a_key_of_another_level_is_named_with_it(override: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert caught.value.hint.startswith(f"perhaps {meant};")


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=0"],
        ["steps=many"],
        ["learning_rate=.nan"],
        ["learning_rate=-1"],
        ["schedule=step"],
        ["model.preset=huge"],
        ["model=small"],
        ["steps.more=1"],
        ["betas=[0.9]"],
        ["betas=[0.9,1.0]"],
        ["warmup_steps=1", "warmup_ratio=0.1"],
        ["warmup_ratio=1.5"],
        ["micro_batch_rows=32", "batch_rows=16"],
        ["steps"],
        ["=3"],
        ["betas=[0.9"],
        ["seed=-1"],
        ["steps=10", "epochs=1"],
        ["epochs=1", "target_tokens=5"],
        ["epochs=0"],
        ["min_epochs=2"],
        ["target_tokens=9", "min_epochs=3", "max_epochs=2"],
        ["warmup_steps=3", "warmup_steps_min=2"],
        ["warmup_steps_min=9", "warmup_steps_max=2"],
        ["schedule_power=2"],
        ["schedule=polynomial", "schedule_cycles=2"],
        ["schedule=cosine-restarts", "decay_ratio=0.1"],
        ["schedule=wsd", "schedule_power=1"],
        ["min_delta=0.1"],
        ["patience=0"],
        ["trackers=[clearml]"],
    ],
)
def test_an_impossible_value_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert caught.value.hint


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "steps: [", "!!python/object/apply:os.getcwd []"])
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["steps=66"], 7),
        (["steps=66", "warmup_ratio=0.1"], 7),
        (["steps=70", "warmup_ratio=0.1"], 7),  # 70 * 0.1 is above 7 in floats
        (["steps=1000", "warmup_ratio=0.03"], 30),
        (["steps=1", "warmup_ratio=0.1"], 1),
        (["steps=10", "warmup_ratio=0"], 0),
        (["steps=10", "warmup_ratio=1"], 10),
        (["steps=10", "warmup_steps=3"], 3),
        (["steps=10", "warmup_steps=50"], 10),
        (["steps=10", "warmup_steps=0"], 0),
        (["steps=66", "warmup_steps_min=10"], 10),
        (["steps=6", "warmup_steps_min=10"], 6),
        (["steps=66", "warmup_steps_max=5"], 5),
        (["steps=66", "warmup_steps_min=3", "warmup_steps_max=1000"], 7),
    ],
)
def test_warm_up_is_the_ceiling_of_its_share_and_fits_the_run(settings: list[str], expected: int) -> None:
    assert load_config(None, settings).num_warmup_steps == expected


def test_only_free_keys_leave_the_digest_alone() -> None:
    changed = {
        "async_checkpoints=false",
        "checkpoint_every_steps=9",
        "eval_every_steps=9",
        "eval_rows=9",
        "hardware_interval_seconds=9",
        "keep_best=true",
        "keep_checkpoints=9",
        "log_every_steps=9",
        "mix=[a=2]",
        "mix_epochs=[a=2]",
        "mix_temperature=2",
        "network=true",
        "parallel=ddp",
        "prefetch_batches=9",
        "sample_tokens=9",
        "stop_after_steps=9",
        "tune=off",
        "tune_cache=false",
        "tune_seconds=9",
        "trackers=[wandb]",
    }
    assert {override.partition("=")[0] for override in changed} == FREE_KEYS
    for override in changed:
        assert load_config(None, [override]).digest() == TrainConfig().digest()
    for override in ("steps=151", "seed=1", "model.num_layers=5", "batch_rows=9", "document_boundaries=false"):
        assert load_config(None, [override]).digest() != TrainConfig().digest()


def test_the_vocabulary_is_padded_and_sizes_must_agree() -> None:
    assert ModelConfig().shape(vocab_size=8192, seq_len=8).padded_vocab_size == 8192
    assert ModelConfig().shape(vocab_size=50257, seq_len=8).padded_vocab_size == 50304
    for wrong in ({"hidden_size": 130}, {"num_kv_heads": 3}, {"num_heads": 128}, {"max_positions": 4}):
        with pytest.raises(ConfigError):
            ModelConfig.model_validate(wrong).shape(vocab_size=320, seq_len=8)


def test_configs_need_no_torch() -> None:
    code = "import sys, penstock.train; penstock.train.load_config(None, []); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_every_setting_is_in_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
    names = [name for name in TrainConfig.model_fields if name != "model"]
    names += [f"model.{name}" for name in ModelConfig.model_fields]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_dumped_config_loads_again(tmp_path: Path) -> None:
    for given in ([], ["steps=7"], ["epochs=1.5"], ["target_tokens=100", "max_epochs=4"], ["patience=3"]):
        config = load_config(None, given)
        (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
        assert load_config(tmp_path / "config.json") == config
    assert load_config(None, ["epochs=1.5"]).steps is None
    assert load_config(None, []).steps == 200
