"""Settings of other trainers: what becomes of each key, which files are refused and with what line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import ConfigError
from penstock.hardware import profile
from penstock.train.adapters import Adaptation, adapted
from penstock.train.adapters.expert_rules import CONFIG
from penstock.train.adapters.tables import TABLES, table
from penstock.train.adapters.training_config import DEFAULTS, SECTIONS, TIERS
from penstock.train.config import TrainConfig, load_adapted, load_config

DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
OURS = frozenset(TrainConfig.model_fields)


def manifest(config: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A whole manifest of schema 1.0; a change of None takes a key out."""
    whole = {
        "name": "expert-test",
        "base_model": {"name": "org/base"},
        "adapters": [{"type": "lora", "r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}],
        "training": {"dataset": {"path": "train.jsonl"}, "config": {"epochs": 2, **(config or {})}},
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def second(*names: str, **changes: Any) -> dict[str, Any]:
    """The same in schema 2.0, with these base models."""
    adapters = [{"type": "dora", "r": 4, "alpha": 8}]
    models = [{"name": name, "adapters": adapters, "prompt_template": "chatml"} for name in names]
    return manifest(**{"base_model": None, "adapters": None, "schema_version": "2.0", "base_models": models, **changes})


def written(folder: Path, settings: Any) -> Path:
    path = folder / "theirs.json"
    path.write_text(json.dumps(settings))
    return path


def load(folder: Path, settings: Any, *overrides: str) -> tuple[TrainConfig, Adaptation]:
    config, adaptation = load_adapted(written(folder, settings), overrides)
    assert adaptation is not None
    return config, adaptation


def outcomes(adaptation: Adaptation) -> dict[str, tuple[str, str]]:
    return {one.key: (one.outcome, one.detail) for one in adaptation.adapted}


# Expert manifests


def test_a_manifest_of_schema_1_says_model_adapter_and_data(tmp_path: Path) -> None:
    config, adaptation = load(tmp_path, manifest())
    assert (config.model.pretrained, config.epochs, config.pack) == ("org/base", 2, "best-fit")
    assert config.model.adapter is not None
    assert config.model.adapter.model_dump() == {
        "kind": "lora",
        "rank": 8,
        "alpha": 16,
        "dropout": 0.0,
        "target_modules": ("q_proj", "v_proj"),
    }
    assert adaptation.kind == "expert manifest, schema 1.0"
    assert adaptation.data is not None
    assert [task.train for task in adaptation.data.tasks] == ["train.jsonl"]


def test_a_manifest_of_schema_2_has_adapters_in_its_base_models(tmp_path: Path) -> None:
    config, adaptation = load(tmp_path, second("org/base"))
    assert config.model.adapter is not None
    assert (config.model.adapter.kind, adaptation.kind) == ("dora", "expert manifest, schema 2.0")
    assert adaptation.data is not None
    assert adaptation.data.template == "chatml"


def test_of_several_base_models_one_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 base models.*'org/one', 'org/two'"):
        load(tmp_path, second("org/one", "org/two"))
    config, _ = load(tmp_path, second("org/one", "org/two"), "model.pretrained=org/two")
    assert config.model.pretrained == "org/two"


def test_a_base_model_is_a_folder_if_there_is_one_else_a_hub_id(tmp_path: Path) -> None:
    assert load(tmp_path, manifest())[0].model.pretrained == "org/base"
    (tmp_path / "org" / "base").mkdir(parents=True)
    assert load(tmp_path, manifest())[0].model.pretrained == str(tmp_path / "org" / "base")


def test_comments_are_dropped_and_null_is_absent(tmp_path: Path) -> None:
    config, adaptation = load(tmp_path, manifest({"_why": {"any": 1}, "save_total_limit": None}, _note="x"))
    assert config.keep_checkpoints == TrainConfig().keep_checkpoints
    assert not any(part[0] == "_" for key in outcomes(adaptation) for part in key.split("."))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"batch_size": 2, "gradient_accumulation_steps": 45}, {"micro_batch_rows": 2, "batch_rows": 90}),
        ({"batch_size": 4}, {"micro_batch_rows": 4, "batch_rows": 4}),
        ({"gradient_accumulation_steps": 4}, {"micro_batch_rows": 8, "batch_rows": 32}),
        ({"bf16": True, "fp16": False}, {"dtype": "bfloat16"}),
        ({"bf16": False}, {"dtype": "float32"}),
        ({"use_tf32": False}, {"tf32": False}),
        ({"use_sdpa": True}, {"attention": "sdpa"}),
        ({"flash_attention_2": True}, {"attention": "flash"}),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, {"warmup_steps": None, "warmup_ratio": 0.1}),
        ({"warmup_steps": 9, "warmup_ratio": 0.1}, {"warmup_steps": 9, "warmup_ratio": None}),
        ({"lr_scheduler": "cosine"}, {"schedule": "cosine", "min_learning_rate_ratio": 0.0}),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, {"schedule": "constant", "warmup_steps": 0}),
        ({"lr_scheduler": "cosine_with_restarts"}, {"schedule": "cosine-restarts"}),
        ({"lr_scheduler": "warmup_stable_decay"}, {"schedule": "wsd"}),
        ({"lr_scheduler": "polynomial"}, {"schedule": "polynomial"}),
        ({"optim": "adamw_torch_fused"}, {"optimizer": "adamw"}),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw-8bit"}),
        ({"max_seq_length": 2048}, {"seq_len": 2048}),
        ({"packing": True}, {"pack": "best-fit"}),
        ({"packing": False, "group_by_length": True}, {"pack": "pad", "order": "group-by-length"}),
        ({"group_by_length": True}, {"pack": "best-fit", "order": "shuffled"}),
        ({"gradient_checkpointing": True}, {"activation_checkpointing": "full"}),
        ({"gradient_checkpointing": "selective"}, {"activation_checkpointing": "selective"}),
        (
            {"gradient_checkpointing": True, "activation_checkpointing": "attention_only"},
            {"activation_checkpointing": "selective"},
        ),
        ({"gradient_checkpointing": False}, {"activation_checkpointing": "none"}),
        ({"torch_compile": True}, {"compile": "blocks"}),
        ({"torch_compile": False}, {"compile": "off"}),
        ({"dataloader_prefetch_factor": 8}, {"prefetch_batches": 8}),
        ({"save_steps": 7, "eval_steps": 8, "logging_steps": 9}, {"checkpoint_every_steps": 7, "eval_every_steps": 8}),
        ({"save_strategy": "no", "evaluation_strategy": "no"}, {"checkpoint_every_steps": None}),
        ({"save_total_limit": 3, "load_best_model_at_end": True}, {"keep_checkpoints": 3, "keep_best": True}),
        ({"max_steps": 10}, {"steps": 10, "epochs": None}),
        ({"epochs": 1.5}, {"epochs": 1.5}),
        ({"max_grad_norm": 0}, {"max_grad_norm": None}),
        ({"adam_beta2": 0.999}, {"betas": (0.9, 0.999)}),
        ({"early_stopping_patience": 2, "early_stopping_threshold": 0.1}, {"patience": 2, "min_delta": 0.1}),
        ({"learning_rate": 5e-5, "weight_decay": 0.01, "seed": 7}, {"learning_rate": 5e-5, "weight_decay": 0.01}),
    ],
)
def test_a_key_of_a_manifest_becomes_a_setting_of_ours(
    tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    config, adaptation = load(tmp_path, manifest(theirs))
    assert {key: getattr(config, key) for key in ours} == ours
    assert {f"training.config.{key}" for key in theirs} <= outcomes(adaptation).keys()


def test_four_bits_a_cache_and_resuming(tmp_path: Path) -> None:
    config, adaptation = load(tmp_path, manifest({"load_in_4bit": True, "pretokenized_cache": "kept", "resume": True}))
    assert adaptation.data is not None
    assert (config.model.quantize, adaptation.data.cache, adaptation.resume) == ("nf4", "kept", True)


def test_the_config_comes_before_the_packaged_adapter_and_the_log_says_so(tmp_path: Path) -> None:
    config, adaptation = load(tmp_path, manifest({"rank": 32, "adapter_type": "dora"}))
    assert config.model.adapter is not None
    assert (config.model.adapter.rank, config.model.adapter.kind) == (32, "dora")
    assert outcomes(adaptation)["adapters[0].r"][0] == "not applicable"
    assert outcomes(adaptation)["training.config.rank"] == ("takes effect", "model.adapter.rank=32")


def test_every_key_met_is_told_of_and_nothing_else(tmp_path: Path) -> None:
    theirs = {"bf16": True, "dataloader_persistent_workers": True, "use_unsloth": False, "packing": True}
    _, adaptation = load(tmp_path, manifest(theirs, license="MIT"))
    told = outcomes(adaptation)
    assert {key.rpartition(".")[2] for key in told if key.startswith("training.config.")} == {"epochs", *theirs}
    assert told["license"][0] == told["training.config.dataloader_persistent_workers"][0] == "not applicable"
    assert all(detail for _, detail in told.values())


def test_tasks_are_mixed_by_weight(tmp_path: Path) -> None:
    tasks = {"write": {"train": "w.jsonl", "valid": "wv.jsonl", "weight": 2}, "explain": {"train": "e.jsonl"}}
    config, adaptation = load(
        tmp_path, manifest(training={"dataset": {"type": "multi_task", "tasks": tasks}, "config": {"epochs": 1}})
    )
    assert adaptation.data is not None
    assert config.mix == ("write=2", "explain=1")
    assert [(task.name, task.valid) for task in adaptation.data.tasks] == [("write", "wv.jsonl"), ("explain", None)]


def test_fields_are_mapped(tmp_path: Path) -> None:
    dataset = {"path": "a.csv", "format": "csv", "field_mapping": {"instruction": "question", "text": "text"}}
    _, adaptation = load(tmp_path, manifest(training={"dataset": dataset}))
    assert adaptation.data is not None
    assert (adaptation.data.field_map, adaptation.data.format) == (("instruction=question",), "csv")


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    config, _ = load(tmp_path, manifest({"warmup_ratio": 0.5}), "steps=10", "warmup_steps=3")
    assert (config.steps, config.epochs, config.num_warmup_steps) == (10, None, 3)


DATASET = {"path": "train.jsonl"}
WRONG = [
    (manifest({"batchsize": 4}), r"'training\.config\.batchsize'", "batch_size"),
    (manifest({"batch_size": "four"}), r"training\.config\.batch_size is 'four'", ""),
    (manifest({"batch_size": 0}), r"batch_size is 0.*at least 1", ""),
    (manifest({"batch_size": True}), r"batch_size is true", ""),
    (manifest({"bf16": "yes"}), r"bf16 is 'yes'.*true or false", ""),
    (manifest({"fp16": True}), r"fp16 is True.*refused.*loss scaling", ""),
    (manifest({"use_sdpa": False}), r"use_sdpa.*refused", ""),
    (manifest({"lr_scheduler": "reduce_lr_on_plateau"}), r"reduce_lr_on_plateau.*refused", ""),
    (manifest({"optim": "adafactor"}), r"adafactor.*refused", ""),
    (manifest({"adapter_type": "ia3"}), r"ia3.*refused.*LoRA and DoRA", ""),
    (manifest({"adapter_type": "lorra"}), r"'lorra'.*one of 'lora'", ""),
    (manifest({"method": "dpo"}), r"'dpo'.*refused", ""),
    (manifest({"target_modules": "q_proj"}), r"target_modules.*a list of names", ""),
    (manifest({"warmup_ratio": 1.5}), r"warmup_ratio is 1\.5.*0 to 1", ""),
    (manifest({"save_strategy": "epoch"}), r"save_strategy.*refused.*save_steps", ""),
    (manifest({"trust_remote_code": True}), r"trust_remote_code.*refused", ""),
    (manifest({"prompt_template": "vicuna"}), r"'vicuna'.*refused", ""),
    (manifest(training=None), r"no 'training'", ""),
    (manifest(training={"config": {}}), r"no 'training\.dataset'", ""),
    (manifest(training={"dataset": {}}), r"no 'path'.*'single'", ""),
    (manifest(training={"dataset": {"type": "multi_task", "path": "a"}}), r"'path'.*'tasks' alone", ""),
    (manifest(training={"dataset": {"tasks": {"a": "b.jsonl"}}}), r"'a': 'b\.jsonl'", ""),
    (manifest(training={"dataset": {"tasks": {"a": {"valid": "b"}}}}), r"tasks\.a\.train", ""),
    (manifest(training={"dataset": {"tasks": {"a": {"train": "b", "weight": 0}}}}), r"weight is 0", ""),
    (manifest(training={"dataset": {**DATASET, "format": "xml"}}), r"format is 'xml'.*'jsonl'", ""),
    (manifest(training={"dataset": {**DATASET, "field_mapping": {"respons": "a"}}}), r"'respons'", "response"),
    (manifest(training={"dataset": {**DATASET, "validaton_path": "a"}}), r"validaton_path", "validation_path"),
    (manifest(training=[]), r"training is \[\].*mapping", ""),
    (manifest(schema_version="3.0"), r"'3\.0'.*'1\.0', '2\.0'", ""),
    (manifest(schema_version="2.0"), r"'base_model'.*schema 2\.0", ""),
    (second("org/a", schema_version="1.0"), r"'base_models'.*schema 1\.0", ""),
    (second(), r"no 'base_models'", ""),
    (second("F:/models/x"), r"F:/models/x.*no such folder", ""),
    (manifest(base_model=None), r"unknown key|no 'base_model'", ""),
    (manifest(base_model={"quantization": "int4"}), r"no 'base_model\.name'", ""),
    (manifest(base_model={"name": "org/a", "quantization": "int8"}), r"int8.*refused", ""),
    (manifest(adapters=[{"type": "lora"}, {"type": "dora"}]), r"2 adapters", ""),
    (manifest(adapters=[{"type": "lora", "rang": 8}]), r"adapters\[0\]\.rang", "rank"),
    (manifest(soft_prompts=[{"name": "x"}]), r"soft_prompts.*refused", ""),
    (manifest(traning={}), r"'traning'", "training"),
]


@pytest.mark.parametrize(("wrong", "message", "nearest"), WRONG, ids=[pattern for _, pattern, _ in WRONG])
def test_a_wrong_manifest_gets_one_line(tmp_path: Path, wrong: Any, message: str, nearest: str) -> None:
    path = written(tmp_path, {"schema_version": "1.0", **wrong})
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in caught.value.message
    assert "theirs.json" in caught.value.message
    if nearest:
        assert caught.value.hint.split(": ")[1].split(", ")[0] == nearest


# training_config.yaml


def sized(settings: dict[str, Any], machine: str) -> tuple[TrainConfig, Adaptation]:
    adaptation = adapted(settings, path=Path("training_config.yaml"), ours=OURS, hardware=profile(machine))
    assert adaptation is not None
    return TrainConfig.model_validate(adaptation.settings), adaptation


def test_the_reference_config_on_a_6_gb_card_with_8_cores() -> None:
    config, adaptation = sized({"training": {}}, "gpu-6gb")
    assert (config.micro_batch_rows, config.batch_rows, adaptation.workers) == (4, 8, 4)
    assert config.learning_rate == pytest.approx(2.5e-5)
    assert (config.target_tokens, config.min_epochs, config.max_epochs) == (20_000_000, 3, 10)
    assert (config.patience, config.min_delta, config.seed, config.schedule) == (3, 0.0001, 42, "linear")
    assert (adaptation.split, config.hardware_interval_seconds) == ("train=0.9,val=0.1", 5)


@pytest.mark.parametrize(("override", "steps", "expected"), [(True, 66, 7), (False, 66, 10), (True, 50_000, 1000)])
def test_warm_up_is_in_proportion(override: bool, steps: int, expected: int) -> None:
    config, _ = sized({"epoch_calculation": {"override_min_warmup": override}}, "gpu-6gb")
    assert config.model_copy(update={"steps": steps}).num_warmup_steps == expected


def test_values_of_a_training_config_take_the_place_of_its_defaults() -> None:
    given = {
        "training": {"base_learning_rate": "4e-5", "batch_size_medium": 6, "gradient_accumulation_steps": 3},
        "hardware_monitoring": {"collection_interval_seconds": 2, "gpu_memory_threshold_large_gb": 6.0},
        "logging": {"log_interval": 10},
    }
    config, adaptation = sized(given, "gpu-6gb")
    assert (config.micro_batch_rows, config.batch_rows, config.log_every_steps) == (8, 24, 10)
    assert (config.learning_rate, config.hardware_interval_seconds) == (pytest.approx(4e-5), 2)
    assert outcomes(adaptation)["training.batch_size_large"] == ("takes effect", "micro_batch_rows=8")
    assert outcomes(adaptation)["logging.include_epoch_summary"][0] == "not applicable"


@pytest.mark.parametrize(
    ("machine", "effective"),
    [
        ("gpu-24gb", ["batch_size_large", "large_gb"]),
        ("gpu-6gb", ["batch_size_medium", "large_gb", "medium_gb"]),
        ("gpu-2gb", ["batch_size_small", "large_gb", "medium_gb", "small_gb"]),
        ("cpu-8", ["batch_size_small"]),
    ],
)
def test_only_the_tier_of_the_machine_is_said_to_take_effect(machine: str, effective: list[str]) -> None:
    _, adaptation = sized({"training": {}}, machine)
    tiers = {
        key.removeprefix("training.").removeprefix("hardware_monitoring.gpu_memory_threshold_"): outcome
        for key, (outcome, _) in outcomes(adaptation).items()
        if "batch_size_" in key.replace("batch_size_reference", "") or "_threshold_" in key
    }
    assert len(tiers) == 6
    assert sorted(key for key, outcome in tiers.items() if outcome == "takes effect") == sorted(effective)


def test_a_card_below_the_smallest_tier_trains_one_row_and_no_tier_takes_effect() -> None:
    config, adaptation = sized({"hardware_monitoring": {"gpu_memory_threshold_small_gb": 3.5}}, "gpu-2gb")
    assert config.micro_batch_rows == 1
    assert {outcomes(adaptation)[f"training.batch_size_{tier}"][0] for tier in TIERS} == {"not applicable"}


def test_keys_that_an_override_replaces_are_said_to_have_no_effect(tmp_path: Path) -> None:
    path = written(tmp_path, {"training": {"seed": 7}, "epoch_calculation": {"target_tokens": 100}})
    _, adaptation = load_adapted(path, ["steps=3", "micro_batch_rows=1", "batch_rows=4"])
    assert adaptation is not None
    found = outcomes(adaptation)
    assert found["training.seed"][0] == "takes effect"
    assert found["epoch_calculation.target_tokens"] == ("not applicable", "--set steps=3 comes before it")
    assert found["epoch_calculation.min_epochs"][0] == "not applicable"
    assert found["training.gradient_accumulation_steps"] == ("not applicable", "--set batch_rows=4 comes before it")


def test_keys_that_only_preparing_reads_have_no_effect_on_a_prepared_store(tmp_path: Path) -> None:
    _, adaptation = load(tmp_path, manifest())
    found = outcomes(adaptation.with_prepared_store())
    assert found["training.dataset.path"][0] == "not applicable"
    assert found["training.config.epochs"][0] == "takes effect"
    _, sizes = sized({"training": {}}, "gpu-6gb")
    assert outcomes(sizes)["training.validation_split"][0] == "takes effect"
    assert outcomes(sizes.with_prepared_store())["training.validation_split"][0] == "not applicable"


def test_every_default_is_a_key_with_a_rule() -> None:
    for section, values in DEFAULTS.items():
        assert set(values) <= {rule.name for rule in SECTIONS[section]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"training": {"pacience": 3}}, r"training\.pacience"),
        ({"training": {"patience": "long"}}, r"training\.patience is 'long'"),
        ({"training": {}, "modle": {}}, "unknown section 'modle'"),
        ({"training": {}, "logging": 3}, "section 'logging' is 3"),
        ({"hardware_monitoring": {"collection_interval_seconds": True}}, "collection_interval_seconds"),
        ({"training": {"validation_split": 2}}, r"validation_split is 2.*0 to 1"),
    ],
)
def test_a_wrong_training_config_gets_one_line(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, wrong))


# Flags


def test_flags_become_settings(tmp_path: Path) -> None:
    flags = {
        "config": "medium",
        "dataset": "finewebedu",
        "pretokenized": True,
        "mixed-precision": True,
        "gradient_accumulation": 4,
        "num_workers": 8,
        "use_8bit_optim": True,
        "epochs": 1,
        "no_compile": True,
    }
    config, adaptation = load(tmp_path, flags)
    assert (config.model.preset, config.seq_len, config.dtype) == ("large-16k", 16_384, "bfloat16")
    assert (config.batch_rows, config.micro_batch_rows, config.epochs) == (32, 8, 1)
    assert (config.optimizer, config.compile) == ("adamw-8bit", "off")
    assert outcomes(adaptation)["dataset"][0] == outcomes(adaptation)["num_workers"][0] == "not applicable"


def test_the_size_of_chunks_comes_before_the_preset_s(tmp_path: Path) -> None:
    config, _ = load(tmp_path, {"config": "large", "chunk_size": 4096})
    assert (config.model.preset, config.seq_len) == ("xlarge", 4096)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pretokenized": False}, "pretokenized is False.*refused"),
        ({"config": "xlarge", "num_workers": 1}, "config is 'xlarge'.*refused"),
        ({"mixed_precision": "fp16"}, "mixed_precision.*refused"),
        ({"num_workers": 1, "use_8bit_optm": True}, "use_8bit_optm"),
    ],
)
def test_a_wrong_flag_gets_one_line(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, wrong))


# Which it is


def test_our_own_files_stay_ours(tmp_path: Path) -> None:
    for ours in ({}, {"steps": 3, "model": {"preset": "small"}}, {"epochs": 2, "compile": "off"}):
        assert load_adapted(written(tmp_path, ours))[1] is None


def test_a_mix_of_flags_and_ours_is_an_unknown_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'num_workers'"):
        load_config(written(tmp_path, {"steps": 3, "num_workers": 2}))


@pytest.mark.parametrize("junk", [{"training": 3}, {"base_model": 3}, {"base_models": 3}, {"training": {"dataset": 1}}])
def test_junk_is_refused_in_one_line(tmp_path: Path, junk: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, junk))
    assert "\n" not in caught.value.message


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="deep"):
        load_config(written(tmp_path, {"base_model": deep}))


# The docs


def test_the_tables_of_the_docs_are_the_rules() -> None:
    text = DOCS.read_text()
    assert [name for name, sections in TABLES.items() if table(sections) not in text] == []


def test_every_rule_says_something_for_each_outcome_it_can_have() -> None:
    for sections in TABLES.values():
        for _, rules in sections:
            for rule in rules:
                assert rule.effect or rule.idle or rule.refusal
                assert bool(rule.sets) <= bool(rule.effect)
                assert len({one.name for one in rules}) == len(rules)
    assert {rule.name for rule in CONFIG} >= {"bf16", "use_tf32", "use_sdpa", "pretokenized_cache", "packing"}


def test_settings_of_ours_that_rules_name_exist() -> None:
    known = {f"`{name}`" for name in OURS} | {"`model.pretrained`", "`model.quantize`", "`model.preset`"}
    known |= {f"`model.adapter.{name}`" for name in ("kind", "rank", "alpha", "dropout", "target_modules")}
    for sections in TABLES.values():
        for _, rules in sections:
            assert [rule.name for rule in rules if rule.sets and not rule.sets.startswith(("data.", "run."))
                    and f"`{rule.sets}`" not in known] == []  # fmt: skip


def test_the_documented_keys_and_defaults_are_the_schema_s() -> None:
    """Both ways: every setting has a line, every line is a setting, and defaults that are values are the real ones."""
    text = DOCS.read_text().split("## Settings of other trainers")[0]
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    documented = {}
    for line in lines:
        names = [name.strip("`| ") for name in line[0].split(", ")]
        defaults = yaml.safe_load(f"[{line[1]}]") if "`" not in line[1] else [None]
        defaults = defaults if len(defaults) == len(names) else [line[1]] * len(names)
        documented |= dict(zip(names, defaults, strict=True))
    schema = {name: field.default for name, field in TrainConfig.model_fields.items() if name != "model"}
    model = TrainConfig.model_fields["model"].default
    schema |= {f"model.{name}": field.default for name, field in type(model).model_fields.items()}
    assert set(documented) == set(schema)
    for name, default in schema.items():
        if default is not None:
            met = documented[name]
            assert (float(met) if isinstance(default, float) else met) == _plain(default), name


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
