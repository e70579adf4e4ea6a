"""Every key of an expert manifest, section by section, and what becomes of it here.

Results go to settings of a run by their own names; names that begin with `data.` say how the data set is prepared, and
`run.resume` whether the run goes on from its last checkpoint. docs/configuration.md shows these rules as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.train.adapters.common_rules import (
    LENGTH_AND_RATE,
    MAX_GRAD_NORM,
    compiled,
    read_together,
    refused_if_true,
)
from penstock.train.adapters.rules import (
    ANYTHING,
    COUNT,
    FLAG,
    MAPPING,
    MAPPINGS,
    NUMBER,
    SHARE,
    TEXT,
    TEXTS,
    WHOLE,
    Adapt,
    Rule,
    Verdict,
    one_of,
)

__all__ = ["ADAPTER", "BASE_MODEL", "CONFIG", "DATASET", "DEFAULT_BATCH_SIZE", "ROOT", "TASK", "TEMPLATES", "TRAINING"]

DEFAULT_BATCH_SIZE = 8
Section = Mapping[str, Any]

ABOUT_THE_PACKAGE = "about the finished package, not about its training"
ABOUT_THE_SOURCE = "a note on where the data came from"

TEMPLATES = {
    "alpaca": "alpaca",
    "chatml": "chatml",
    "deepseek": "deepseek",
    "gemma": "gemma",
    "llama": "llama",
    "llama2": "llama2",
    "llama3": "llama",
    "mistral": "mistral",
    "phi": "phi",
    "phi3": "phi",
    "plain": "plain",
    "qwen": "chatml",
    "qwen3": "chatml",
    "tokenizer": "tokenizer",
}
"""Names of prompt templates in manifests, and ours."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"schedule": "linear", "min_learning_rate_ratio": 0.0},
    "cosine": {"schedule": "cosine", "min_learning_rate_ratio": 0.0},
    "constant": {"schedule": "constant", "warmup_steps": 0, "warmup_ratio": None},
    "constant_with_warmup": {"schedule": "constant"},
    "polynomial": {"schedule": "polynomial", "min_learning_rate_ratio": 0.0},
    "cosine_with_restarts": {"schedule": "cosine-restarts", "min_learning_rate_ratio": 0.0},
    "warmup_stable_decay": {"schedule": "wsd", "min_learning_rate_ratio": 0.0},
}
"""By the names that `transformers` has for them; there they decay to 0."""

OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
}


def _template(value: str, _: Section) -> dict[str, Any] | Verdict:
    return {"data.template": TEMPLATES[value]} if value in TEMPLATES else Verdict.REFUSED


TEMPLATE_RULE = Rule(
    name="prompt_template",
    kind=TEXT,
    effect="the template of records, as `prepare --template`: " + ", ".join(f"`{name}`" for name in TEMPLATES),
    refusal="no template of that name; `tokenizer` is the base model's own",
    adapt=_template,
)


def _quantized(value: str, _: Section) -> dict[str, Any] | Verdict:
    if value in ("int4", "nf4"):
        return {"model.quantize": "nf4"}
    return Verdict.REFUSED if value == "int8" else Verdict.IDLE


ROOT = (
    Rule(
        name="schema_version",
        kind=one_of("1.0", "2.0"),
        effect="which schema the rest is read by; absent: 1.0",
        adapt=read_together,
    ),
    Rule(name="name", kind=TEXT, effect="the name of the prepared data", sets="data.name"),
    Rule(
        name="base_model",
        kind=ANYTHING,
        effect="see below; schema 1.0 (a mapping, or the name alone)",
        is_section=True,
    ),
    Rule(name="base_models", kind=MAPPINGS, effect="see below; schema 2.0", is_section=True),
    Rule(name="adapters", kind=MAPPINGS, effect="see below; schema 1.0", is_section=True),
    Rule(name="training", kind=MAPPING, effect="see below", is_section=True),
    Rule(
        name="soft_prompts",
        kind=MAPPINGS,
        idle="none are named",
        refusal="soft prompts aren't trained; LoRA and DoRA are",
        adapt=lambda value, _: Verdict.REFUSED if value else Verdict.IDLE,
    ),
    *(
        Rule(name=name, idle=ABOUT_THE_PACKAGE)
        for name in (
            "version",
            "description",
            "author",
            "homepage",
            "repository",
            "capabilities",
            "limitations",
            "quality_metrics",
            "routing",
            "constraints",
            "perf",
            "runtime",
            "evaluation",
            "integrity",
            "license",
            "tags",
        )
    ),
)

BASE_MODEL = (
    Rule(
        name="name",
        kind=TEXT,
        effect="`model.pretrained`; a folder if there is one (seen from the manifest, then from here), else a hub id",
        adapt=read_together,
    ),
    Rule(name="path", kind=TEXT, effect="as `name`, and before it", adapt=read_together),
    Rule(
        name="quantization",
        kind=one_of("int4", "nf4", "int8", "fp16", "bf16", "none"),
        effect="`int4`, `nf4`: `model.quantize` = nf4 (4-bit base, bf16 compute)",
        idle="the base model is read as it is; `dtype` says what is computed in",
        refusal="8-bit base models aren't offered; int4 and none are",
        adapt=_quantized,
    ),
    TEMPLATE_RULE,
    Rule(name="adapters", kind=MAPPINGS, effect="see below; schema 2.0", is_section=True),
    Rule(name="rope_scaling", idle="the base model's own config.json says how positions are scaled"),
    Rule(name="sha256", idle="names no file; what is read is recorded with the run"),
)


def _adapter_type(value: str, section: Section) -> dict[str, Any] | Verdict:
    if value not in ("lora", "dora"):
        return Verdict.REFUSED
    return {"model.adapter.kind": "dora" if section.get("use_dora") else value}


ADAPTER_KINDS = one_of("lora", "dora", "ia3", "lokr", "adalora")
NOT_TRAINED = "only LoRA and DoRA are trained"
SIZES = (
    *(Rule(name=name, kind=COUNT, effect="`model.adapter.rank`", sets="model.adapter.rank") for name in ("r", "rank")),
    Rule(name="alpha", kind=COUNT, effect="`model.adapter.alpha`", sets="model.adapter.alpha"),
    Rule(name="dropout", kind=SHARE, effect="`model.adapter.dropout`", sets="model.adapter.dropout"),
    Rule(
        name="target_modules",
        kind=TEXTS,
        effect="`model.adapter.target_modules`",
        sets="model.adapter.target_modules",
    ),
    Rule(name="feedforward_modules", refusal="a setting of IA3: " + NOT_TRAINED),
)
"""Of an adapter; in `adapters` and, coming before it, in `training.config`."""

ADAPTER = (
    Rule(
        name="type",
        kind=ADAPTER_KINDS,
        effect="`model.adapter.kind`: `lora`, `dora`",
        refusal=NOT_TRAINED,
        adapt=_adapter_type,
    ),
    Rule(
        name="use_dora",
        kind=FLAG,
        effect="true: `model.adapter.kind` = dora",
        idle="false: the type as given",
        adapt=lambda value, _: {"model.adapter.kind": "dora"} if value else Verdict.IDLE,
    ),
    *SIZES,
    Rule(
        name="scaling",
        kind=one_of("default", "standard", "dora", "learned"),
        idle="alpha / rank, as usual; DoRA's is learnt",
        refusal="learned scaling is no part of LoRA or DoRA",
        adapt=lambda value, _: Verdict.REFUSED if value == "learned" else Verdict.IDLE,
    ),
    *(Rule(name=name, idle=ABOUT_THE_PACKAGE) for name in ("path", "size_bytes", "sha256", "checkpoint_step")),
)

TRAINING = (
    Rule(name="dataset", kind=MAPPING, effect="see below", is_section=True),
    Rule(name="config", kind=MAPPING, effect="see below", is_section=True),
    *(
        Rule(name=name, idle=ABOUT_THE_PACKAGE)
        for name in (
            "decoding",
            "trained_on",
            "base_model_version",
            "checkpoint",
            "packaging_checkpoint",
            "alternative_checkpoints",
            "metadata",
            "notes",
        )
    ),
)

DATASET = (
    Rule(name="type", kind=one_of("single", "multi_task"), effect="one store, or one for each task", sets="data.type"),
    Rule(
        name="format",
        kind=one_of("jsonl", "huggingface", "csv", "parquet"),
        effect="what `path` must be: a file with such an ending, or a data set of the hub or its cache",
        sets="data.format",
    ),
    Rule(name="path", kind=TEXT, effect="split `train`, seen from the manifest's folder", sets="data.path"),
    Rule(
        name="validation_path",
        kind=TEXT,
        effect="split `val`; absent: a tenth of `path`, by hash",
        sets="data.validation_path",
    ),
    Rule(name="test_path", kind=TEXT, effect="split `test`: kept out of training", sets="data.test_path"),
    Rule(
        name="field_mapping",
        kind=MAPPING,
        effect="columns of the record's fields, as `prepare --field-map`",
        sets="data.field_mapping",
    ),
    Rule(
        name="tasks",
        kind=MAPPING,
        effect="a store for each task, mixed by weight (docs/mixture.md)",
        sets="data.tasks",
    ),
    Rule(name="streaming", kind=FLAG, idle="data is always read as a stream, once, into a store"),
    *(
        Rule(name=name, idle=ABOUT_THE_SOURCE)
        for name in (
            "source",
            "sources",
            "splits",
            "preprocessing",
            "task_distribution",
            "format_distribution",
            "description",
            "generation",
            "statistics",
            "validation",
            "license",
        )
    ),
)

TASK = (
    Rule(name="train", kind=TEXT, effect="split `train` of the task's store", adapt=read_together),
    Rule(name="valid", kind=TEXT, effect="split `val`; absent: a tenth of `train`, by hash", adapt=read_together),
    Rule(name="test", kind=TEXT, effect="split `test`", adapt=read_together),
    Rule(name="weight", kind=NUMBER, effect="`mix`: how often its rows come; absent: 1", adapt=read_together),
)


def _batch(value: int, section: Section) -> dict[str, Any]:
    return {"micro_batch_rows": value, "batch_rows": value * section.get("gradient_accumulation_steps", 1)}


def _accumulation(value: int, section: Section) -> dict[str, Any]:
    return _batch(section.get("batch_size", DEFAULT_BATCH_SIZE), {"gradient_accumulation_steps": value})


def _warmup_ratio(value: float, section: Section) -> dict[str, Any] | Verdict:
    return Verdict.IDLE if section.get("warmup_steps") else {"warmup_ratio": value}


def _warmup_steps(value: int, section: Section) -> dict[str, Any] | Verdict:
    return Verdict.IDLE if value == 0 and section.get("warmup_ratio") else {"warmup_steps": value}


def _schedule(value: str, _: Section) -> dict[str, Any] | Verdict:
    return dict(SCHEDULES[value]) if value in SCHEDULES else Verdict.REFUSED


def _optimizer(value: str, _: Section) -> dict[str, Any] | Verdict:
    return {"optimizer": OPTIMIZERS[value]} if value in OPTIMIZERS else Verdict.REFUSED


def _every(key: str) -> Adapt:
    """`save_strategy` and its like, of which `steps` says what the number beside it says already."""

    def adapt(value: str, _: Section) -> dict[str, Any] | Verdict:
        if value == "no":
            return {key: None}
        return Verdict.IDLE if value == "steps" else Verdict.REFUSED

    return adapt


def _strategy(name: str, key: str, number: str) -> Rule:
    return Rule(
        name=name,
        kind=one_of("steps", "no", "epoch"),
        effect=f"`no`: `{key}` = null, at the end only",
        idle=f"`steps`: {number} says how many",
        refusal=f"`epoch`: give {number}",
        adapt=_every(key),
    )


def _checkpointing(value: bool | str, section: Section) -> dict[str, Any]:
    partly = value == "selective" or section.get("activation_checkpointing") in ("selective", "attention_only")
    return {"activation_checkpointing": "none" if value is False else "selective" if partly else "full"}


def _precision(name: str, dtype: str) -> Rule:
    def adapt(value: bool, section: Section) -> dict[str, Any] | Verdict:
        if value:
            return {"dtype": dtype}
        return Verdict.IDLE if section.get("fp16") else {"dtype": "float32"}

    return Rule(
        name=name,
        kind=FLAG,
        effect=f"`dtype`: {dtype}, or float32 if false",
        idle="false beside fp16",
        adapt=adapt,
    )


CONFIG = (
    Rule(
        name="method",
        kind=TEXT,
        idle="`sft`: what training here is",
        refusal="only `sft` is offered",
        adapt=lambda value, _: Verdict.IDLE if value == "sft" else Verdict.REFUSED,
    ),
    Rule(
        name="adapter_type",
        kind=ADAPTER_KINDS,
        effect="`model.adapter.kind`, before that of `adapters`",
        refusal=NOT_TRAINED,
        adapt=_adapter_type,
    ),
    Rule(
        name="adapter",
        kind=ADAPTER_KINDS,
        effect="as `adapter_type`",
        refusal=NOT_TRAINED,
        adapt=_adapter_type,
    ),
    *SIZES,
    *LENGTH_AND_RATE,
    Rule(name="batch_size", kind=COUNT, effect="`micro_batch_rows`; times accumulation: `batch_rows`", adapt=_batch),
    Rule(
        name="gradient_accumulation_steps",
        kind=COUNT,
        effect=f"`batch_rows` = this × `batch_size` ({DEFAULT_BATCH_SIZE} if there is none)",
        adapt=_accumulation,
    ),
    Rule(
        name="warmup_steps",
        kind=WHOLE,
        effect="`warmup_steps`",
        idle="0 beside warmup_ratio, which decides",
        adapt=_warmup_steps,
    ),
    Rule(
        name="warmup_ratio",
        kind=SHARE,
        effect="`warmup_ratio`",
        idle="warmup_steps is given and comes first",
        adapt=_warmup_ratio,
    ),
    Rule(
        name="lr_scheduler",
        kind=TEXT,
        effect="`schedule`, decaying to 0 as in transformers: " + ", ".join(f"`{name}`" for name in SCHEDULES),
        refusal="no schedule of that name",
        adapt=_schedule,
    ),
    Rule(
        name="lr_scheduler_type",
        kind=TEXT,
        effect="as `lr_scheduler`",
        refusal="no schedule of that name",
        adapt=_schedule,
    ),
    Rule(name="weight_decay", kind=NUMBER, effect="`weight_decay`", sets="weight_decay"),
    MAX_GRAD_NORM,
    Rule(name="adam_beta1", kind=SHARE, effect="`betas`", adapt=lambda value, section: _betas(section)),
    Rule(name="adam_beta2", kind=SHARE, effect="`betas`", adapt=lambda value, section: _betas(section)),
    Rule(name="adam_epsilon", kind=NUMBER, effect="`eps`", sets="eps"),
    Rule(name="seed", kind=WHOLE, effect="`seed`", sets="seed"),
    Rule(name="max_seq_length", kind=COUNT, effect="`seq_len`", sets="seq_len"),
    Rule(
        name="packing",
        kind=FLAG,
        effect="`pack`: `best-fit` (documents whole, attention inside them); false: `pad`; absent: `best-fit`",
        adapt=lambda value, _: {"pack": "best-fit" if value else "pad"},
    ),
    Rule(
        name="group_by_length",
        kind=FLAG,
        effect="`order`: `group-by-length`, where rows are padded; false: `shuffled`",
        idle="packed rows are all of one length",
        adapt=lambda value, section: (
            {"order": "group-by-length" if value else "shuffled"} if section.get("packing") is False else Verdict.IDLE
        ),
    ),
    _precision("bf16", "bfloat16"),
    refused_if_true("fp16", "float16 needs loss scaling; bf16 does without"),
    Rule(name="use_tf32", kind=FLAG, effect="`tf32`", sets="tf32"),
    Rule(name="tf32", kind=FLAG, effect="`tf32`", sets="tf32"),
    Rule(
        name="use_sdpa",
        kind=FLAG,
        effect="true: `attention` = sdpa",
        refusal="attention without SDPA isn't offered",
        adapt=lambda value, _: {"attention": "sdpa"} if value else Verdict.REFUSED,
    ),
    Rule(
        name="flash_attention_2",
        kind=FLAG,
        effect="true: `attention` = flash",
        idle="false: `attention` is chosen",
        adapt=lambda value, _: {"attention": "flash"} if value else Verdict.IDLE,
    ),
    Rule(name="memory_efficient_attention", kind=FLAG, idle="every kernel offered is: none keeps the matrix of scores"),
    Rule(name="memory_clear_every", kind=WHOLE, idle="memory isn't given back during a run; that only costs time"),
    compiled("torch_compile"),
    Rule(name="torch_compile_backend", kind=one_of("inductor"), idle="inductor is the only one"),
    Rule(name="torch_compile_mode", kind=TEXT, idle="blocks are compiled in the default mode"),
    refused_if_true("use_cuda_graphs", "CUDA graphs aren't offered"),
    Rule(name="cuda_graph_warmup_steps", kind=WHOLE, idle="CUDA graphs aren't used"),
    Rule(
        name="optim",
        kind=TEXT,
        effect="`optimizer`: " + ", ".join(f"`{name}`" for name in OPTIMIZERS),
        refusal="no optimizer of that name",
        adapt=_optimizer,
    ),
    Rule(
        name="gradient_checkpointing",
        kind=one_of(True, False, "selective", "full"),
        effect="`activation_checkpointing`: full, selective; false: none",
        adapt=_checkpointing,
    ),
    Rule(
        name="activation_checkpointing",
        kind=one_of("attention_only", "selective", "full", "none"),
        effect="`activation_checkpointing`; `attention_only`: selective",
        idle="gradient_checkpointing decides",
        adapt=lambda value, section: (
            Verdict.IDLE
            if "gradient_checkpointing" in section
            else {"activation_checkpointing": {"attention_only": "selective"}.get(value, value)}
        ),
    ),
    Rule(name="gradient_checkpointing_kwargs", kind=MAPPING, idle="recomputation is never re-entrant"),
    Rule(name="use_unsloth", kind=FLAG, idle="another trainer's kernels; what is used here is in the log"),
    Rule(name="pretokenized_cache", kind=TEXT, effect="the folder of the prepared store", sets="data.cache"),
    Rule(name="dataloader_num_workers", kind=WHOLE, idle="there are no worker processes: rows are gathered from maps"),
    Rule(name="dataloader_prefetch_factor", kind=WHOLE, effect="`prefetch_batches`", sets="prefetch_batches"),
    Rule(name="dataloader_persistent_workers", kind=FLAG, idle="there are no worker processes"),
    Rule(name="dataloader_pin_memory", kind=FLAG, idle="buffers are pinned wherever there is a GPU"),
    TEMPLATE_RULE,
    Rule(name="logging_steps", kind=COUNT, effect="`log_every_steps`", sets="log_every_steps"),
    Rule(name="save_steps", kind=COUNT, effect="`checkpoint_every_steps`", sets="checkpoint_every_steps"),
    Rule(name="eval_steps", kind=COUNT, effect="`eval_every_steps`", sets="eval_every_steps"),
    _strategy("save_strategy", "checkpoint_every_steps", "save_steps"),
    _strategy("evaluation_strategy", "eval_every_steps", "eval_steps"),
    _strategy("eval_strategy", "eval_every_steps", "eval_steps"),
    Rule(name="save_total_limit", kind=COUNT, effect="`keep_checkpoints`", sets="keep_checkpoints"),
    Rule(name="load_best_model_at_end", kind=FLAG, effect="`keep_best`", sets="keep_best"),
    Rule(
        name="metric_for_best_model",
        kind=TEXT,
        idle="`eval_loss`: the best is the one of the lowest held-out loss",
        refusal="the best is the one of the lowest held-out loss",
        adapt=lambda value, _: Verdict.IDLE if value in ("eval_loss", "loss") else Verdict.REFUSED,
    ),
    refused_if_true("greater_is_better", "of a loss, less is better", idle="false: of a loss, less is better"),
    Rule(name="early_stopping_patience", kind=COUNT, effect="`patience`", sets="patience"),
    Rule(
        name="early_stopping_threshold",
        kind=NUMBER,
        effect="`min_delta`",
        idle="no early_stopping_patience beside it",
        adapt=lambda value, section: {"min_delta": value} if "early_stopping_patience" in section else Verdict.IDLE,
    ),
    Rule(name="resume", kind=FLAG, effect="as `--resume`", sets="run.resume"),
    Rule(
        name="load_in_4bit",
        kind=FLAG,
        effect="`model.quantize`: nf4; false: none",
        adapt=lambda value, _: {"model.quantize": "nf4" if value else None},
    ),
    Rule(
        name="bnb_4bit_quant_type",
        kind=one_of("nf4", "fp4"),
        idle="nf4: the only one",
        refusal="fp4 isn't offered; nf4 is",
        adapt=lambda value, _: Verdict.IDLE if value == "nf4" else Verdict.REFUSED,
    ),
    Rule(name="bnb_4bit_compute_dtype", kind=one_of("bfloat16", "float16", "float32"), idle="`dtype` says it"),
    Rule(name="bnb_4bit_use_double_quant", kind=FLAG, idle="scales of 4-bit weights are as bitsandbytes keeps them"),
    refused_if_true("trust_remote_code", "data and models are never code here"),
)


def _betas(section: Section) -> dict[str, Any]:
    return {"betas": [section.get("adam_beta1", 0.9), section.get("adam_beta2", 0.95)]}
