"""Run in TransformerLens' environment: its cache of every block's output against the bare forward, as JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AfmoeForCausalLM, AutoTokenizer

folder, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.set_grad_enabled(False)
bare = AfmoeForCausalLM.from_pretrained(folder)
bridge = TransformerBridge.boot_transformers(
    folder, hf_model=AfmoeForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder)
)
ids = torch.randint(3, 261, (1, tokens), generator=torch.Generator().manual_seed(0))


def read():
    _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_out") and name.count(".") == 2)
    assert sum(name.startswith("blocks.") for name in cache) == 5, list(cache)


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
