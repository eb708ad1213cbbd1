"""Every check of a model as a test of its own, for anyone's CI.

    pytest --pyargs nnterp_afmoe.suite --afmoe-model NAME_OR_FOLDER

Which tests there are follows from the config; the model runs once, when the first of them does.
"""

from __future__ import annotations

from typing import Any

import pytest

from .check import Check, Report, plan
from .cli import layers
from .model import StandardizedTransformer

__all__ = ["test_it_holds", "test_nothing_else_fails"]

NO_MODEL = "no model to check: pass --afmoe-model NAME_OR_FOLDER"
MODEL = pytest.StashKey[StandardizedTransformer]()


def model_of(config: pytest.Config) -> StandardizedTransformer:
    """The model of this session, undispatched until it is checked."""
    if MODEL not in config.stash:
        options: dict[str, Any] = {
            "attn_implementation": config.getoption("--afmoe-attn"),
            "experts_implementation": config.getoption("--afmoe-experts"),
            "dtype": config.getoption("--afmoe-dtype"),
        }
        config.stash[MODEL] = StandardizedTransformer(
            str(config.getoption("--afmoe-model")),
            **{name: value for name, value in options.items() if value is not None},
        )
    return config.stash[MODEL]


def chosen(config: pytest.Config) -> list[int] | None:
    """The layers to check, or ``None`` for all."""
    text = config.getoption("--afmoe-layers")
    return layers(text) if text else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a check, or one that is skipped and says why."""
    if "check" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--afmoe-model"):
        checks = plan(model_of(metafunc.config), chosen(metafunc.config))
        metafunc.parametrize("check", checks, ids=[str(check) for check in checks])
    else:
        metafunc.parametrize("check", [pytest.param(None, marks=pytest.mark.skip(NO_MODEL))], ids=["no model"])


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """The report of the one run."""
    if not pytestconfig.getoption("--afmoe-model"):
        pytest.skip(NO_MODEL)
    model = model_of(pytestconfig)
    return model.check(pytestconfig.getoption("--afmoe-prompt"), layers=chosen(pytestconfig), progress=False)


def test_it_holds(check: Check, report: Report) -> None:
    """The check holds; if not, what was expected and what was got."""
    outcome = report.outcomes[check]
    assert outcome.ok, f"{check}: expected {outcome.expected}, got {outcome.got}, off by {outcome.by:.2g}"


def test_nothing_else_fails(report: Report) -> None:
    """What the run found beside the checks of the plan: a parameter by name, a value without an equation."""
    assert not [str(failure) for failure in report.failures]
