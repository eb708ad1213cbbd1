"""What a model family declares, and the one place where families are registered.

A family says what is true of an architecture and nothing of how tracing works: which config
it is for, which envoy classes (each a table of values) sit where in a block, how long each
named axis is, and what tells one kind of block from another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from .hosts import Host
    from .schematic import Schematic

__all__ = ["FAMILIES", "Case", "Family", "family_of", "register"]


@dataclass(frozen=True)
class Case:
    """Everything that decides whether a value exists: a block, and the implementations.

    Attributes:
        config: The model's config as it is now.
        layer: The block's index.
        attn_implementation: As transformers names it, ``"eager"``, ``"sdpa"``, ...
        experts_implementation: As transformers names it, ``"grouped_mm"``, ``"eager"``, ...
    """

    config: Any
    layer: int
    attn_implementation: str
    experts_implementation: str


@dataclass(frozen=True)
class Family:
    """One architecture, declared.

    Attributes:
        name: The family's name in print.
        model_type: The ``model_type`` of its configs.
        architecture: The transformers class it wraps.
        config: That class's config class.
        hosts: The envoy classes that carry values, in the order they are listed. Several
            may share one place in the block (``at``): a dense and a mixture MLP.
        present: Which host of ``hosts`` sits at ``at`` on a block, or ``None``.
        envoys: nnsight's map from module class or path to envoy class.
        rename: nnsight's map from native path to the standard name at the root.
        block_call: Where the root's forward calls a block.
        axes: A named axis' length, from the config.
        traits: What kind of block this is, e.g. ``("mixture", "sliding")``, from config and index.
        every_kind: Every kind of block that ``traits`` can name, in the order they are marked in print.
        callees: Functions that a forward looks up while it runs, by their name in it.
        attn_implementations: The attention implementations to list.
        experts_implementations: The experts implementations to list.
        scan_experts: The experts implementation under which shapes alone propagate.
        float32: Endings of the parameters that stay in float32 in any dtype.
        check: Raises `ConfigError` on a config (as a plain dict) that contradicts itself.
        equations: The family's equations over a model and its config (`reference.Pass`).
        tiny: A small config with every feature, fields overridable.
        schematic: How it is drawn and told, for its page; ``None`` for a family without one.
    """

    name: str
    model_type: str
    architecture: type[nn.Module]
    config: type[PreTrainedConfig]
    hosts: tuple[type[Host], ...]
    present: Callable[[Any, int, str], type[Host] | None]
    envoys: Mapping[type | str, type]
    rename: Mapping[str, str]
    block_call: str
    axes: Mapping[str, Callable[[Any], int]]
    traits: Callable[[Any, int], tuple[str, ...]]
    every_kind: tuple[tuple[str, ...], ...]
    callees: Mapping[str, Callable[[Case], Callable]]
    attn_implementations: Callable[[], list[str]]
    experts_implementations: Callable[[], list[str]]
    scan_experts: str
    float32: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], None]
    equations: Callable[..., Any]
    tiny: Callable[..., PreTrainedConfig]
    schematic: Schematic | None = None

    def case(
        self, config: Any, layer: int, attn_implementation: str | None = None, experts_implementation: str | None = None
    ) -> Case:
        """The case of block ``layer`` under the config's implementations, or the ones asked about."""
        return Case(
            config,
            layer,
            attn_implementation or config._attn_implementation,
            experts_implementation or config._experts_implementation,
        )

    def kinds(self, config: Any) -> dict[tuple[str, ...], list[int]]:
        """The kinds of block this config has, each with its layers."""
        kinds: dict[tuple[str, ...], list[int]] = {}
        for layer in range(config.num_hidden_layers):
            kinds.setdefault(self.traits(config, layer), []).append(layer)
        return kinds


#: The registered families by model type.
FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family; raises `ValueError` if its model type is taken."""
    if family.model_type in FAMILIES:
        raise ValueError(f"a family for model type {family.model_type!r} is registered already")
    for host in family.hosts:
        host.family = family
    FAMILIES[family.model_type] = family
    return family


def family_of(model_type: str | None) -> Family | None:
    """The family for this model type, or ``None``."""
    return FAMILIES.get(model_type or "")


def check_layer_types(config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless ``layer_types`` (where given) names one known type a layer."""
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types is None or layers is None:
        return
    if len(types) != layers:
        raise ConfigError(
            f"the config lists {len(types)} layer_types for num_hidden_layers={layers}; "
            f"give one of {', '.join(known)} for every layer"
        )
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ConfigError(f"the config's layer_types has {', '.join(unknown)}; this family knows {', '.join(known)}")
