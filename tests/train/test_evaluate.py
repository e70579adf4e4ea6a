from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from penstock.load.torch import IGNORED_LABEL, sequential_batches
from penstock.pack import plan_concat
from penstock.store import Store
from penstock.train import Decoder, build_model
from penstock.train.evaluate import Evaluation, evaluate, held_out_batches

from .conftest import tiny_config


def tiny_model(store: Store) -> Decoder:
    return build_model(tiny_config().model.shape(vocab_size=store.tokenizer().vocab_size, seq_len=32), seed=1)


def evaluated(store: Store, model: Decoder, *, batch_rows: int) -> Evaluation | None:
    plan = plan_concat(store, split="val", seq_len=32)
    lengths = torch.from_numpy(store.tokenizer().token_byte_lengths())
    batches = sequential_batches(plan, batch_rows=batch_rows)
    return evaluate(model, batches, lengths, document_boundaries=True, autocast=nullcontext)


def test_bits_per_byte_equal_a_slow_reference(store: Store) -> None:
    """Document by document: cut where rows are cut, log-softmax in double, bytes of the decoded tokens."""
    model, tokenizer = tiny_model(store), store.tokenizer()
    nats, num_bytes, num_targets, position = 0.0, 0, 0, 0
    for document in store.kept_documents("val"):
        tokens = np.asarray(store.document_tokens(int(document))).astype(np.int64)
        start = 0
        while start < len(tokens):
            end = min(len(tokens), start + 32 - position % 32)  # inputs of this row
            targets = tokens[start + 1 : end + 1]
            if len(targets):
                with torch.no_grad():
                    logits = model(torch.from_numpy(tokens[start:end])[None])[0]
                log_probabilities = logits.double().log_softmax(-1)
                nats -= sum(float(log_probabilities[i, target]) for i, target in enumerate(targets))
                num_targets += len(targets)
                num_bytes += sum(len(tokenizer.spec.token_bytes[t]) for t in targets if t != tokenizer.end_id)
            position += end - start
            start = end
    found = evaluated(store, model, batch_rows=4)
    assert found is not None
    assert (found.num_targets, found.num_bytes) == (num_targets, num_bytes)
    assert found.loss == pytest.approx(nats / num_targets, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_the_micro_batch_does_not_matter(store: Store) -> None:
    model = tiny_model(store)
    results = [evaluated(store, model, batch_rows=rows) for rows in (1, 3, 64)]
    assert all(result is not None for result in results)
    assert {(result.num_targets, result.num_bytes) for result in results if result} == {
        (results[0].num_targets, results[0].num_bytes) if results[0] else None
    }
    assert [result.nats for result in results if result] == pytest.approx([results[0].nats] * 3 if results[0] else [])


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_put_back_and_no_gradient_is_kept(store: Store, training: bool) -> None:
    model = tiny_model(store).train(training)
    seen = []
    model.register_forward_hook(lambda module, _inputs, output: seen.append((module.training, output.requires_grad)))
    evaluated(store, model, batch_rows=8)
    assert model.training is training
    assert set(seen) == {(False, False)}


def test_the_mode_is_put_back_after_an_error(store: Store) -> None:
    model = tiny_model(store).train()

    def fail(*_arguments: object) -> None:
        raise ArithmeticError

    model.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        evaluated(store, model, batch_rows=8)
    assert model.training


def test_stopping_gives_nothing_rather_than_a_part(store: Store) -> None:
    plan = plan_concat(store, split="val", seq_len=32)
    lengths = torch.from_numpy(store.tokenizer().token_byte_lengths())
    answers = iter([False, False, True])
    batches = sequential_batches(plan, batch_rows=1)
    found = evaluate(
        tiny_model(store),
        batches,
        lengths,
        document_boundaries=True,
        autocast=nullcontext,
        should_stop=lambda: next(answers),
    )
    assert found is None


def test_end_tokens_are_scored_and_have_no_bytes(store: Store) -> None:
    tokenizer = store.tokenizer()
    plan = plan_concat(store, split="val", seq_len=32)
    labels = torch.cat([batch.labels.flatten() for batch in sequential_batches(plan, batch_rows=8)])
    assert int((labels == tokenizer.end_id).sum()) > 0
    assert tokenizer.token_byte_lengths()[tokenizer.end_id] == 0
    assert int((labels == IGNORED_LABEL).sum()) > 0


def rows_of(store: Store, *, batch_rows: int, limit_rows: int | None) -> list[tuple[int, ...]]:
    plan = plan_concat(store, split="val", seq_len=32)
    batches = held_out_batches(plan, batch_rows=batch_rows, device="cpu", limit_rows=limit_rows)
    return [tuple(row.tolist()) for batch in batches for row in batch.inputs]


def test_a_limited_evaluation_samples_the_whole_split(store: Store) -> None:
    every = rows_of(store, batch_rows=4, limit_rows=None)
    for limit in (1, 5, len(every) - 1):
        some = rows_of(store, batch_rows=4, limit_rows=limit)
        assert len(some) == len(set(some)) == limit
        assert set(some) <= set(every)
        assert some == rows_of(store, batch_rows=3, limit_rows=limit)
    assert set(rows_of(store, batch_rows=4, limit_rows=5)) != set(every[:5])
    assert rows_of(store, batch_rows=4, limit_rows=len(every) + 1) == every
