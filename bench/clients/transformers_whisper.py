"""transformers: Whisper learns to write down speech, by Seq2SeqTrainer."""

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from client_runs.run import Run
from lowtide.integrations.transformers import Lowtide

LIBRARY = "transformers"
LOOP = "Whisper, Seq2SeqTrainer"


def train(run: Run) -> None:
    config = WhisperConfig(
        vocab_size=300,
        num_mel_bins=20,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=100,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        apply_spec_augment=True,
        mask_time_prob=0.2,
        mask_time_length=5,
    )
    model = WhisperForConditionalGeneration(config)
    settings = Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        max_steps=run.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = [
        {"input_features": torch.randn(20, 200), "labels": torch.randint(3, 300, (24,))}
        for _ in range(run.steps * 4)
    ]
    Seq2SeqTrainer(model, settings, train_dataset=data, callbacks=run.callbacks(Lowtide, model)).train()
