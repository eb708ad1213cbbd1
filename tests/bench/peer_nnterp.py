"""Run in nnterp's environment: its trace of every block's output against the bare forward, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from nnterp import StandardizedTransformer
from timing import seconds
from transformers import AfmoeForCausalLM, AutoTokenizer

folder, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.set_grad_enabled(False)
bare = AfmoeForCausalLM.from_pretrained(folder)
model = StandardizedTransformer(
    AfmoeForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder), check_renaming=False
)
ids = torch.randint(3, 261, (1, tokens), generator=torch.Generator().manual_seed(0))


def read():
    found = []
    with model.trace(ids):
        for layer in range(5):
            found.append(model.layers_output[layer])


plain, cached = seconds(lambda: bare(ids), read, repeats=61)
print(json.dumps({"plain": plain, "read": cached}))
