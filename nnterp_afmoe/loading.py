"""Finding the family of what is being loaded, and refusing what can't be loaded, before anything is built."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import textwrap
from typing import Any

import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.processing import PROCESSOR_KEYS, ROW_FIELDS
from nnsight.modeling.transformers import TransformersModel
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TextGenerationPipeline,
    pipeline,
)
from transformers.utils.generic import TransformersKwargs

from .errors import LoadError, UnsupportedModel, near
from .family import FAMILIES, Family, family_of

__all__ = ["family_for", "refuse_unknown", "refuse_unknown_call", "tokenizer_for"]

#: Keywords that say where files are found and how they are fetched.
FINDING = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")

#: Keywords of `TransformersModel` that mean something beside a model that is loaded already.
WITH_A_MODEL = ("task", "tokenizer", "peft", "dispatch")


def family_for(source: Any, **kwargs: Any) -> Family:
    """The family of a model in hand, or of the config found at a name or folder.

    Raises:
        UnsupportedModel: no registered family has its model type.
        ConfigError: the config contradicts itself.
        LoadError: no config there.
    """
    if isinstance(source, torch.nn.Module):
        config = getattr(source, "config", None)
        fields = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
        family = family_of(fields.get("model_type"))
        if family is None or not isinstance(source, family.architecture):
            raise unsupported(type(source).__name__, fields.get("model_type"))
    else:
        config = kwargs.get("config")
        fields = config.to_dict() if isinstance(config, PreTrainedConfig) else config_fields(source, **kwargs)
        family = family_of(fields.get("model_type"))
        if family is None:
            raise unsupported(repr(source), fields.get("model_type"))
    family.check({**fields, **{name: kwargs[name] for name in ("layer_types", "num_hidden_layers") if name in kwargs}})
    return family


def config_fields(source: Any, **kwargs: Any) -> dict[str, Any]:
    """The fields of the config at a hub name or folder, as they are written there."""
    if not isinstance(source, (str, os.PathLike)):
        raise LoadError(
            f"a model is loaded from a hub name, a folder or a module in hand, not a {type(source).__name__}"
        )
    if os.path.isdir(source) and not os.path.isfile(os.path.join(source, "config.json")):
        raise LoadError(f"the folder {os.fspath(source)!r} has no config.json; a checkpoint's folder has one")
    if not os.path.isdir(source) and (os.path.isabs(source) or os.fspath(source).startswith((".", "~"))):
        raise LoadError(f"there is no folder {os.fspath(source)!r}")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(source, **finding(kwargs))
    except (OSError, ValueError) as error:
        raise LoadError(f"no config found for {os.fspath(source)!r}: {error}") from error
    return fields


def finding(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in FINDING if kwargs.get(name) is not None}


def tokenizer_for(source: str, **kwargs: Any) -> Any:
    """The tokenizer at a hub name or folder; raises `LoadError` where there is none."""
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=kwargs.get("trust_remote_code", False), **finding(kwargs)
        )
    except (OSError, ValueError) as error:
        raise LoadError(f"no tokenizer found for {source!r}: pass one as tokenizer=... ({error})") from error


def unsupported(what: str, model_type: str | None) -> UnsupportedModel:
    supported = ", ".join(f"{name} ({family.architecture.__name__})" for name, family in sorted(FAMILIES.items()))
    found = f"of model type {model_type!r}" if model_type else "of no model type"
    return UnsupportedModel(f"{what} is {found}; supported: {supported}")


def refuse_unknown(source: Any, family: Family, kwargs: dict[str, Any]) -> None:
    """Raise `LoadError` for a keyword that nothing would take, or that would be ignored."""
    if isinstance(source, torch.nn.Module):
        ignored = sorted(set(kwargs) - set(WITH_A_MODEL))
        if ignored:
            raise LoadError(
                f"{', '.join(f'{name}=' for name in ignored)} can't apply to a model that is loaded already; "
                f"beside it: {', '.join(WITH_A_MODEL)}. An implementation is switched with "
                f"model.set_attn_implementation(...) or model.set_experts_implementation(...)"
            )
        return
    known = known_keywords() | set(inspect.signature(family.config).parameters)
    for name in kwargs:
        if name not in known:
            raise LoadError(
                f"unknown keyword {name!r}: neither from_pretrained, the config nor nnsight takes it{near(name, known)}"
            )


@functools.cache
def known_keywords() -> frozenset[str]:
    """What loading takes: nnsight's model class, the pipeline, the config and `from_pretrained`.

    `from_pretrained` pops most of its keywords from ``**kwargs``; those are read off its source.
    """
    known: set[str] = {"dispatch", "tp_plan", "attn_implementation", "experts_implementation", "dtype", "torch_dtype"}
    for function in (TransformersModel.__init__, pipeline, PreTrainedModel.from_pretrained, AutoConfig.from_pretrained):
        known |= set(inspect.signature(function).parameters)
    tree = ast.parse(textwrap.dedent(inspect.getsource(PreTrainedModel.from_pretrained)))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "kwargs.pop"
            and isinstance(node.args[0], ast.Constant)
        ):
            known.add(str(node.args[0].value))
    known |= {"low_cpu_mem_usage", *inspect.signature(PreTrainedConfig).parameters}
    # What belongs to the envoy tree is the family's to say.
    return frozenset(known - set(inspect.signature(Envoy.__init__).parameters) - {"self", "args", "kwargs"})


def refuse_unknown_call(architecture: type[torch.nn.Module], kwargs: dict[str, Any], generating: bool) -> None:
    """Raise `TypeError` for a keyword of a trace or a generation that nothing would take."""
    known = known_call_keywords(architecture, generating)
    for name in kwargs:
        if name not in known:
            what = "generate" if generating else "the model's forward"
            raise TypeError(f"unknown keyword {name!r}: {what} does not take it{near(name, known)}")


@functools.cache
def known_call_keywords(architecture: type[Any], generating: bool) -> frozenset[str]:
    """What a forward takes, how text is prepared for it, and for a generation all of its settings."""
    # `return_dict` is taken off by the decorator of the forward.
    known = {"return_dict", *ROW_FIELDS, *PROCESSOR_KEYS, *TransformersKwargs.__annotations__}
    functions = [architecture.forward, TextGenerationPipeline._sanitize_parameters, TextGenerationPipeline.preprocess]
    if generating:
        functions.append(architecture.generate)
        known |= set(GenerationConfig().to_dict()) | {"inputs"}
    for function in functions:
        known |= set(inspect.signature(function).parameters)
    return frozenset(known - {"self", "args", "kwargs", "generate_kwargs"})
