"""Many sequence lengths in one run: exact, within the budget, and the share of the time that planning takes.

    python bench/lengths.py --lengths 200

Trains a small BERT on one batch of every length, eagerly and by a plan that was made for the longest,
compares loss and gradients to the last bit, and measures the peak of every length's second step.
"""

import argparse
import copy
import time

import torch
from transformers import BertConfig, BertForMaskedLM

import lowtide
from lowtide.runtime.runner import runner_of
from lowtide.verification.measure_step import peak_above_start, static_bytes

VOCABULARY, BATCH_SIZE, SHORTEST = 1000, 8, 16

Batch = dict[str, torch.Tensor]


def make_batch(length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCABULARY, (BATCH_SIZE, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def gradients(model: torch.nn.Module, batch: Batch) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(0)
    model(**batch).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--budget", default="70%")
    options = parser.parse_args()
    lengths = range(SHORTEST, SHORTEST + options.lengths)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
    )
    eager = BertForMaskedLM(config).train()
    model = copy.deepcopy(eager)
    plan = lowtide.profile(model, make_batch(lengths[-1])).plan(options.budget)
    plan.apply(model)
    exact = within = 0
    planned_seconds = 0.0
    for length in lengths:
        batch = make_batch(length)
        start = time.perf_counter()
        found = gradients(model, batch)
        planned_seconds += time.perf_counter() - start
        exact += all(map(torch.equal, found, gradients(eager, batch)))
        model.zero_grad()
        peak = static_bytes(model, batch, None) + peak_above_start(
            lambda batch=batch: gradients(model, batch)
        )
        within += peak <= plan.budget_bytes
    runner = runner_of(model)
    assert runner is not None
    share = runner.compiled.seconds / planned_seconds
    print(f"{len(lengths)} lengths: {exact} exact, {within} within the budget of {plan.budget_bytes} bytes")
    print(f"{planned_seconds / len(lengths):.2f} s a new length; tracing and planning are {share:.0%} of it")


if __name__ == "__main__":
    main()
