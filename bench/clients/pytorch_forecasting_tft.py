"""pytorch-forecasting: the temporal fusion transformer, with packed LSTMs inside, by Lightning's Trainer."""

import lightning
import numpy
import pandas
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

from client_runs.run import Run
from lowtide.integrations.lightning import Lowtide

LIBRARY = "pytorch-forecasting"
LOOP = "temporal fusion transformer, Lightning"


def series(count: int, length: int) -> TimeSeriesDataSet:
    frame = pandas.DataFrame(
        {
            "time": numpy.tile(numpy.arange(length), count),
            "group": numpy.repeat([str(each) for each in range(count)], length),
            "value": numpy.random.randn(count * length),
        }
    )
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=16,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
    )


def train(run: Run) -> None:
    data = series(count=16, length=40)
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=16, attention_head_size=2, dropout=0.1, loss=QuantileLoss(), learning_rate=0.01
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=run.steps,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=run.callbacks(Lowtide, model),
    )
    trainer.fit(model, data.to_dataloader(train=True, batch_size=32, num_workers=0))
