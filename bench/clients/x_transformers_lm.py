"""x-transformers: a decoder with rotary positions and dropped layers, in its autoregressive wrapper."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

from client_runs.run import Run

LIBRARY = "x-transformers"
LOOP = "decoder with layer_dropout, wrapper returns the loss"


def train(run: Run) -> None:
    layers = Decoder(dim=64, depth=4, heads=2, rotary_pos_emb=True, layer_dropout=0.1, ff_glu=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model = run.plan(model, torch.randint(0, 256, (4, 65)), optimizer=optimizer)
    for _ in range(run.steps):
        loss = model(torch.randint(0, 256, (4, 65)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
