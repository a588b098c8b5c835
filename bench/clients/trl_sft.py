"""TRL: supervised fine-tuning of a small Llama on tokens that are there already."""

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from client_runs.run import Run
from client_runs.tokenizer import word_tokenizer
from client_runs.trl_settings import settings
from lowtide.integrations.transformers import Lowtide

LIBRARY = "trl"
LOOP = "Llama, SFTTrainer"


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    data = Dataset.from_dict({"input_ids": torch.randint(4, 300, (run.steps * 8, 64)).tolist()})
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings(run, rows=8), max_length=64),
        train_dataset=data,
        processing_class=word_tokenizer(300),
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.train()
