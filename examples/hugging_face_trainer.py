"""A store in Hugging Face's Trainer, resumed exactly and in constant time.

penstock prepare stdlib: --out store
python examples/hugging_face_trainer.py store run
python examples/hugging_face_trainer.py store run          # goes on where it stopped
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

import penstock
from penstock.load.torch import RowStream

SEQ_LEN, MICRO_ROWS, ACCUMULATION = 128, 4, 2


def main(path: str, out: str, steps: int = 6) -> dict[int, float]:
    """Trains up to a step, from the last checkpoint on where there is one; returns the loss of each step."""
    set_seed(0)
    with penstock.open_store(path) as store:
        plan = penstock.plan_concat(store, split="train", seq_len=SEQ_LEN)
        # Labels are shifted by the model. Rows are shared among processes by the Trainer, so this stream has one rank.
        rows_per_step = MICRO_ROWS * ACCUMULATION
        stream = RowStream(plan, batch_rows=rows_per_step, labels="hugging-face", rank=0, world_size=1, seed=1)
        checkpoint = get_last_checkpoint(out) if Path(out).is_dir() else None
        if checkpoint:  # the Trainer would read and drop every batch up to here; the stream knows the place
            done = json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"]
            stream.load_state_dict(stream.state_after(done))
        config = LlamaConfig(
            vocab_size=store.manifest.tokenizer["vocab_size"],
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=out,
                max_steps=steps,
                per_device_train_batch_size=MICRO_ROWS,
                gradient_accumulation_steps=ACCUMULATION,
                ignore_data_skip=True,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                save_steps=3,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=stream,
            data_collator=default_data_collator,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2]))
