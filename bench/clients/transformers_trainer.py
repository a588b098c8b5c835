"""transformers: BERT learns to classify sentences by the Trainer, with accumulation and a schedule."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from client_runs.run import Run
from lowtide.integrations.transformers import Lowtide

LIBRARY = "transformers"
LOOP = "BERT classifier, Trainer, two micro-batches a step"


def train(run: Run) -> None:
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128
    )
    model = BertForSequenceClassification(config)
    ids = torch.randint(0, 200, (run.steps * 16, 64))
    data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
    settings = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=run.steps,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    Trainer(model, settings, train_dataset=data, callbacks=run.callbacks(Lowtide, model)).train()
