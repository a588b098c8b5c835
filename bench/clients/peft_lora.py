"""peft: adapters of low rank on GPT-2, the base frozen, by the loop of its quick tour."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from client_runs.run import Run

LIBRARY = "peft"
LOOP = "GPT-2 with LoRA, own loop"


def train(run: Run) -> None:
    base = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=4, n_head=2, n_positions=64))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, task_type="CAUSAL_LM"))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.randint(0, 300, (8, 64))}
    batch["labels"] = batch["input_ids"]
    model = run.plan(model, batch, optimizer=optimizer)
    for _ in range(run.steps):
        batch["input_ids"].random_(0, 300)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
