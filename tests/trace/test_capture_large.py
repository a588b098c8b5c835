"""A step far larger than the machine is captured, profiled and planned in a small process."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json
import torch
from torch import nn
import lowtide

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        self.embed, self.head = nn.Embedding(64, 256), nn.Linear(256, 64)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return nn.functional.cross_entropy(self.head(self.layers(self.embed(x))).flatten(0, 1), x.flatten())

torch.set_num_threads(1)
model, batch = Model(), torch.randint(0, 64, (4096, 512))
profile = lowtide.profile(
    model, batch, optimizer=torch.optim.AdamW(model.parameters()), memory_limit="8MiB", cache=False
)
plan = profile.plan((profile.floor_bytes + profile.peak_bytes) // 2)
high_water = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
resident = int(high_water.split()[1]) * 1024
print(json.dumps([profile.peak_bytes, plan.peak_bytes, plan.budget_bytes, plan.overhead, resident]))
"""


@pytest.mark.long
def test_a_step_of_more_than_100_gib_is_planned_within_2_gib() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, planned, budget, overhead, resident = json.loads(done.stdout)
    assert peak > 100 << 30
    assert planned <= budget < peak
    assert 0 < overhead < 1
    assert resident < 2 << 30
