"""torchao: training that is aware of int8 activations and int4 weights, by fake quantizers in the model."""

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig
from transformers import LlamaConfig, LlamaForCausalLM

from client_runs.run import Run

LIBRARY = "torchao"
LOOP = "Llama, quantization-aware"


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: nn.Module = LlamaForCausalLM(config)
    base = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))
    quantize_(model, QATConfig(base, step="prepare"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (4, 64))
    model = run.plan(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer)
    for _ in range(run.steps):
        ids = torch.randint(0, 256, (4, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
