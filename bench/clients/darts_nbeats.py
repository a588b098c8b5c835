"""darts: N-BEATS by its own `fit`, which makes the module and a Trainer of pytorch_lightning inside."""

import numpy
from darts import TimeSeries
from darts.models import NBEATSModel

from client_runs.run import Run
from lowtide.integrations.lightning import Lowtide

LIBRARY = "u8darts"
LOOP = "N-BEATS forecasts, fit"


def train(run: Run) -> None:
    length = 24 + 6 - 1 + 64 * run.steps
    series = TimeSeries.from_values(numpy.random.randn(length).cumsum().astype("float32"))
    trainer = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": run.callbacks(Lowtide),
    }
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=6,
        num_stacks=4,
        layer_widths=128,
        batch_size=64,
        n_epochs=1,
        random_state=7,
        pl_trainer_kwargs=trainer,
    )
    model.fit(series)
    run.models.append(model.model)
