"""transformers: a Llama by the Trainer, in bf16 and with its own gradient checkpointing."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from client_runs.run import Run
from lowtide.integrations.transformers import Lowtide

LIBRARY = "transformers"
LOOP = "Llama, Trainer, bf16, gradient_checkpointing=True"


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 300, (run.steps * 8, 64))
    settings = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=run.steps,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, settings, train_dataset=data, callbacks=run.callbacks(Lowtide, model)).train()
