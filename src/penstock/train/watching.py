"""Looking at a model while it is trained: held-out loss, and text that it writes.

In: a `Run` and its progress. Out: `evaluation` and `sample` records. Neither changes what the next step computes: the
model is put in evaluation mode and back, and sampling draws from a generator of its own.
"""

from __future__ import annotations

from penstock.train.evaluate import evaluate, held_out_batches
from penstock.train.run import Run
from penstock.train.sample import sampled_ids
from penstock.train.start import Progress

__all__ = ["watch"]

SAMPLE_TEMPERATURE = 0.8


def watch(run: Run, progress: Progress) -> None:
    """Scores the held-out rows and draws a sample; records both. A signal ends it without a record."""
    if run.data.held_out is None:
        return
    rows = held_out_batches(
        run.data.held_out,
        batch_rows=run.choices.micro_batch_rows,
        device=run.choices.device,
        limit_rows=run.config.eval_rows,
    )
    found = evaluate(
        run.model,
        rows,
        run.token_byte_lengths,
        document_boundaries=run.config.document_boundaries,
        autocast=run.autocast,
        should_stop=lambda: run.interruption.requested is not None,
    )
    if found is None:
        why = run.interruption.requested or "the held-out rows hold no target with bytes"
        run.tell("event", message=f"no evaluation at step {progress.step}: {why}")
        return
    progress.val_loss, progress.val_bits_per_byte = found.loss, found.bits_per_byte
    run.tell(
        "evaluation",
        step=progress.step,
        split="val",
        loss=found.loss,
        bits_per_byte=found.bits_per_byte,
        tokens=found.num_targets,
        seconds=round(found.seconds, 4),
    )
    if run.config.sample_tokens and run.prompt_ids:
        _sample(run, step=progress.step)


def _sample(run: Run, *, step: int) -> None:
    tokenizer = run.data.tokenizer
    ids = sampled_ids(
        run.model,
        run.prompt_ids,
        num_tokens=run.config.sample_tokens,
        end_id=tokenizer.end_id,
        seed=run.config.seed,
        temperature=SAMPLE_TEMPERATURE,
        autocast=run.autocast,
    )
    run.tell("sample", step=step, prompt=tokenizer.decode(run.prompt_ids), text=tokenizer.decode(ids))
