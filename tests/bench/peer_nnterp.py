"""Run in nnterp's environment: its trace of every block's output against the bare forward, as JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

import torch
from nnterp import StandardizedTransformer
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


times = [[], []]
functions = (lambda: bare(ids), read)
for function in functions:
    function()
gc.collect()
gc.disable()
for _ in range(61):
    for function, taken in zip(functions, times, strict=True):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
plain, cached = (statistics.quantiles(taken, n=4)[0] for taken in times)
print(json.dumps({"plain": plain, "read": cached}))
