"""Looking at a model while it is trained: held-out loss, text that it writes, and when to stop.

In: a `Run` and its progress. Out: `evaluation`, `sample` and `epoch` records, and the best held-out loss in the
progress. None changes what the next step computes: the model is put in evaluation mode and back, and sampling draws
from a generator of its own.

With several stores each one's `val` split is scored, and recorded with the store's name; the loss that counts is the
mean over the targets of all of them. A store whose held-out rows hold no target with bytes is left out, with an event.
"""

from __future__ import annotations

from penstock.pack import Plan
from penstock.store.mirror import Cancelled
from penstock.train.evaluate import (
    Evaluation,
    evaluate,
    evaluations_together,
    held_out_batches,
    shared_batches,
    whole_evaluation,
)
from penstock.train.run import Run
from penstock.train.sample import sampled_ids
from penstock.train.start import Progress

__all__ = ["has_lost_patience", "record_passes", "watch"]

SAMPLE_TEMPERATURE = 0.8
NO_ID = -1


def watch(run: Run, progress: Progress) -> None:
    """Scores the held-out rows and draws a sample; records both. A signal ends it without a record."""
    held_out = run.data.held_out
    found: dict[str, Evaluation] = {}
    for name, plan in held_out.items():
        evaluation = _evaluation(run, plan)
        if evaluation is not None:
            found[name] = evaluation
        elif run.interruption.requested is not None:
            run.tell("event", message=f"no evaluation at step {progress.step}: {run.interruption.requested}")
            return
        else:
            where = f" of {name}" if len(held_out) > 1 else ""
            why = "the held-out rows hold no target with bytes"
            run.tell("event", message=f"no evaluation{where} at step {progress.step}: {why}")
    if not found:
        return
    if len(held_out) > 1:
        for name, evaluation in found.items():
            _record(run, progress, evaluation, store=name)
    together = evaluations_together(found.values())
    min_delta = run.config.min_delta or 0.0
    progress.count_evaluation(loss=together.loss, bits_per_byte=together.bits_per_byte, min_delta=min_delta)
    _record(run, progress, together)
    if run.config.sample_tokens and run.prompt_ids:
        _sample(run, step=progress.step)


def _evaluation(run: Run, plan: Plan) -> Evaluation | None:
    """Each rank scores its share of the batches; the figures are those of all."""
    rows = held_out_batches(
        plan,
        batch_rows=run.choices.micro_batch_rows,
        device=run.choices.device,
        limit_rows=run.config.eval_rows,
        is_cancelled=lambda: run.interruption.requested is not None,
    )
    try:
        found = evaluate(
            run.model,
            shared_batches(rows, run.world),
            run.token_byte_lengths,
            document_boundaries=run.config.document_boundaries,
            autocast=run.autocast,
            loss_kernel=run.choices.loss_kernel,
            should_stop=run.interruption.agree,
        )
    except Cancelled:
        found = None
    return whole_evaluation(found, run.world)


def _record(run: Run, progress: Progress, found: Evaluation, **where: str) -> None:
    run.tell(
        "evaluation",
        step=progress.step,
        split="val",
        **where,
        loss=found.loss,
        bits_per_byte=found.bits_per_byte,
        tokens=found.num_targets,
        seconds=round(found.seconds, 4),
    )


def has_lost_patience(run: Run, progress: Progress) -> bool:
    """Whether the held-out loss has stood still for `patience` evaluations; says why in the progress."""
    patience = run.config.patience
    if patience is None or progress.evaluations_without_gain < patience or progress.best_loss is None:
        return False
    progress.stop_reason = (
        f"{progress.evaluations_without_gain} evaluations without a gain of {run.config.min_delta or 0:g} over "
        f"{progress.best_loss:.4f} of step {progress.best_step}"
    )
    return True


def record_passes(run: Run, progress: Progress, *, learning_rate: float, first_row: int, is_last: bool) -> None:
    """Sums up each pass over the rows that the last step has ended, and at the run's end the one it is in.

    A step belongs to the pass in which its first row lies. Where one step goes through several passes, the first gets
    its figures and the others have its loss.
    """
    rows_per_pass, position = run.length.rows_per_pass, run.loader.position
    first_pass, next_pass = first_row // rows_per_pass, position // rows_per_pass
    for number in range(first_pass, next_pass):
        _record_pass(run, progress, number, learning_rate, is_complete=True)
    if is_last and progress.pass_seconds:
        _record_pass(run, progress, next_pass, learning_rate, is_complete=False)


def _record_pass(run: Run, progress: Progress, number: int, learning_rate: float, *, is_complete: bool) -> None:
    is_watched = progress.val_step is not None and progress.val_step >= progress.pass_first_step
    tokens, seconds = progress.pass_tokens, progress.pass_seconds
    run.tell(
        "epoch",
        epoch=number + 1,
        step=progress.step,
        first_step=min(progress.pass_first_step, progress.step),
        complete=is_complete,
        mean_train_loss=progress.pass_nats / tokens if tokens else progress.final_loss,
        val_loss=progress.val_loss if is_watched else None,
        tokens=tokens,
        seconds=round(seconds, 6),
        tokens_per_second=round(tokens / seconds, 3) if seconds else None,
        learning_rate=learning_rate,
    )
    progress.pass_first_step = progress.step + 1
    progress.pass_nats, progress.pass_tokens, progress.pass_seconds = 0.0, 0, 0.0


def _sample(run: Run, *, step: int) -> None:
    tokenizer = run.data.tokenizer
    ids = sampled_ids(
        run.model,
        run.prompt_ids,
        num_tokens=run.config.sample_tokens,
        # Ranks that share a model call it equally often, whatever they draw.
        end_id=tokenizer.end_id if run.world.parallel != "fsdp" else NO_ID,
        seed=run.config.seed,
        temperature=SAMPLE_TEMPERATURE,
        autocast=run.autocast,
    )
    run.tell("sample", step=step, prompt=tokenizer.decode(run.prompt_ids), text=tokenizer.decode(ids))
