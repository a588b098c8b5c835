"""TRL: GRPO, which generates with the model that it trains; the reward is a function."""

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from client_runs.run import Run
from client_runs.tokenizer import random_words, word_tokenizer
from client_runs.trl_settings import settings
from lowtide.integrations.transformers import Lowtide

LIBRARY = "trl"
LOOP = "GPT-2, GRPOTrainer, generates as it trains"


def many_words(completions: list[str], **columns: object) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def train(run: Run) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2, n_positions=64))
    model.generation_config.pad_token_id = 0
    data = Dataset.from_dict({"prompt": [random_words(300, 8) for _ in range(run.steps * 4)]})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=many_words,
        args=GRPOConfig(**settings(run, rows=4), num_generations=4, max_completion_length=12),
        train_dataset=data,
        processing_class=word_tokenizer(300),
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.train()
