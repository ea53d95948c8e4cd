"""Compares imported weights with `TransfoXLModel` of transformers 4.35, the last release with the model in its core.

    python -m venv PEERS && PEERS/bin/pip install torch transformers==4.35.2   (and what this project needs)
    PEERS/bin/python -m tests.peers.transfo_xl

Small models with random weights, saved as that library saves them, read as `python -m recipes import` does: hidden
vectors over five segments and the NLL of an adaptive softmax, in fp32, with clamp_len and same_length on and off, in
both file formats. Prints the largest differences; fails if one is above 1e-6 of hidden vectors, which are about 1.
"""

import itertools
import tempfile
from pathlib import Path

import torch
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

from recipes.published import read_published
from waveform.models.registry import build

SIZES = {"vocab_size": 50, "cutoffs": [8, 20, 35], "d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8}
SHAPE = {**SIZES, "d_inner": 24, "n_layer": 3, "mem_len": 7}
WINDOW, NUM_SEGMENTS, NUM_ROWS = 5, 5, 3


def compare(options: dict[str, int], *, safe: bool) -> tuple[float, float]:
    """Largest differences of hidden vectors and of NLL."""
    torch.manual_seed(0)
    peer = TransfoXLLMHeadModel(TransfoXLConfig(**SHAPE, **options, dropout=0.1, dropatt=0.1)).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(50, (NUM_ROWS, WINDOW * NUM_SEGMENTS + 1))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        peer.save_pretrained(folder, safe_serialization=safe)
        published = read_published(Path(folder), first_input=0)
        ours = build("transformer_xl", vocab_size=published.vocab_size, **{**published.fields, "window": WINDOW})
        ours.load_state_dict(published.weights)
        ours.eval()
        state, mems = ours.init_state(NUM_ROWS, device="cpu", dtype=torch.float32), None
        hidden_difference = nll_difference = 0.0
        for i in range(NUM_SEGMENTS):
            inputs = tokens[:, i * WINDOW : (i + 1) * WINDOW]
            targets = tokens[:, i * WINDOW + 1 : (i + 1) * WINDOW + 1]
            theirs = peer.transformer(inputs, mems=mems)
            hidden, state, _ = ours(inputs, state)
            log_p = peer.crit(theirs.last_hidden_state, None).view(NUM_ROWS, WINDOW, -1)
            their_nll = -log_p.gather(-1, targets[..., None])[..., 0]
            mems = theirs.mems
            hidden_difference = max(hidden_difference, float((hidden - theirs.last_hidden_state).abs().max()))
            nll_difference = max(nll_difference, float((ours.head.nll(hidden, targets) - their_nll).abs().max()))
    return hidden_difference, nll_difference


if __name__ == "__main__":
    choices = itertools.product((-1, 4, 9), (False, True), (1, 2), (False, True), (False, True))
    for *values, safe in choices:
        options = dict(zip(("clamp_len", "same_length", "div_val", "untie_r"), values, strict=True))
        hidden, nll = compare(options, safe=safe)
        print(f"{options} {'safetensors' if safe else 'torch'}: hidden {hidden:.1e}, NLL {nll:.1e}")
        assert hidden < 1e-6
