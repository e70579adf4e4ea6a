"""A short continuation of a prompt, to see with one's own eyes what a model has learned.

In: a model, prompt ids, a seed. Out: new ids. Temperature 0 takes the likeliest token each time; above 0 it draws with
a generator of its own, so the global random state, and with it the run, stays as it was. Padding ids of the vocabulary
are never drawn. Each token costs a forward pass over the last `max_positions` tokens: there is no key/value cache,
as samples are short and models fresh. Nothing is compiled, since each length would be compiled by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.train.evaluate import evaluation_mode
from penstock.train.language_model import LanguageModel
from penstock.train.loss import Autocast

__all__ = ["sampled_ids"]


@torch.no_grad()
def sampled_ids(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    *,
    num_tokens: int,
    end_id: int,
    seed: int,
    temperature: float,
    autocast: Autocast,
) -> list[int]:
    """Up to `num_tokens` ids that follow the prompt; ends before an end token."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same numbers
    ids = list(prompt_ids)
    # After eight lengths torch would compile no other shape for this run either, not even that of a halved micro-batch.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        for _ in range(num_tokens):
            context = torch.tensor([ids[-model.max_positions :]], device=device)
            with autocast():
                logits = model(context)[0, -1, : model.vocab_size]
            next_id = _drawn_id(logits.float().cpu(), temperature, generator)
            if next_id == end_id:
                break
            ids.append(next_id)
    return ids[len(prompt_ids) :]


def _drawn_id(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
