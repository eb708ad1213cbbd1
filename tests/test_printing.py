"""The printed tree, line for line, and what tools see."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
from pathlib import Path

import pytest

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.families import Attention, Block, Mixture
from nnterp_afmoe.layouts import LAYOUTS, Keys
from nnterp_afmoe.testing import byte_tokenizer
from nnterp_afmoe.values import Value

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    (folder / "config.json").write_text((DATA / "trinity_nano" / "config.json").read_text())
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def nano(folder):
    return StandardizedTransformer(folder)


def test_the_nano_tree_line_for_line(nano):
    want = (DATA / "printout_nano.txt").read_text().splitlines()
    got = repr(nano).splitlines()
    assert len(got) == len(want)
    for line, expected in zip(got, want, strict=True):
        if expected.endswith(":"):
            assert re.fullmatch(re.escape(expected) + " [^ ].*[^. ]", line), line
        else:
            assert line == expected


def test_nothing_was_loaded(nano):
    assert not nano.dispatched
    assert all(parameter.is_meta for parameter in nano._module.parameters())


def test_sizes(nano):
    names = "num_layers hidden_size num_heads num_kv_heads head_dim qk_head_dim vocab_size intermediate_size"
    assert [getattr(nano, name) for name in names.split()] == [56, 1024, 8, 2, 128, 128, 200192, 3072]
    assert (nano.layers[2].mlp.num_experts, nano.layers[2].mlp.top_k) == (128, 8)
    assert (nano.num_experts, nano.top_k) == (128, 8)
    assert nano.layers[2].mlp.shared_experts._axis("intermediate_size") == 256


def test_a_layout_is_an_object():
    assert Attention.attention_keys.layout is Keys
    assert Attention.attention_keys.layout.dims == ("batch", "num_kv_heads", "seq", "qk_head_dim")
    assert str(Keys) == "Keys [batch num_kv_heads seq qk_head_dim]"
    assert LAYOUTS["Keys"] is Keys


def test_completion_lists_the_values_without_reading(nano):
    assert {"layer_mid", "layer_output", "self_attn", "mlp"} <= set(dir(nano.layers[0]))
    assert "attention_queries" in dir(nano.layers[0].self_attn)
    assert "router_logits" in dir(nano.layers[2].mlp)
    assert "router_logits" not in dir(nano.layers[0].mlp)
    assert isinstance(nano.layers[0], Block)
    assert isinstance(nano.layers[2].mlp, Mixture)


def test_help_reads_well(nano):
    text = pydoc.plain(pydoc.render_doc(nano.layers[0].self_attn))
    assert "class Attention" in text
    assert "Keys [batch num_kv_heads seq qk_head_dim]: likewise, one set a KV head" in text
    assert "attention_premix" in text


def test_every_value_is_documented(nano):
    for host in (*nano.family.hosts, type(nano)):
        assert inspect.getdoc(host)
        for name, value in host.values().items():
            assert isinstance(value, Value)
            assert value.name == name
            assert value.description
            assert "\n" not in value.description
            assert inspect.getdoc(value)


def test_native_paths_still_work(nano):
    assert nano.model.layers[2].mlp.router.gate.path == "model.model.layers.2.mlp.router.gate"
    assert nano.layers is nano.model.layers
    assert nano.model.rotary_emb is not None
    assert json.loads((DATA / "trinity_nano" / "config.json").read_text())["num_hidden_layers"] == len(nano.layers)
