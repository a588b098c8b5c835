"""sentence-transformers: pairs of sentences by its Trainer; one step calls the encoder twice."""

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.training_args import SentenceTransformerTrainingArguments
from transformers import BertConfig, BertModel

from client_runs.run import Run
from client_runs.tokenizer import random_words, word_tokenizer
from lowtide.integrations.transformers import Lowtide

LIBRARY = "sentence-transformers"
LOOP = "BERT encoder, in-batch negatives, two calls a step"


def encoder() -> SentenceTransformer:
    config = BertConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128
    )
    BertModel(config).save_pretrained("encoder")
    word_tokenizer(300).save_pretrained("encoder")
    words = Transformer("encoder", max_seq_length=32)
    return SentenceTransformer(modules=[words, Pooling(64)], device="cpu")


def train(run: Run) -> None:
    model = encoder()
    count = run.steps * 8
    columns = {name: [random_words(300, 30) for _ in range(count)] for name in ("anchor", "positive")}
    settings = SentenceTransformerTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=run.steps,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.train()
