"""Decoders and mixtures of experts, as transformers makes them by default: one graph, and exact."""

import pytest
import torch
from budgets import between

import lowtide
from coverage_cases.architectures import build
from coverage_cases.examine import differences, results, twin

pytestmark = pytest.mark.slow

MODELS = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "clip": "CLIPModel",
}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "clip"))]
)
def test_one_graph_and_exact(name: str, caplog: pytest.LogCaptureFixture) -> None:
    training = build(name, MODELS[name])
    if "attention_mask" in training.batch:
        assert training.batch["attention_mask"].all(), "of which eager makes no mask"
    expected = results(twin(training))
    planned = twin(training)
    found = lowtide.profile(planned.model, planned.batch, optimizer=planned.optimizer)
    assert len([graph for graph in found.step.graphs if graph.in_model]) == 1
    assert "cannot be run alone" not in caplog.text
    found.plan(between(found, 0.5)).apply(planned.model)
    assert differences(expected, results(planned)) == []


@pytest.mark.long
def test_padding_is_another_graph_of_the_same_plan() -> None:
    training = build("llama", "LlamaForCausalLM")
    planned = twin(training)
    lowtide.checkpoint(planned.model, planned.batch, budget="1GB", optimizer=planned.optimizer)
    mask = training.batch["attention_mask"].clone()
    mask[0, :5] = 0
    for batch in (training.batch, training.batch | {"attention_mask": mask}, training.batch):
        for model in (training.model, planned.model):
            model.zero_grad()
            model(**batch).loss.backward()
        pairs = zip(training.model.parameters(), planned.model.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
