"""A store in TRL's SFTTrainer: tokens, labels and document borders as they were prepared, nothing tokenised again.

penstock prepare stdlib: --out store
python examples/trl_sft.py store run
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, default_data_collator, set_seed
from trl import SFTConfig, SFTTrainer

import penstock
from penstock.load.torch import RowStream

SEQ_LEN, ROWS, STEPS = 128, 4, 6


def main(path: str, out: str) -> dict[int, float]:
    """Trains for a few steps; returns the loss of each."""
    set_seed(0)
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        stream = RowStream(plan, batch_rows=ROWS, labels="hugging-face", rank=0, world_size=1, seed=1)
        tokenizer = store.manifest.tokenizer
        end_token = next(name for name, token in tokenizer["control_tokens"].items() if token == tokenizer["end_id"])
        trainer = SFTTrainer(
            model=LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=tokenizer["vocab_size"],
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                )
            ),
            args=SFTConfig(
                output_dir=out,
                max_steps=STEPS,
                per_device_train_batch_size=ROWS,
                dataset_kwargs={"skip_prepare_dataset": True},  # rows are ready: input_ids, labels, position_ids
                remove_unused_columns=False,
                max_length=None,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
            ),
            # TRL takes the data sets of Hugging Face only; this one asks the stream for each row.
            train_dataset=IterableDataset.from_generator(rows, gen_kwargs={"stream": stream}),
            data_collator=default_data_collator,
            processing_class=PreTrainedTokenizerFast(
                tokenizer_file=str(store.path / store.manifest.tokenizer_file.name), eos_token=end_token
            ),
        )
        trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def rows(stream: RowStream) -> Iterator[dict[str, Any]]:
    """The stream's rows as lists, which is what the library passes on."""
    for item in stream:
        yield {name: tensor.tolist() for name, tensor in item.items()}


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2]))
