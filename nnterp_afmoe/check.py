"""The proof that runs on the user's own model: every value against its equation, every write against its effect.

One trace of the prompt reads every value; the reference then computes each from those before it *as
the model has them*, so that a fault is named where it arises and nothing but one step's rounding
separates the two. A second trace of many short rows, each a copy with one value rewritten on the
way, is held to the same equations: the rewritten value is what the later ones have to follow from,
block by block to the logits. Both go a block at a time, and keep no block's values past the next.

What is compared, and how far it may be off, is relative to the largest entry of the tensor. In
float32 the two differ by the order in which the sums of a product are taken, and 1e-5 bounds that
for any width in use. In bfloat16 and float16 each tensor on the way is rounded once, by at most half the
distance to the next number, and a step goes through at most four tensors: twice that distance, 1.6e-2 and 2.0e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from .errors import Unavailable
from .support import block_values

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["TOLERANCES", "Check", "Failure", "Outcome", "Report", "check", "plan"]

#: How far apart two tensors may be, relative to the largest entry; derived above.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
}

PROMPT = "The quick brown fox jumps over the lazy dog, twice."

#: Tokens of each row of the trace that writes. Two are the least of which one attends to another.
WRITTEN_TOKENS = 2

#: The most that the logits of the writing trace may take up.
LOGITS_BYTES = 2**27


class Check(NamedTuple):
    """One thing that has to hold.

    Attributes:
        kind: ``"equation"``, ``"write"``, ``"support"``, ``"registry"`` or ``"weights"``.
        value: The value's dotted name, or what else is checked.
        block: The layer, or ``None`` for the root.
    """

    kind: str
    value: str
    block: int | None

    def __str__(self) -> str:
        return f"{self.kind}: {self.value if self.block is None else f'layers[{self.block}].{self.value}'}"


class Outcome(NamedTuple):
    """What came of a check.

    Attributes:
        ok: Whether it holds.
        expected: What should have been, where it does not hold.
        got: What was.
        by: How far off, relative to the largest entry; ``inf`` where that says nothing.
    """

    ok: bool
    expected: str = ""
    got: str = ""
    by: float = 0.0


@dataclass(frozen=True)
class Failure:
    """A check that does not hold: of which value, on which block, what was expected, what was got, by how much."""

    check: str
    value: str
    block: int | None
    expected: str
    got: str
    by: float

    def __str__(self) -> str:
        by = f", off by {self.by:.2g} of the largest entry" if math.isfinite(self.by) else ""
        return f"{Check(self.check, self.value, self.block)}: expected {self.expected}, got {self.got}{by}"


@dataclass
class Report:
    """What `StandardizedTransformer.check` found; printed, a table.

    Attributes:
        model: What was checked.
        dtype: The dtype of its weights.
        attn_implementation: Under which it was checked.
        experts_implementation: Under which it was checked.
        tolerance: What two tensors were allowed to be apart by.
        outcomes: Every check with what came of it.
    """

    model: str
    dtype: str
    attn_implementation: str
    experts_implementation: str
    tolerance: float
    outcomes: dict[Check, Outcome] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return all(outcome.ok for outcome in self.outcomes.values())

    @property
    def failures(self) -> list[Failure]:
        """What does not, in the order of the forward pass."""
        return [
            Failure(check.kind, check.value, check.block, outcome.expected, outcome.got, outcome.by)
            for check, outcome in self.outcomes.items()
            if not outcome.ok
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON: infinite differences as ``None``."""
        failures = [asdict(failure) for failure in self.failures]
        for failure in failures:
            failure["by"] = failure["by"] if math.isfinite(failure["by"]) else None
        return {
            "model": self.model,
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "experts_implementation": self.experts_implementation,
            "tolerance": self.tolerance,
            "ok": self.ok,
            "checks": len(self.outcomes),
            "failures": failures,
        }

    def __rich__(self) -> Group:
        table = Table(
            title=f"{self.model}: {self.dtype}, {self.attn_implementation} attention, {self.experts_implementation} experts",
            title_justify="left",
        )
        for column in ("check", "holds", "of", "largest difference", "allowed"):
            table.add_column(column, justify="left" if column == "check" else "right")
        for kind, what in KINDS.items():
            outcomes = [outcome for check, outcome in self.outcomes.items() if check.kind == kind]
            if not outcomes:
                continue
            worst = max(outcome.by for outcome in outcomes)
            compared = kind in ("equation", "write")
            table.add_row(
                what,
                str(sum(outcome.ok for outcome in outcomes)),
                str(len(outcomes)),
                f"{worst:.1e}" if compared else "",
                f"{self.tolerance:.1e}" if compared else "",
            )
        verdict = "everything holds" if self.ok else f"{len(self.failures)} of {len(self.outcomes)} do not hold:"
        return Group(table, Text(verdict), *(Text(f"  {failure}") for failure in self.failures))

    def __str__(self) -> str:
        console = Console(width=200, color_system=None, legacy_windows=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    __repr__ = __str__


#: The kinds of check, and what they say.
KINDS = {
    "registry": "a block's table and its equations have the same values",
    "support": "what support() says is what happens",
    "weights": "parameters are finite, and as they were loaded",
    "equation": "a value follows from those before it",
    "write": "what follows a written value follows from it",
}


# -- what there is to check ------------------------------------------------------------


def plan(model: StandardizedTransformer, layers: Sequence[int] | None = None) -> list[Check]:
    """Every check of `check`, from the config alone, in the order of the forward pass."""
    return planned(model, orders_of(model, layers))


def planned(model: StandardizedTransformer, orders: Mapping[int, list[str]]) -> list[Check]:
    """`plan` for blocks whose orders are known."""
    checks = [Check("weights", "parameters", None)]
    for layer in orders:
        checks += [Check("registry", "values", layer), Check("weights", "parameters", layer)]
        checks += [Check("support", name, layer) for name in model.support(layer=layer)]
    names = root_names(model)
    checks += [Check("equation", name, None) for name in names]
    checks += [Check("equation", name, layer) for layer, names in orders.items() for name in names]
    checks += [Check("write", name, layer) for layer, name in writes(model, orders)]
    return checks


def root_names(model: StandardizedTransformer) -> list[str]:
    """The root's values that equations speak of: those that are not derived."""
    return [name for name in model.order() if type(model).values()[name].writable]


def writes(model: StandardizedTransformer, orders: Mapping[int, list[str]]) -> list[tuple[int | None, str]]:
    """The values to write: all of the root, and all of the first block of each kind."""
    kinds: dict[tuple[str, ...], int] = {}
    for layer in orders:
        kinds.setdefault(model.family.traits(model.config, layer), layer)
    root = root_names(model)
    if getattr(model.config, "sliding_window", None) == 1:
        # A token that sees itself alone sees nothing once it is hidden, and what comes of that is no one's to say.
        root.remove("attention_mask")
    return [
        *((None, name) for name in root),
        *((layer, name) for layer in sorted(kinds.values()) for name in orders[layer]),
    ]


def orders_of(model: StandardizedTransformer, layers: Sequence[int] | None) -> dict[int, list[str]]:
    """The layers asked for, negative ones from the end, all by default; each with its values in order."""
    chosen = sorted(set(model._indices(layers))) if layers is not None else range(model.num_layers)
    return {layer: model.order(layer) for layer in chosen}


# -- running ---------------------------------------------------------------------------


def check(
    model: StandardizedTransformer,
    prompt: Any = None,
    *,
    layers: Sequence[int] | None = None,
    since_load: bool = True,
    progress: bool = True,
) -> Report:
    """See `StandardizedTransformer.check`."""
    model.dispatch()
    if model._module.training:
        raise ValueError(
            "the model is in training mode, where dropout makes two passes differ: call model.eval() first"
        )
    model.family.equations(model._module, model.config)  # Says now what the equations do not have.
    orders = orders_of(model, layers)
    dtype = next(model._module.parameters()).dtype
    report = Report(
        model.repo_id or type(model._module).__name__,
        str(dtype).removeprefix("torch."),
        model.config._attn_implementation,
        model.config._experts_implementation,
        TOLERANCES[dtype],
        dict.fromkeys(planned(model, orders), Outcome(False, "a result", "none: the run ended before it", math.inf)),
    )
    check_weights(model, orders, report, since_load)
    ids = token_ids(model, prompt)
    edits = writes(model, orders)
    short = ids[:1].repeat(1, WRITTEN_TOKENS)[:, :WRITTEN_TOKENS]
    rows = max(8, LOGITS_BYTES // (short.shape[1] * model.vocab_size * 8))
    batches = [edits[start : start + rows] for start in range(0, len(edits), rows)]
    with Progress(transient=True) if progress else nullcontext() as bar, torch.inference_mode():
        steps = (len(batches) + 1) * len(orders)
        task = bar.add_task("checking", total=steps) if bar else None
        tick = (lambda: bar.advance(task)) if bar and task is not None else (lambda: None)
        run(model, ids, orders, Reading(report), tick)
        for batch in batches:
            run(model, short.expand(len(batch) + 1, -1), orders, Writing(report, batch), tick)
    return report


def token_ids(model: StandardizedTransformer, prompt: Any) -> torch.Tensor:
    """The prompt as ``[batch seq]`` ids; a sentence by default, or without a tokenizer the first few ids."""
    if isinstance(prompt, torch.Tensor):
        ids = prompt if prompt.dim() == 2 else prompt[None]
    elif model.tokenizer is not None:
        ids = torch.tensor([model.tokenizer(PROMPT if prompt is None else prompt)["input_ids"]])
    elif prompt is None:
        ids = torch.arange(min(12, model.vocab_size))[None]
    else:
        raise TypeError("this model has no tokenizer: give the prompt as a tensor of token ids")
    if not ids.numel():
        raise ValueError("the prompt has no tokens")
    if ids.dtype.is_floating_point or not 0 <= int(ids.min()) <= int(ids.max()) < model.vocab_size:
        raise ValueError(f"the prompt's token ids have to be integers from 0 to {model.vocab_size - 1}")
    return ids


class Ledger:
    """Collects the comparisons of one run, and settles a block's at once: one sync a block.

    Attributes:
        layer: The block whose values are being compared, ``None`` for the root.
        asked: The value being read, should the run end there.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.layer: int | None = None
        self.asked: str = ""
        self.pending: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def take(
        self, name: str, value: torch.Tensor, assign: Callable[[torch.Tensor], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The value as it is, and as it is to be from here on: another one where this run writes it."""
        return value, value

    def compare(self, name: str, want: torch.Tensor, got: torch.Tensor) -> bool:
        """Set a value against its equation; ``False`` where the shapes already differ."""
        if got.shape != want.shape:
            self.mismatch(name, f"shape {list(want.shape)}", f"shape {list(got.shape)}")
            return False
        self.pending.append((name, want, got, differences(want, got, self.is_pattern(name))))
        return True

    def is_pattern(self, name: str) -> bool:
        return name.rpartition(".")[2] == "attention_scores"

    def settle(self) -> None:
        """Turn the pending comparisons into outcomes."""
        if self.pending:
            self.judge(torch.stack([off for *_, off in self.pending]).nan_to_num(math.inf, math.inf))
        self.pending = []

    def judge(self, off: torch.Tensor) -> None:
        """Turn the differences of the pending comparisons, ``[values rows]``, into outcomes."""
        raise NotImplementedError

    def mismatch(self, name: str, expected: str, got: str) -> None:
        raise NotImplementedError

    def ended(self, error: Exception) -> None:
        """The run ended while `asked` was being read."""
        self.mismatch(self.asked, "to be read", f"{type(error).__name__}: {error}")


class Reading(Ledger):
    """The run that only reads: one row, or the user's."""

    first_non_finite: str | None = None

    def judge(self, off: torch.Tensor) -> None:
        for (name, want, got, _), worst in zip(self.pending, off.amax(1).tolist(), strict=True):
            place = Check("equation", name, self.layer)
            if worst <= self.report.tolerance:
                outcome = Outcome(True, by=worst)
            elif not got.isfinite().all():
                self.first_non_finite = self.first_non_finite or str(place).partition(": ")[2]
                outcome = Outcome(
                    False, "finite numbers", f"NaN or infinity, first at {self.first_non_finite}", math.inf
                )
            else:
                outcome = Outcome(False, *worst_entry(want, got), worst)
            self.report.outcomes[place] = outcome

    def mismatch(self, name: str, expected: str, got: str) -> None:
        self.report.outcomes[Check("equation", name, self.layer)] = Outcome(False, expected, got, math.inf)


class Writing(Ledger):
    """The run that writes: row 0 is left alone, each other row has one value rewritten on its way.

    Every other kind of block is written by assignment, the others in place.
    """

    def __init__(self, report: Report, edits: Sequence[tuple[int | None, str]]) -> None:
        super().__init__(report)
        self.edits = edits
        self.row = {edit: row for row, edit in enumerate(edits, 1)}
        self.by_assignment = {
            layer: index % 2 == 0 for index, layer in enumerate(dict.fromkeys(layer for layer, _ in edits))
        }
        self.failed: dict[int, Outcome] = {}
        self.worst = [0.0] * (len(edits) + 1)

    def take(
        self, name: str, value: torch.Tensor, assign: Callable[[torch.Tensor], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Copies, since two values may be one tensor, and an edit of the later is not one of the earlier.
        before = value.clone()
        row = self.row.get((self.layer, name))
        if row is None:
            return before, before
        after = before.clone()
        after[row] = rewritten(name, before[row])
        if self.by_assignment[self.layer]:
            assign(after.clone())
        else:
            value[row] = after[row]
        return before, after

    def judge(self, off: torch.Tensor) -> None:
        # Where the row that was left alone is off as well, no write is to blame.
        off = off.where(off[:, :1] <= self.report.tolerance, 0)
        for index, row in off.isinf().nonzero().tolist():
            _, want, got, _ = self.pending[index]
            if torch.equal(want[row].isnan(), got[row].isnan()):
                # A weight that is NaN gives one on both sides; the reading run reports it.
                off[index, row] = differences(want[row].nan_to_num()[None], got[row].nan_to_num()[None], False)[0]
        self.worst = [max(pair) for pair in zip(self.worst, off.amax(0).tolist(), strict=True)]
        for index, row in (off > self.report.tolerance).nonzero().tolist():
            name, want, got, _ = self.pending[index]
            if row not in self.failed:
                expected, found = worst_entry(want[row : row + 1], got[row : row + 1])
                where = str(Check("", name, self.layer)).partition(": ")[2]
                self.failed[row] = Outcome(False, f"{where} to follow: {expected}", found, float(off[index, row]))

    def mismatch(self, name: str, expected: str, got: str) -> None:
        for row in range(1, len(self.edits) + 1):
            self.failed.setdefault(row, Outcome(False, expected, got, math.inf))

    def finish(self) -> None:
        """Judge each write by what followed it."""
        for row, (layer, name) in enumerate(self.edits, 1):
            self.report.outcomes[Check("write", name, layer)] = self.failed.get(row, Outcome(True, by=self.worst[row]))


def rewritten(name: str, value: torch.Tensor) -> torch.Tensor:
    """Another value of the same sort, for one row: floats scaled and shifted, ids and experts the next ones."""
    if name == "attention_mask":
        # One token hidden from the others, which leaves no query without a key.
        return value.index_fill(0, torch.tensor([min(1, len(value) - 1)], device=value.device), 0)
    if value.dtype.is_floating_point:
        return value * 0.5 + 0.25
    # Rolled over the row's own numbers, so that each is still a token or an expert of the model.
    return value.flatten().roll(1).view_as(value)


def run(
    model: StandardizedTransformer,
    ids: torch.Tensor,
    orders: Mapping[int, list[str]],
    ledger: Ledger,
    tick: Callable[[], None],
) -> None:
    """One trace: read every value in order, change what the ledger changes, hold each to its equation."""
    try:
        with model.trace(ids) as tracer:
            follow(model, ids, orders, ledger, tick, tracer)
    except Exception as error:
        # Whatever ended the run, it was while a value was asked for, and that value is at fault.
        ledger.ended(error)
    if isinstance(ledger, Writing):
        ledger.finish()


def follow(
    model: StandardizedTransformer,
    ids: torch.Tensor,
    orders: Mapping[int, list[str]],
    ledger: Ledger,
    tick: Callable[[], None],
    tracer: Any,
) -> None:
    """The body of the trace: the model's forward pass on one side, the equations on the other."""
    equations = model.family.equations(model._module, model.config)
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}

    def take(name: str, host: Any, attribute: str) -> None:
        ledger.asked = name
        value = getattr(host, attribute)
        before[name], after[name] = ledger.take(name, value, lambda changed: setattr(host, attribute, changed))

    def visit(name: str, want: torch.Tensor) -> torch.Tensor:
        if name in before:
            return after[name] if ledger.compare(name, want, before[name]) else want
        return want

    names = root_names(model)
    ahead = [name for name in names if model.rank(name) < model._block_rank()]
    for name in ahead:
        take(name, model, name)
    h = equations.begin(visit, ids.to(model.device))
    ledger.settle()

    for layer in range(model.num_layers):
        before.clear()
        after.clear()
        if layer not in orders:
            h = model.layers[layer].layer_output.clone()
            continue
        ledger.layer = layer
        hosts = block_values(model, model.family.case(model.config, layer))
        check_support(model, layer, ledger)
        for name in orders[layer]:
            take(name, hosts[name][0], name.rpartition(".")[2])
        seen: set[str] = set()

        def watched(name: str, want: torch.Tensor, seen: set[str] = seen) -> torch.Tensor:
            seen.add(name)
            return visit(name, want)

        h = equations.block(layer, watched, h)[0]
        ledger.settle()
        check_registry(layer, seen, hosts, set(before), ledger.report)
        tick()
    before.clear()
    after.clear()
    ledger.layer = None
    for name in names:
        if name not in ahead:
            take(name, model, name)
    equations.end(visit, h)
    if isinstance(ledger, Writing):
        # What the call returns is all that follows the logits.
        ledger.compare("what the model returns", after["logits"], tracer.result.logits)
    ledger.settle()


# -- beside the equations --------------------------------------------------------------


def check_support(model: StandardizedTransformer, layer: int, ledger: Ledger) -> None:
    """What is said to be missing raises `Unavailable`; what is said to be there is read by the run itself."""
    if not isinstance(ledger, Reading):
        return
    for name, reason in model.support(layer=layer).items():
        outcome = Outcome(True)
        if reason is not None:
            try:
                model.layers[layer].get(name)
                outcome = Outcome(False, f"Unavailable: {reason}", "a value", math.inf)
            except Unavailable:
                pass
            except Exception as error:
                outcome = Outcome(False, f"Unavailable: {reason}", f"{type(error).__name__}: {error}", math.inf)
        ledger.report.outcomes[Check("support", name, layer)] = outcome


def check_registry(layer: int, equations: set[str], table: Mapping[str, Any], read: set[str], report: Report) -> None:
    """The table lists what the equations have, and nothing read goes without an equation."""
    unproved, unlisted = sorted(read - equations), sorted(equations - set(table))
    outcome = Outcome(True)
    if unproved:
        outcome = Outcome(False, "an equation for every value", f"none for {', '.join(unproved)}", math.inf)
    elif unlisted:
        outcome = Outcome(False, "every value of the equations listed", f"no row for {', '.join(unlisted)}", math.inf)
    for name in unproved:
        report.outcomes[Check("equation", name, layer)] = Outcome(False, "an equation", "none", math.inf)
    for name in unlisted:
        report.outcomes[Check("registry", name, layer)] = Outcome(False, "a row in the table", "none", math.inf)
    report.outcomes[Check("registry", "values", layer)] = outcome


def check_weights(model: StandardizedTransformer, layers: Mapping[int, Any], report: Report, since_load: bool) -> None:
    """Parameters are finite, and as they were when the model was wrapped."""
    prefix = model.layers.path.partition(".")[2]
    for name, parameter in model._module.named_parameters():
        block, _, rest = (
            name.removeprefix(f"{prefix}.").partition(".") if name.startswith(f"{prefix}.") else ("", "", name)
        )
        layer = int(block) if block else None
        if layer is not None and layer not in layers:
            continue
        whole = Check("weights", "parameters", layer)
        if not report.outcomes[whole].ok and report.outcomes[whole].got.startswith("none:"):
            report.outcomes[whole] = Outcome(True)
        finite = parameter.isfinite()
        if not finite.all():
            entry = f"[{finite.flatten(1).all(1).logical_not().nonzero()[0].item()}]" if parameter.dim() > 2 else ""
            outcome = Outcome(False, "finite numbers", "NaN or infinity", math.inf)
            report.outcomes[Check("weights", f"{rest}{entry}", layer)] = outcome
            report.outcomes[whole] = outcome
        elif since_load and model._samples.changed(name, parameter):
            outcome = Outcome(False, "the parameter as it was loaded", "another: it was changed since", math.inf)
            report.outcomes[Check("weights", rest, layer)] = outcome
            report.outcomes[whole] = outcome


# -- comparing -------------------------------------------------------------------------


def differences(want: torch.Tensor, got: torch.Tensor, masked: bool) -> torch.Tensor:
    """Each row's largest difference, relative to the tensor's largest entry; NaN or infinite where an entry is."""
    if not want.dtype.is_floating_point:
        return (got != want).flatten(1).any(1).float()
    size = want.abs()
    if masked:
        # A masked score is the dtype's least number or, with the score added, lower than any: no
        # measure of the others, and the same on both sides.
        least = torch.finfo(want.dtype).min
        size = size.where(size < -least / 4, 0)
        want, got = want.clamp(min=least), got.clamp(min=least)
    scale = size.amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    return (got.float() - want.float()).abs().flatten(1).amax(1) / scale


def worst_entry(want: torch.Tensor, got: torch.Tensor) -> tuple[str, str]:
    """The entry that is off the most, on both sides, with its index."""
    off = (got.double() - want.double()).abs().nan_to_num(math.inf)
    index = [int(axis) for axis in torch.unravel_index(off.argmax(), off.shape)]
    return f"{want[tuple(index)].item():.6g} at {index}", f"{got[tuple(index)].item():.6g}"
