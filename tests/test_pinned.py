"""The trained model that is carried along: what its card claims, and the command that trains it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AfmoeForCausalLM

from nnterp_afmoe.testing import PINNED, pinned

ROOT = Path(__file__).parent.parent


def script():
    spec = importlib.util.spec_from_file_location("train_tiny", ROOT / "examples" / "train_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_tiny = script()
TRAINED = json.loads((PINNED / "training.json").read_text())
CARD = (PINNED / "README.md").read_text()


@pytest.fixture(scope="module")
def model():
    return pinned(attn_implementation="eager")


@pytest.mark.parametrize("measure", train_tiny.BEHAVIOURS, ids=lambda measure: measure.__name__)
def test_a_behaviour(model, measure):
    measured = measure(model._module, model.tokenizer)
    bound = train_tiny.BEHAVIOURS[measure]
    assert measured <= bound if measure is train_tiny.held_out_loss else measured >= bound
    assert measured == pytest.approx(TRAINED[measure.__name__], abs=0.02)
    (claimed,) = re.findall(rf"^\| `{measure.__name__}` \|.*\| ([\d.]+) \| ([\d.]+) \|$", CARD, re.MULTILINE)
    assert float(claimed[0]) == pytest.approx(measured, abs=0.02)
    assert float(claimed[1]) == bound


def test_a_model_that_learned_nothing_lacks_them_all(model):
    torch.manual_seed(0)
    fresh = AfmoeForCausalLM(train_tiny.config(len(model.tokenizer))).eval()
    train_tiny.initialise(fresh)
    lacking = train_tiny.missing(train_tiny.behaviours(fresh, model.tokenizer))
    assert [line.split()[0] for line in lacking] == [measure.__name__ for measure in train_tiny.BEHAVIOURS]


def test_what_is_asked_of_retrieval_lies_beyond_the_window(model):
    language = train_tiny.Language(7)
    for _ in range(32):
        text, answer = language.question()
        ids = train_tiny.ids_of(model.tokenizer, text)[0]
        (note,) = (ids == train_tiny.ids_of(model.tokenizer, answer)[0, 0]).nonzero().flatten().tolist()
        assert len(ids) - note >= 3 * model.config.sliding_window


def test_every_word_is_one_token(model):
    language = train_tiny.Language(0)
    for word in [*language.names, *language.things, *language.home.values(), *language.words, "keep", "fetch", "say"]:
        assert len(model.tokenizer(f" {word}")["input_ids"]) == 1


def test_it_has_every_feature(model):
    kinds = model.family.kinds(model.config)
    assert set(kinds) == {("dense", "sliding"), ("mixture", "sliding"), ("mixture", "full")}
    assert model.config.mup_enabled
    assert all(layer.mlp.expert_bias.count_nonzero() for layer in model._module.model.layers if layer.moe_enabled)


def test_it_is_small():
    assert sum(file.stat().st_size for file in PINNED.rglob("*")) < 8_000_000


def test_it_holds(model):
    report = model.check(progress=False)
    assert report.ok, report.failures


def test_a_fact_at_the_very_beginning_is_known_half_of_the_time(model):
    """What the card says it can't do."""
    homes = train_tiny.Language(0).home.items()
    ids = [train_tiny.ids_of(model.tokenizer, f"<bos> {name} lives in {home}")[0] for name, home in homes]
    hits = [model._module(row[None, :-1]).logits[0, -1].argmax() == row[-1] for row in ids]
    assert 0.3 < sum(map(int, hits)) / len(hits) < 0.7


def test_the_card_names_the_seed_and_the_tokens():
    assert (TRAINED["seed"], TRAINED["steps"]) == (train_tiny.SEED, train_tiny.STEPS)
    assert f"seed {TRAINED['seed']}" in CARD
    assert f"{TRAINED['steps']} steps" in CARD
    assert f"{TRAINED['tokens'] / 1e6:.1f} million tokens" in CARD


def test_the_balancer_evens_the_load(model):
    """The bias rises where too few tokens go, and stays where the load is even."""

    class Mixture:
        expert_bias = torch.zeros(4)

    class Routing:
        mixtures = (Mixture,)
        outputs = ((torch.zeros(6, 4), torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1], [0, 2], [0, 1]])),)

    balancer = train_tiny.BiasBalancer(Routing())
    balancer.step()
    zero, one, two, three = Mixture.expert_bias.tolist()
    assert zero < one < two < three
    assert sum([zero, one, two, three]) == pytest.approx(0, abs=1e-6)
    assert balancer.velocity[0].abs().max() < 0.11  # a tenth of a violation that tanh bounds by one


def test_the_training_command(tmp_path, capsys, monkeypatch):
    """Three steps of it: a folder that loads, a bias that has moved, and an exit code that says it is not trained."""
    monkeypatch.setattr("sys.argv", ["train_tiny.py", str(tmp_path), "--steps", "3"])
    assert train_tiny.main() == 1
    assert "missing: induction" in capsys.readouterr().out
    trained = AfmoeForCausalLM.from_pretrained(tmp_path)
    assert all(layer.mlp.expert_bias.count_nonzero() for layer in trained.model.layers if layer.moe_enabled)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in PINNED.iterdir()} - {"README.md"}
