"""conformer: blocks for speech, trained by CTC on sequences of several lengths."""

import torch
from conformer import Conformer
from torch import nn

from client_runs.run import Run

LIBRARY = "conformer"
LOOP = "Conformer for speech, CTC"


class Recognizer(nn.Module):
    def __init__(self, width: int = 64, letters: int = 29) -> None:
        super().__init__()
        self.inputs = nn.Conv1d(40, width, 3, stride=2, padding=1)
        self.blocks = Conformer(dim=width, depth=2, dim_head=16, heads=4, conv_kernel_size=15)
        self.outputs = nn.Linear(width, letters)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.outputs(self.blocks(self.inputs(sound).transpose(1, 2))).log_softmax(-1)


def train(run: Run) -> None:
    model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = run.plan(model, torch.randn(4, 40, 128), optimizer=optimizer)
    for _ in range(run.steps):
        sound, text = torch.randn(4, 40, 128), torch.randint(1, 29, (4, 12))
        optimizer.zero_grad()
        log_probs = model(sound).transpose(0, 1)
        loss = nn.functional.ctc_loss(log_probs, text, torch.full((4,), 64), torch.randint(6, 13, (4,)))
        loss.backward()
        optimizer.step()
