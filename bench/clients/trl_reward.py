"""TRL: a reward model on pairs of answers, by RewardTrainer."""

import random

from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from client_runs.run import Run
from client_runs.tokenizer import random_words, word_tokenizer
from client_runs.trl_settings import settings
from lowtide.integrations.transformers import Lowtide

LIBRARY = "trl"
LOOP = "Llama, RewardTrainer"


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    model = LlamaForSequenceClassification(config)
    rows = run.steps * 4
    data = Dataset.from_dict(
        {
            "chosen": [random_words(300, random.randrange(10, 40)) for _ in range(rows)],
            "rejected": [random_words(300, random.randrange(10, 40)) for _ in range(rows)],
        }
    )
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**settings(run, rows=4), max_length=64),
        train_dataset=data,
        processing_class=word_tokenizer(300),
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.train()
