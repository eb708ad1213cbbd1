"""The pytest plugin: the options of the identity checks, inert unless ``--afmoe-model`` is given.

    pytest --pyargs nnterp_afmoe.suite --afmoe-model NAME_OR_FOLDER

Nothing of the package is imported before the option is used.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--afmoe-model`` and how to load it."""
    group = parser.getgroup("nnterp_afmoe", "identity checks of AFMoE models")
    group.addoption("--afmoe-model", metavar="NAME_OR_FOLDER", help="the model that nnterp_afmoe.suite checks")
    group.addoption("--afmoe-attn", metavar="NAME", help="load it with this attention implementation")
    group.addoption("--afmoe-experts", metavar="NAME", help="load it with this experts implementation")
    group.addoption("--afmoe-dtype", metavar="NAME", help="load it in this dtype: float32, bfloat16, float16")
    group.addoption("--afmoe-layers", metavar="LIST", help="check these blocks only, e.g. 0,2,-1 or 0-3")
    group.addoption("--afmoe-prompt", metavar="TEXT", help="the text to run")
