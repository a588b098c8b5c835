"""TRL: preferences by DPO with adapters, whose reference is the model without them."""

from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer

from client_runs.run import Run
from client_runs.tokenizer import random_words, word_tokenizer
from client_runs.trl_settings import settings
from lowtide.integrations.transformers import Lowtide

LIBRARY = "trl"
LOOP = "GPT-2 with LoRA, DPOTrainer"


def train(run: Run) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=2, n_positions=64))
    rows = run.steps * 4
    data = Dataset.from_dict(
        {
            "prompt": [random_words(300, 8) for _ in range(rows)],
            "chosen": [" " + random_words(300, 24) for _ in range(rows)],
            "rejected": [" " + random_words(300, 24) for _ in range(rows)],
        }
    )
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**settings(run, rows=4), max_length=64),
        train_dataset=data,
        processing_class=word_tokenizer(300),
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=True),
        callbacks=run.callbacks(Lowtide, model),
    )
    run.models[:] = [trainer.model]
    trainer.train()
