"""Small language models whose heads and losses differ in all the ways that users have them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH = 512, 32
IGNORED = 3


class LanguageModel(nn.Module):
    """An embedding, a layer and a head. `kind` says how the loss reads the logits; `loss` are options of
    `cross_entropy`."""

    def __init__(
        self,
        kind: str = "plain",
        *,
        bias: bool = False,
        tied: bool = False,
        classes: int = CLASSES,
        **loss: Any,
    ) -> None:
        super().__init__()
        self.kind, self.loss = kind, loss
        self.tokens = nn.Embedding(classes, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("shares", torch.rand(classes) + 0.5)

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.drop(torch.tanh(self.layer(self.tokens(ids)))))
        losses = {
            "shifted": lambda: self._loss(logits[..., :-1, :].contiguous(), ids[..., 1:]),
            "float": lambda: self._loss(logits.float(), ids),
            "weighted": lambda: self._loss(logits, ids, weight=self.shares),
            "picked": lambda: -F.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1).mean(),
            "picked_shifted": lambda: -self._picked(logits[:, :-1], ids[:, 1:]).sum(-1).mean(),
            "twice": lambda: self._loss(logits, ids) + logits.square().mean(),
            "classes_second": lambda: F.cross_entropy(logits.transpose(1, 2), ids),
            "returned": lambda: {"loss": self._loss(logits, ids), "logits": logits},
            "logits": lambda: logits,
        }
        return losses.get(self.kind, lambda: self._loss(logits, ids))()

    def _loss(self, logits: Tensor, ids: Tensor, **more: Any) -> Tensor:
        found = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), **self.loss, **more)
        return found.mean()

    @staticmethod
    def _picked(logits: Tensor, ids: Tensor) -> Tensor:
        return F.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def tokens(batch: int = 4, length: int = 40, classes: int = CLASSES) -> Tensor:
    ids = torch.randint(0, classes, (batch, length))
    ids[0, :5] = IGNORED
    return ids
