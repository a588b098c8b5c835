"""TRL: preferences by DPO, with a reference model beside the one that trains."""

import copy

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer

from client_runs.run import Run
from client_runs.tokenizer import random_words, word_tokenizer
from lowtide.integrations.transformers import Lowtide

LIBRARY = "trl"
LOOP = "GPT-2, DPOTrainer with a reference model"


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
    settings = DPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        max_steps=run.steps,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        use_cpu=True,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=settings,
        train_dataset=data,
        processing_class=word_tokenizer(300),
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.train()
