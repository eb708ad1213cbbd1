"""Models that need no checkpoint: small random ones, made in the process, and a trained one that is carried along."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .family import FAMILIES
from .model import StandardizedTransformer

__all__ = ["byte_tokenizer", "pinned", "randomize", "tiny", "tiny_module"]

#: The folder of the trained model.
PINNED = Path(__file__).parent / "pinned"

SPECIAL = ["<pad>", "<bos>", "<eos>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte: pad, bos and eos, then the 256 bytes; it knows every string."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def randomize(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter random values, none of them zero, and return the module.

    A fresh model has unit norms and zero router weights and bias, which hides faults: a norm
    forgotten, a bias added where it should only choose. Matrices keep the scale of their fan-in,
    norms lie around one, everything else within a half of zero.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            noise = noise * parameter.shape[-1] ** -0.5
        elif "norm" in name:
            noise = 1 + 0.3 * noise
        else:
            noise = 0.5 * torch.rand(parameter.shape, generator=generator) - 0.25
        with torch.no_grad():
            parameter.copy_(noise)
    return module


def tiny_module(model_type: str = "afmoe", *, seed: int = 0, **fields: Any) -> Any:
    """The bare transformers model of `tiny`."""
    family = FAMILIES[model_type]
    with torch.random.fork_rng(devices=[]):
        module = family.architecture(family.tiny(**fields))
    return randomize(module, seed).eval()


def tiny(
    folder: str | os.PathLike | None = None, *, model_type: str = "afmoe", seed: int = 0, **fields: Any
) -> StandardizedTransformer:
    """A small random model of a family, with nothing left at zero and a byte-level tokenizer.

    Args:
        folder: Save model and tokenizer here, to be loaded like any checkpoint.
        model_type: The family's.
        seed: Of the weights; the global random state is left alone.
        **fields: Config fields to override, ``num_hidden_layers=3``, ``num_experts=5``, ...
            ``attn_implementation`` and ``experts_implementation`` are fields too.

    Returns:
        The model, dispatched, float32, on the CPU.
    """
    module = tiny_module(model_type, seed=seed, **fields)
    tokenizer = byte_tokenizer()
    if folder is not None:
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return StandardizedTransformer(module, tokenizer=tokenizer)


def pinned(**kwargs: Any) -> StandardizedTransformer:
    """The tiny Trinity that was trained: a model in which there is something to find.

    Six blocks and 1.2 million parameters, trained by ``examples/train_tiny.py`` on a small language of
    its own. It repeats what was said, fetches notes from beyond its sliding window, knows facts by heart, and its
    experts have specialised; the README.md in its folder is its model card.

    Args:
        **kwargs: Everything `StandardizedTransformer` takes, ``attn_implementation="eager"`` for one.

    Returns:
        The model, loaded from its folder as any checkpoint is, dispatched.
    """
    return StandardizedTransformer(PINNED, **{"dispatch": True, **kwargs})
