"""pycox: survival analysis by the Cox model; torchtuples has the loop."""

import numpy
import torchtuples
from pycox.models import CoxPH

from client_runs.run import Run

LIBRARY = "pycox"
LOOP = "DeepSurv, CoxPH.fit"


def train(run: Run) -> None:
    network = torchtuples.practical.MLPVanilla(
        16, [256, 256], 1, batch_norm=True, dropout=0.1, output_bias=False
    )
    model = CoxPH(network, torchtuples.optim.Adam(lr=0.01))
    count = 256 * run.steps
    inputs = numpy.random.randn(count, 16).astype("float32")
    durations = numpy.random.exponential(size=count).astype("float32")
    events = (numpy.random.rand(count) < 0.7).astype("float32")
    run.plan(
        network, (torchtuples.tuplefy(inputs[:256]).to_tensor()[0],), optimizer=model.optimizer.optimizer
    )
    model.fit(inputs, (durations, events), batch_size=256, epochs=1, verbose=False, shuffle=False)
