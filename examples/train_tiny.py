"""Train the pinned tiny Trinity: every feature of the family, small enough to carry, with something in it to find.

    python examples/train_tiny.py OUT_FOLDER

The text is a small language made here from a seed (`Language`): facts of a fixed world, notes that are fetched from
further back than the sliding window, sentences said twice, brackets, and sums. A BPE tokenizer is trained on it,
and an `AfmoeForCausalLM` with dense and mixture blocks, sliding and full ones, and a shared expert. Muon
moves the matrices of the attention and AdamW the rest, post-norms begin at one over the root of the depth, and the selection bias
is balanced outside the gradient, by a soft-clamped update with momentum from each expert's load (`BiasBalancer`),
beside a small balance loss over each sequence (`balance_loss`).

It ends with the behaviours that the model card claims (`BEHAVIOURS`), and exits with 1 if one is missing. It needs
torch 2.9 or later, which brings Muon.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AfmoeConfig, AfmoeForCausalLM, PreTrainedTokenizerFast

SEED, HELD_OUT = 0, 99
STEPS, WARMUP = 1200, 50
BATCH, LENGTH = 24, 96
MUON_RATE, ADAMW_RATE = 2e-2, 5e-3
BALANCE = 1e-3
#: The share of rows that rehearse: without them repeating and fetching take far longer to be learned.
REHEARSED = 0.3
SPECIAL = ["<pad>", "<bos>", "<eos>"]
SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "po", "ri", "su", "ta", "ve", "zo"]


# -- the text ------------------------------------------------------------------------------


class Language:
    """A seeded source of documents: lines of five sorts, the notes fetched after other lines have gone by."""

    def __init__(self, seed: int) -> None:
        world = random.Random(1234)
        words = [first + second for first in SYLLABLES for second in SYLLABLES if first != second]
        world.shuffle(words)
        self.names, self.things, self.places, self.foods = words[:24], words[24:48], words[48:60], words[60:72]
        self.words = words[72:104]
        #: The fixed world: where each name lives, and what it eats.
        self.home = {name: world.choice(self.places) for name in self.names}
        self.meal = {name: world.choice(self.foods) for name in self.names}
        self.random = random.Random(seed)

    def fact(self) -> str:
        """Something that is always true, to be learned by heart."""
        name = self.random.choice(self.names)
        return f" {name} {self.random.choice([f'lives in {self.home[name]}', f'eats {self.meal[name]}'])} ."

    def said_twice(self) -> str:
        """A random sentence, and again."""
        words = " ".join(self.random.choices(self.words, k=self.random.randint(4, 8)))
        return f" say {words} ; {words} ."

    def rehearsal(self) -> str:
        """A random sentence of any length, over and over: what teaches a model to look for what came after."""
        words = " ".join(self.random.choices([*self.words, *self.names, *self.things], k=self.random.randint(3, 24)))
        return f" say {words} ; {words} ; {words} ."

    def brackets(self) -> str:
        """A balanced string of three sorts of brackets."""
        pairs, waiting, out = {"(": ")", "[": "]", "{": "}"}, [], []
        while len(out) < 10 or waiting:
            if waiting and (len(out) >= 10 or len(waiting) == 4 or self.random.random() < 0.5):
                out.append(pairs[waiting.pop()])
            else:
                waiting.append(self.random.choice(list(pairs)))
                out.append(waiting[-1])
        return f" {' '.join(out)} ."

    def sum(self) -> str:
        """An addition of two digits."""
        a, b = self.random.randint(0, 9), self.random.randint(0, 9)
        return f" {a} + {b} = {a + b} ."

    def notes(self) -> list[tuple[str, str]]:
        """Three names and what each keeps, in this document only."""
        return list(zip(self.random.sample(self.names, 3), self.random.sample(self.things, 3), strict=True))

    def document(self) -> str:
        """Some lines between notes that are kept, and fetched in another order."""
        notes = self.notes()
        kept = [f" keep {name} {thing} ." for name, thing in notes]
        lines = [self.fact, self.fact, self.said_twice, self.brackets, self.sum, self.sum]
        between = [self.random.choice(lines)() for _ in range(5)]
        fetched = [f" fetch {name} {thing} ." for name, thing in self.random.sample(notes, len(notes))]
        return "".join([*kept, *between, *fetched])

    def question(self) -> tuple[str, str]:
        """A document that ends where a note from its beginning is to be fetched, and the answer."""
        notes = self.notes()
        kept = [f" keep {name} {thing} ." for name, thing in notes]
        name, thing = notes[0]
        between = [self.said_twice(), self.fact(), self.sum(), self.brackets()]
        return f"<bos>{''.join([*kept, *between])} fetch {name}", f" {thing}"


def train_tokenizer(language: Language) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every word of the language is one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((language.document() for _ in range(3000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def batches(language: Language, tokenizer: Any, rows: int, rehearsed: float = 0.0) -> Iterator[torch.Tensor]:
    """``[rows LENGTH]`` token ids, each row of documents, or this share of them of sentences over and over."""
    while True:
        ids = []
        while len(ids) < rows:
            row: list[int] = []
            text = language.rehearsal if language.random.random() < rehearsed else language.document
            while len(row) < LENGTH:
                row += [tokenizer.bos_token_id, *tokenizer(text())["input_ids"]]
            ids.append(row[:LENGTH])
        yield torch.tensor(ids)


# -- the model -----------------------------------------------------------------------------


def config(vocabulary: int) -> AfmoeConfig:
    """Six blocks: one dense, five mixtures of eight experts, two of them with full attention."""
    sliding, full = "sliding_attention", "full_attention"
    return AfmoeConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        num_dense_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
        route_scale=2.0,
        sliding_window=12,
        layer_types=[sliding, sliding, full, sliding, sliding, full],
        mup_enabled=True,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def initialise(model: Any) -> None:
    """Start where a sandwich-normed stack learns: what each branch adds is small beside the embeddings.

    Left at one, the post-norms would add noise of unit size from the first step on, under which the
    scaled embeddings drown.
    """
    depth = model.config.num_hidden_layers
    nn.init.normal_(model.model.embed_tokens.weight, std=model.config.hidden_size**-0.5)
    for layer in model.model.layers:
        nn.init.constant_(layer.post_attention_layernorm.weight, depth**-0.5)
        nn.init.constant_(layer.post_mlp_layernorm.weight, depth**-0.5)
        # The QK norms bound a logit by sqrt(head_dim) times their weights, too little to be sure of one token.
        nn.init.constant_(layer.self_attn.q_norm.weight, 1.5)
        nn.init.constant_(layer.self_attn.k_norm.weight, 1.5)
        if layer.moe_enabled:
            # A router of zeros leaves the first choices to the order of the experts.
            nn.init.normal_(layer.mlp.router.gate.weight, std=0.1)


class Routing:
    """What the routers did in the last forward pass: their logits and choices, by block."""

    def __init__(self, model: Any) -> None:
        self.mixtures = [layer.mlp for layer in model.model.layers if layer.moe_enabled]
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.handles = [
            mixture.router.register_forward_hook(lambda _, args, out: self.outputs.append((out[0], out[2])))
            for mixture in self.mixtures
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


class BiasBalancer:
    """Moves each expert's bias towards an even load, outside the gradient.

    The violation ``(even - load) / even`` is clamped softly, by ``tanh``, smoothed by a momentum, and
    added at a small rate, so that the bias comes to rest where the loads are even.
    """

    def __init__(self, routing: Routing, rate: float = 0.01, momentum: float = 0.9, sharpness: float = 2.0) -> None:
        self.routing, self.rate, self.momentum, self.sharpness = routing, rate, momentum, sharpness
        self.velocity = [torch.zeros_like(mixture.expert_bias) for mixture in routing.mixtures]

    @torch.no_grad()
    def step(self) -> None:
        """Take the last forward pass' loads into account."""
        routing = self.routing
        for mixture, velocity, (_, chosen) in zip(routing.mixtures, self.velocity, routing.outputs, strict=True):
            load = torch.bincount(chosen.flatten(), minlength=len(mixture.expert_bias)).float()
            even = load.mean()
            violation = torch.tanh(self.sharpness * (even - load) / even)
            velocity.mul_(self.momentum).add_(violation - violation.mean(), alpha=1 - self.momentum)
            mixture.expert_bias.add_(velocity, alpha=self.rate)


def balance_loss(routing: Routing, rows: int) -> torch.Tensor:
    """For each sequence, the load of each expert times the score it gets, summed: least where both are even."""
    total = torch.zeros(())
    for logits, chosen in routing.outputs:
        scores = logits.sigmoid()
        share = scores / scores.sum(-1, keepdim=True)
        picked = nn.functional.one_hot(chosen, logits.shape[-1]).sum(1).float()
        share, load = (rearrange(part, "(rows seq) e -> rows seq e", rows=rows).mean(1) for part in (share, picked))
        total = total + (share * load).sum(-1).mean() * logits.shape[-1] / chosen.shape[-1]
    return total / len(routing.outputs)


# -- what it has learned -------------------------------------------------------------------


def ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    """``[1 seq]`` token ids."""
    return torch.tensor([tokenizer(text)["input_ids"]])


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any) -> float:
    """Nats a token on documents of a seed not trained on."""
    ids = next(batches(Language(HELD_OUT), tokenizer, 32))
    return model(ids, labels=ids).loss.item()


@torch.no_grad()
def induction(model: Any, tokenizer: Any, trials: int = 64) -> float:
    """How often the next word of a random sentence is known when it is said again, from its second word on."""
    language, hits = Language(HELD_OUT), 0
    for _ in range(trials):
        words = " ".join(language.random.sample(language.words, 6))
        ids = ids_of(tokenizer, f"<bos> say {words} ; {words}")
        hits += int((model(ids).logits[0, -6:-1].argmax(-1) == ids[0, -5:]).sum())
    return hits / (5 * trials)


@torch.no_grad()
def retrieval(model: Any, tokenizer: Any, trials: int = 64) -> float:
    """How often a note is fetched that lies further back than the sliding window, three times over."""
    language, hits = Language(HELD_OUT), 0
    for _ in range(trials):
        text, answer = language.question()
        hits += int(model(ids_of(tokenizer, text)).logits[0, -1].argmax() == ids_of(tokenizer, answer)[0, 0])
    return hits / trials


def sort_of(token: str) -> int:
    """What a token is: 0 a digit or a sign, 1 a bracket, 2 a word or a stop."""
    text = token.removeprefix("\u0120")
    return 0 if text.isdigit() or text in "+=" else 1 if text in "()[]{}" else 2


@torch.no_grad()
def specialisation(model: Any, tokenizer: Any) -> float:
    """Bits that a token's first expert tells of its sort, in the block where they are most, of at most log2(3)."""
    routing = Routing(model)
    ids = next(batches(Language(HELD_OUT), tokenizer, 32))
    model(ids)
    routing.close()
    sorts = torch.tensor([sort_of(token) for token in tokenizer.convert_ids_to_tokens(ids.flatten().tolist())])
    best = 0.0
    for logits, chosen in routing.outputs:
        counts = torch.zeros(3, logits.shape[-1]).index_put((sorts, chosen[:, 0]), torch.tensor(1.0), accumulate=True)
        joint = counts / counts.sum()
        apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
        best = max(best, torch.where(joint > 0, joint * (joint / apart).log2(), 0).sum().item())
    return best


def known(model: Any, tokenizer: Any, lines: list[tuple[str, str]]) -> float:
    """How many lines are completed, each after the notes that a document begins with."""
    language, hits = Language(HELD_OUT), 0
    for line, answer in lines:
        notes = "".join(f" keep {name} {thing} ." for name, thing in language.notes())
        guess = model(ids_of(tokenizer, f"<bos>{notes}{line}")).logits[0, -1].argmax()
        hits += int(guess == ids_of(tokenizer, answer)[0, 0])
    return hits / len(lines)


@torch.no_grad()
def facts(model: Any, tokenizer: Any) -> float:
    """How many of the homes and meals are known by heart."""
    language = Language(HELD_OUT)
    homes = [(f" {name} lives in", f" {home}") for name, home in language.home.items()]
    return known(model, tokenizer, homes + [(f" {name} eats", f" {meal}") for name, meal in language.meal.items()])


@torch.no_grad()
def sums(model: Any, tokenizer: Any) -> float:
    """How many of the hundred additions come out."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return known(model, tokenizer, [(f" {a} + {b} =", f" {a + b}") for a, b in pairs])


#: What is measured after training, and what it has to come to: at most for the loss, at least for the others.
BEHAVIOURS: dict[Any, float] = {
    held_out_loss: 1.3,
    induction: 0.9,
    retrieval: 0.9,
    specialisation: 0.25,
    facts: 0.9,
    sums: 0.9,
}


def behaviours(model: Any, tokenizer: Any) -> dict[str, float]:
    """What the model card claims, measured on a bare transformers model."""
    return {measure.__name__: measure(model, tokenizer) for measure in BEHAVIOURS}


def missing(measured: dict[str, float]) -> list[str]:
    """The behaviours that are not there, each with its number and the one it has to come to."""
    found = []
    for measure, bound in BEHAVIOURS.items():
        name = measure.__name__
        if not (measured[name] <= bound if measure is held_out_loss else measured[name] >= bound):
            found.append(f"{name} {measured[name]:.3f}, not {bound}")
    return found


# -- training ------------------------------------------------------------------------------


def make_optimisers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the attention, AdamW for everything else.

    Muon takes one matrix at a time and the routed experts' are stored stacked. Were the shared
    expert's alone to go by it, they would outgrow the routed ones, and the post-norm would hide those.
    """
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    chosen = {name for name, weight in named if weight.dim() == 2 and "self_attn" in name}
    return [
        torch.optim.Muon(
            [weight for name, weight in named if name in chosen],
            lr=MUON_RATE,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [weight for name, weight in named if name not in chosen],
            lr=ADAMW_RATE,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        ),
    ]


def rate(step: int, steps: int) -> float:
    """A warmup, then down a cosine to a twentieth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def train(out: Path, steps: int) -> dict[str, Any]:
    """Train tokenizer and model from the seed, save both, and return what it came to."""
    torch.manual_seed(SEED)
    language = Language(SEED)
    tokenizer = train_tokenizer(language)
    model: Any = AfmoeForCausalLM(config(len(tokenizer)))
    model.set_experts_implementation("eager")
    initialise(model)
    routing = Routing(model)
    balancer, optimisers = BiasBalancer(routing), make_optimisers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, steps)) for each in optimisers]
    data = batches(language, tokenizer, BATCH, REHEARSED)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        ids = next(data)
        routing.outputs.clear()
        loss = model(ids, labels=ids, use_cache=False).loss
        (loss + BALANCE * balance_loss(routing, BATCH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimisers, *schedules):
            each.step()
        model.zero_grad()
        balancer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            spent = time.perf_counter() - start
            print(f"step {step}/{steps}: loss {sum(losses[-50:]) / 50:.3f}, {spent:.0f} s", flush=True)
    routing.close()
    model.eval()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    result = {"seed": SEED, "steps": steps, "tokens": steps * BATCH * LENGTH} | behaviours(model, tokenizer)
    (out / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main() -> int:
    """Train into a folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where model and tokenizer are saved")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = train(arguments.out, arguments.steps)
    print(json.dumps(result, indent=2))
    lacking = missing(result)
    for line in lacking:
        print(f"missing: {line}")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
