"""What `support` says, against what happens."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import ATTENTION, CONFIGS, EXPERTS
from helpers import read

from nnterp_afmoe import StandardizedTransformer, Unavailable
from nnterp_afmoe.support import ranges
from nnterp_afmoe.testing import tiny


def tries(model, ids, layer, name):
    """Whether one read of the value works, or the reason it gives."""
    try:
        with torch.no_grad(), model.trace(ids):
            read(model, (layer, name))
    except Unavailable as error:
        return str(error)
    return None


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("attention", [*ATTENTION, "flex_attention"])
@pytest.mark.parametrize("name", ["irregular", "all dense"])
def test_cell_by_cell(build, ids, name, attention, experts):
    model = build(name, attention, experts)
    support = model.support()
    for value, missing in support.items():
        for layer in range(model.num_layers):
            reason = (missing or {}).get(layer)
            assert model.support(layer=layer)[value] == reason
            happened = tries(model, ids, layer, value)
            if reason is None:
                assert happened is None, (value, layer, happened)
            else:
                assert happened is not None, (value, layer)
                assert reason in happened


def test_a_mapping(build):
    model = build("irregular", "sdpa")
    support = model.support()
    assert support["layer_output"] is None
    assert set(support["self_attn.attention_scores"]) == {0, 1, 2, 3, 4}
    assert set(support["mlp.router_logits"]) == {0, 1}
    assert set(support["mlp.mlp_neurons"]) == {2, 3, 4}
    assert set(support["mlp.shared_experts.mlp_neurons"]) == {0, 1}
    assert set(support["mlp.shared_experts.mlp_output"]) == {0, 1, 2, 3, 4}
    assert len(list(support)) == len(support)
    with pytest.raises(KeyError, match="'layer_outptu' is not a value of this family; near names: layer_output"):
        support["layer_outptu"]


def test_it_follows_the_config_as_it_is_now(build):
    model = build("irregular", "sdpa")
    assert model.support()["self_attn.attention_scores"] is not None
    model.set_attn_implementation("eager")
    assert model.support()["self_attn.attention_scores"] is None


def test_what_if(build):
    model = build("irregular", "sdpa", "grouped_mm")
    assert model.support(attn_implementation="eager")["self_attn.attention_scores"] is None
    assert model.support(layer=-1, attn_implementation="eager")["self_attn.attention_scores"] is None
    assert model.support(experts_implementation="deepgemm")["mlp.expert_outputs"][3].startswith("deepgemm experts sum")
    assert model.support(attn_implementation="flash_attention_2")["self_attn.attention_queries"] is None
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"attn_implementation='eagre' is not known here.*near names: eager"):
        model.support(attn_implementation="eagre")


def test_every_host_has_its_own(build):
    model = build("irregular", "sdpa")
    block = model.layers[3]
    assert block.support() == model.support(layer=3)
    assert set(block.self_attn.support()) == {name for name in dir(block.self_attn) if name.startswith("attention_")}
    assert block.mlp.shared_experts.support()["mlp_neurons"] is None
    assert block.mlp.support()["shared_experts.mlp_neurons"] is None
    assert "sdpa" in block.self_attn.support()["attention_scores"]
    assert block.self_attn.support(attn_implementation="eager")["attention_scores"] is None
    with pytest.raises(IndexError):
        model.support(layer=5)


def test_printed(build):
    text = str(build("irregular", "sdpa", "grouped_mm").support())
    for words in (
        "dense, sliding",
        "dense, full",
        "mixture, sliding",
        "mixture, full",
        "2-3",
        "sdpa *",
        "grouped_mm *",
        "flex_attention",
        "batched_mm",
        "self_attn.attention_scores",
        "no [1]",
        "a dense block has no router",
    ):
        assert words in text
    eager = str(build("irregular", "eager", "eager").support())
    assert "mlp.expert_outputs (+)" in eager
    assert "recomputed" in eager


def test_from_the_config_alone(tmp_path):
    tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = StandardizedTransformer(str(tmp_path))
    assert not model.dispatched
    assert model.support()["layer_output"] is None
    model.set_attn_implementation("eager")
    assert model.support()["self_attn.attention_scores"] is None
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "afmoe"


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_cover_every_layer_once(build, name):
    model = build(name)
    kinds = model.family.kinds(model.config)
    assert sorted(layer for layers in kinds.values() for layer in layers) == list(range(model.num_layers))


def test_ranges():
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert ranges([]) == ""
