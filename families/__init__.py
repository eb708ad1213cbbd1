"""The model families this package knows, one module each; importing one registers it."""

from __future__ import annotations

from nnterp_afmoe.families.afmoe import AFMOE, Attention, Block, Dense, Mixture, SharedExpert

__all__ = ["AFMOE", "Attention", "Block", "Dense", "Mixture", "SharedExpert"]
