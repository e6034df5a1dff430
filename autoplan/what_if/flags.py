"""Flags of the command line, and keywords, as the tables of a whatif.toml, so that all are checked in one place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.checks.options import fix_pairs, parse_overrides, parse_prices
from autoplan.errors import UsageError
from autoplan.hardware.fields import Table
from autoplan.options import TORCH_PRECISIONS

OWN_LINK = "own"  # how --host-link calls the links of the hardware profile
OPTIONS = ("global_batch", "precision", "fix")  # fields of `Options` that a whatif.toml names, too


@dataclass(frozen=True, slots=True)
class Flags:
    """What was written behind the flags of a command, as it stands there; None, or empty, where one was not given."""

    overrides: Sequence[str] = ()
    sweeps: Sequence[str] = ()
    hw: str | None = None
    hosts: str | None = None
    batches: str | None = None
    precisions: str | None = None
    scales: str | None = None
    links: str | None = None
    nics: str | None = None
    nvlink: str | None = None
    scaling: str | None = None
    search: str | None = None
    fix: Sequence[str] = ()
    n_tokens: float | None = None
    n_samples: float | None = None
    prices: Sequence[str] = ()
    prices_file: str | None = None
    rent: str | None = None
    given: Sequence[str] = ()


def flag_tables(flags: Flags) -> Table:
    """The tables that the flags stand for; a flag that was not given is absent."""
    links = None if flags.links is None else _words(flags.links, "--host-link")
    if flags.n_tokens is not None and flags.n_samples is not None:
        raise UsageError.of("--tokens and --samples", found="both", expected="one", fix="leave one of them out")
    found: Table = {
        "workload": _present(
            {
                "set": parse_overrides(flags.overrides) or None,
                "sweep": dict(map(_sweep, flags.sweeps)) or None,
                "tokens": flags.n_tokens,
                "samples": flags.n_samples,
                "global_batch": _numbers(flags.batches, "--global-batch", int),
                "precision": None if flags.precisions is None else _precisions(flags.precisions),
                "scaling": flags.scaling,
                "search": flags.search,
                "fix": ",".join(flags.fix) or None,
            }
        ),
        "clusters": _present(
            {
                "hw": None if flags.hw is None else _words(flags.hw, "--hw"),
                "hosts": _numbers(flags.hosts, "--hosts", int),
                "network_scale": _numbers(flags.scales, "--network-scale", float),
                "host_link": links and ["" if name == OWN_LINK else name for name in links],
                "nics": _numbers(flags.nics, "--nics", int),
                "nvlink": None if flags.nvlink is None else _words(flags.nvlink, "--nvlink"),
            }
        ),
        "money": _present(
            {
                "rent": flags.rent,
                "prices": flags.prices_file,
                "price": {name: f"{usd!r} USD/h" for name, usd in parse_prices(flags.prices).items()} or None,
            }
        ),
    }
    for text in flags.given:
        _put(found, text)
    _check_swept(found["workload"])
    return found


def _check_swept(workload: Table) -> None:
    """Refuse an argument that has one value and several."""
    for name in workload.get("sweep", {}):
        if name in workload.get("set", {}):
            raise UsageError.of(
                f"--sweep {name}", found=f"--set {name} beside it", expected="one of them", fix="leave --set out"
            )


def keyword_tables(
    *,
    hw: Sequence[str],
    hosts: Sequence[int],
    overrides: Mapping[str, Any],
    n_tokens: float | None,
    n_samples: float | None,
    usd_per_device_hour: Mapping[str, float],
    options: Mapping[str, Any],
) -> Table:
    """The tables that keywords stand for, with those of `options` that are among `OPTIONS`; empty ones are absent."""
    return {
        "workload": _present(
            {
                "set": dict(overrides) or None,
                "tokens": n_tokens,
                "samples": n_samples,
                "global_batch": options.get("global_batch"),
                "precision": options.get("precision"),
                "fix": ",".join(f"{name}={value}" for name, value in fix_pairs(options.get("fix", ()))) or None,
            }
        ),
        "clusters": _present({"hw": list(hw) or None, "hosts": list(hosts) or None}),
        "money": _present(
            {"price": {name: f"{usd!r} USD/h" for name, usd in usd_per_device_hour.items()} or None},
        ),
    }


def _present(table: Table) -> Table:
    return {key: value for key, value in table.items() if value is not None}


def _precisions(text: str) -> list[str]:
    return [TORCH_PRECISIONS.get(name, name) for name in _words(text, "--precision")]


def _words(text: str, option: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError(f"{option}: found nothing\n  expected: names separated by commas\n  fix: name one or more")
    return names


def _numbers(text: str | None, option: str, cls: Callable[[str], Any]) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [cls(part.strip()) for part in text.split(",")]
    except ValueError:
        word = "counts" if cls is int else "numbers"
        raise UsageError(
            f"{option}: found {text!r}\n  expected: {word} separated by commas\n"
            f"  fix: write {option} 1,2,4, for instance"
        ) from None


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, separator, values = text.partition("=")
    if not (name.strip() and separator and values.strip()):
        raise UsageError(f"--sweep: found {text!r}\n  expected: KEY=V1,V2\n  fix: --sweep seq_len=2048,4096")
    return name.strip(), [parse_overrides([f"value={part}"])["value"] for part in values.split(",") if part.strip()]


def _put(tables: Table, text: str) -> None:
    """Set one value by its path: `money.own.capex=30000 USD`."""
    path, separator, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not separator or len(keys) < 2 or not all(keys):
        raise UsageError(
            f'--given: found {text!r}\n  expected: TABLE.KEY=VALUE\n  fix: --given reliability.restart="5 min"'
        )
    inner = tables
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UsageError(f"--given {path}: found a value above it\n  expected: TABLE.KEY=VALUE")
    if keys[-1] in inner:
        fix = "give it once, by its own flag or by --given"
        raise UsageError.of(f"--given {path}", found="a value beside it", expected="one value", fix=fix)
    inner[keys[-1]] = _literal(value.strip())


def _literal(text: str) -> Any:
    """A number or a list where it is one, else the text, without quotes."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | str | list) else text
