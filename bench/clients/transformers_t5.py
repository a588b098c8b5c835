"""transformers: T5 by Seq2SeqTrainer, with label smoothing, so that the loss is outside of the model."""

import torch
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from client_runs.run import Run
from client_runs.tokenizer import word_tokenizer
from lowtide.integrations.transformers import Lowtide

LIBRARY = "transformers"
LOOP = "T5, Seq2SeqTrainer, label smoothing"


def train(run: Run) -> None:
    config = T5Config(
        vocab_size=300, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    sources, targets = (torch.randint(1, 300, (run.steps * 8, length)) for length in (48, 24))
    settings = Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=run.steps,
        label_smoothing_factor=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = [
        {"input_ids": one, "labels": other}
        for one, other in zip(sources.tolist(), targets.tolist(), strict=True)
    ]
    trainer = Seq2SeqTrainer(
        model,
        settings,
        data_collator=DataCollatorForSeq2Seq(word_tokenizer(300), model=model),
        train_dataset=data,
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.train()
