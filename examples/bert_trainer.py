"""BERT fine-tuning with the Trainer of transformers.

python examples/bert_trainer.py --budget 80% --batch-size 16 --steps 4
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from lowtide.integrations.transformers import Lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="80%", help="bytes, a size (8GiB) or a share of the peak")
parser.add_argument("--model", help="a pretrained BERT; without it, a tiny random one")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--steps", type=int, default=2)
args = parser.parse_args()

set_seed(0)
if args.model:
    model = BertForSequenceClassification.from_pretrained(args.model)
else:
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=200,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
        )
    )

ids = torch.randint(0, 200, (64, args.length))
sentences = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=2,
            max_steps=args.steps,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=args.steps,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=sentences[:48],
        eval_dataset=sentences[48:],
        callbacks=[Lowtide(budget=args.budget)],
    )
    trainer.train()
