"""peft: DoRA, whose layers norm the weights of the base anew in every forward pass."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from client_runs.run import Run
from lowtide.integrations.transformers import Lowtide

LIBRARY = "peft"
LOOP = "Llama with DoRA, Trainer"


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    ids = torch.randint(0, 300, (run.steps * 8, 64))
    settings = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=run.steps,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, settings, train_dataset=data, callbacks=run.callbacks(Lowtide, model)).train()
