"""The question of a what-if: flags, keywords and a whatif.toml all become one `Question`.

[workload]
model = "llama.py"                        beside this file, or hf:CONFIG.JSON
set = { size = "8b" }                -    arguments of build_model
sweep = { seq_len = [2048, 4096] }   -    arguments of build_model to compare
tokens = 1e12                        -    or samples = 1e9
global_batch = [512, 1024]           -    samples of a step
precision = ["bf16"]                 -
scaling = "strong"                   -    "weak": the batch is that of the fewest hosts and grows with them
fix = "zero=1"                       -    what every plan must have

[clusters]
hw = ["dgx_a100_x8", "dgx_h100_x8"]
hosts = [1, 2, 4]                    -
nics = [1, 4, 8]                     -    network ports of a host
network_scale = [1.0, 2.0]           -    factor on the bandwidth between hosts
host_link = ["", "pcie4"]            -    links inside a host in place of the profile's own, which "" keeps
nvlink = ["on", "off"]               -    the same as host_link = ["", "no_nvlink"]: PCI Express in its place

[money]                              -    every key of it, too
rent = "on_demand"                        or "reserved", "spot"
prices = "my_prices.toml"                 see `what_if.prices`
price = { dgx_a100_x8 = "1.80 USD/h" }    of one device; beats all files
electricity = "0.12 USD/kWh"
pue = 1.3                                 site power / machine power
load = "90 %"                             mean power of a device / its board power
host_power = "3 kW"                       without its devices

[money.own]                          -    own hardware, per device
capex = "30000 USD"
network_share = "20 %"    years = 4    residual_share = "10 %"    utilisation = "70 %"    support_share_per_year = "5 %"
staff_per_year = "500 USD"

[reliability]                        -    see `conditions.Reliability`
device_mtbf = "50000 h"    checkpoint = "30 s"    checkpoint_rate_per_host = "2 GB/s"    restart = "10 min"
spare_hosts = 2    repair = "2 d"    interruptions_per_device_hour = 0.01    notice = "30 s"
slow_device_speed = "50 %"    step_jitter = "1 %"

[loading]                            -    see `conditions.Loading`
samples_per_s_per_host = 2000    storage_rate = "10 GB/s"    sample_size = "150 KB"

A list in place of a value of [money], [money.own], [reliability] or [loading] makes a row of each, without another
search: device_mtbf = ["50000 h", "10000 h"].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoplan.checks.options import check_is_named, parse_fix
from autoplan.errors import InputError, UsageError
from autoplan.hardware.fields import Table, check_choice, check_keys, did_you_mean, number
from autoplan.hardware.file import parse_toml, read_path
from autoplan.options import MAX_GLOBAL_BATCH, MAX_HOSTS, PRECISIONS, Options
from autoplan.tracing.hugging_face import is_hugging_face
from autoplan.what_if.condition_tables import LISTED, merged, read_condition, variants
from autoplan.what_if.conditions import Condition
from autoplan.what_if.money import RENTS
from autoplan.what_if.other_links import NO_NVLINK
from autoplan.what_if.points import SCALINGS, SEARCHES, Overrides
from autoplan.what_if.prices import PRICE
from autoplan.what_if.table_values import (
    amount_at,
    counts_at,
    scales_at,
    table_at,
    text_at,
    texts_at,
    values_at,
)

MAX_POINTS = 10_000
MAX_NICS = 64
_KEYS = {
    "workload": ("model", "set", "sweep", "tokens", "samples", "global_batch", "precision", "scaling", "fix", "search"),
    "clusters": ("hw", "hosts", "nics", "network_scale", "host_link", "nvlink"),
}
NVLINK = {"on": "", "off": NO_NVLINK}


@dataclass(frozen=True, slots=True)
class Question:
    """What to compare; the fields are those of the module docstring.

    `conditions` are money, reliability and loading: a row each of every point. `time_limit_s` is processor time of one
    search; see `what_if.points` for what it is without. Without `precisions` it is that of the options.
    """

    model: str
    hw: tuple[str, ...]
    hosts: tuple[int, ...] = (1,)
    overrides: Overrides = ()
    sweeps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    n_tokens: float | None = None
    n_samples: float | None = None
    global_batches: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    scaling: str = "strong"
    network_scales: tuple[float, ...] = (1.0,)
    host_links: tuple[str, ...] = ("",)
    nics: tuple[int, ...] = ()
    search: str = "quick"
    time_limit_s: float | None = None
    prices_file: str | None = None
    given_usd: tuple[tuple[str, float], ...] = ()
    options: Options = Options()
    conditions: tuple[Condition, ...] = (Condition(),)


def question_of(model: str | Path, tables: Table, *, where: str, options: Options) -> Question:
    """What is asked about MODEL, or by a whatif.toml of that name, whose values `tables` take the place of.

    Raises: InputError naming the field that cannot be used.
    """
    check_is_named(model)
    if str(model).endswith(".toml"):
        return read_question(model, changes=tables, options=options)
    return parse_question(merged(tables, {"workload": {"model": str(model)}}), where=where, options=options)


def read_question(path: str | Path, *, changes: Table | None = None, options: Options | None = None) -> Question:
    """The question of a whatif.toml; `changes` are tables whose keys, sweeps too, take the place of the file's.

    Raises: InputError naming the field that cannot be used.
    """
    _, where, text = read_path(Path(path), expected="a file of questions, such as examples/whatif.toml")
    tables = _without_replaced(parse_toml(text, where=where), changes or {})
    return parse_question(merged(tables, changes or {}), where=where, folder=Path(path).parent, options=options)


def _without_replaced(tables: Table, changes: Table) -> Table:
    """The tables without sweeps of arguments that the changes set, and without tokens where these say samples."""
    workload, changed = tables.get("workload"), changes.get("workload", {})
    if not isinstance(workload, dict):
        return tables
    amounts = {"tokens", "samples"}
    kept = {key: value for key, value in workload.items() if key not in amounts or amounts.isdisjoint(changed)}
    sweep = kept.get("sweep")
    if isinstance(sweep, dict):
        kept["sweep"] = {name: values for name, values in sweep.items() if name not in changed.get("set", {})}
    return {**tables, "workload": kept}


def parse_question(table: Table, *, where: str, folder: Path | None = None, options: Options | None = None) -> Question:
    """The question that these tables ask; files are named from `folder`, or from the current one."""
    _check_tables(table, where)
    workload, clusters, money = (table_at(table, where, name) for name in ("workload", "clusters", "money"))
    label = f"{where}: workload"
    check_keys(workload, label, _KEYS["workload"])
    check_keys(clusters, f"{where}: clusters", _KEYS["clusters"])
    if "hw" not in clusters:
        raise InputError(
            f"{where}: clusters.hw: found nothing\n  expected: names of hardware profiles\n"
            '  fix: write hw = ["dgx_a100_x8"] below [clusters], or name them on the command line'
        )
    options = options or Options()
    if "fix" in workload:
        options = replace(options, fix=parse_fix([text_at(workload, label, "fix")]))
    listed = {name: table_at(table, where, name) for name in LISTED}
    return checked_question(
        Question(
            model=_model(text_at(workload, label, "model"), folder),
            hw=tuple(_hardware(name, folder) for name in texts_at(clusters, f"{where}: clusters", "hw")),
            hosts=counts_at(clusters, f"{where}: clusters", "hosts", MAX_HOSTS) or (1,),
            overrides=tuple(table_at(workload, label, "set").items()),
            sweeps=tuple(
                (name, values_at(values, label, name)) for name, values in table_at(workload, label, "sweep").items()
            ),
            n_tokens=amount_at(workload, label, "tokens"),
            n_samples=amount_at(workload, label, "samples"),
            global_batches=counts_at(workload, label, "global_batch", MAX_GLOBAL_BATCH),
            precisions=texts_at(workload, label, "precision", default=(options.precision,)),
            scaling=text_at(workload, label, "scaling", default="strong"),
            network_scales=scales_at(clusters, f"{where}: clusters"),
            host_links=_host_links(clusters, f"{where}: clusters"),
            nics=counts_at(clusters, f"{where}: clusters", "nics", MAX_NICS),
            search=text_at(workload, label, "search", default="quick"),
            conditions=tuple(read_condition(words, changed, where) for words, changed in variants(listed)),
            prices_file=_prices_file(money, f"{where}: money", folder),
            given_usd=tuple(
                (name, number(str(text), f"{where}: money.price.{name}", PRICE))
                for name, text in table_at(money, f"{where}: money", "price").items()
            ),
            options=options,
        ),
        where=where,
    )


def _check_tables(table: Table, where: str) -> None:
    """Refuse what is outside of all tables, with the table that has a key like it."""
    tables = (*_KEYS, *LISTED)
    for key in (key for key in table if key not in tables):
        near = ((name, did_you_mean(key, keys)) for name, keys in _KEYS.items())
        inside = next((f"write it below [{name}]; {text}" for name, text in near if text), "write it below one of them")
        expected = f"the tables {', '.join(f'[{name}]' for name in tables)} alone"
        raise InputError.of(f"{where}: {key}", found=key, expected=expected, fix=did_you_mean(key, tables) or inside)


def with_fields(question: Question, fields: Mapping[str, Any]) -> Question:
    """The question with other fields; `money`, `reliability` and `loading` are those of its only condition.

    Raises: UsageError for one of these in a question that has several conditions.
    """
    changed = {name: value for name, value in fields.items() if name in LISTED}
    question = replace(question, **{name: value for name, value in fields.items() if name not in LISTED})
    if not changed:
        return question
    if len(question.conditions) > 1:
        raise UsageError(
            f"asked: {', '.join(changed)}: found {len(question.conditions)} conditions in the question\n"
            f"  expected: one, without lists in [{'], ['.join(LISTED)}]\n"
            '  fix: change the file, or give "conditions" alone'
        )
    return replace(question, conditions=(replace(question.conditions[0], **changed),))


def checked_question(question: Question, *, where: str) -> Question:
    """The question once it is known to be possible; batch, precision and time limit move from its options.

    Raises: InputError naming the field.
    """
    question = _folded(question, where)
    for name, word, words in (
        ("workload.scaling", question.scaling, SCALINGS),
        ("workload.search", question.search, SEARCHES),
        *(("money.rent", condition.money.rent, RENTS) for condition in question.conditions),
        *(("workload.precision", precision, PRECISIONS) for precision in question.precisions),
    ):
        check_choice(word, words, f"{where}: {name}")
    if question.n_tokens is not None and question.n_samples is not None:
        raise InputError.of(
            f"{where}: workload", found="tokens and samples", expected="one of them", fix="delete the other"
        )
    for given, _ in question.given_usd:
        if given not in question.hw:
            raise InputError.of(
                f"{where}: money.price.{given}",
                found="no such name among the hardware",
                expected=f"one of {', '.join(question.hw)}",
                fix="use the name exactly as in hw",
            )
    n_points = math.prod(
        [
            len(question.hw),
            len(question.hosts),
            len(question.global_batches) or 1,
            len(question.precisions),
            len(question.network_scales),
            len(question.host_links),
            len(question.nics) or 1,
            len(question.conditions),
            *(len(values) for _, values in question.sweeps),
        ]
    )
    if n_points > MAX_POINTS:
        raise InputError.of(where, found=f"{n_points} points", expected=f"at most {MAX_POINTS}", fix="compare fewer")
    return question


def _folded(question: Question, where: str) -> Question:
    """The question whose options name no batch, precision or time limit of their own: each is in one place."""
    options, unset, limit_s = question.options, Options(), question.time_limit_s
    batches, precisions = question.global_batches, question.precisions
    if options.global_batch is not None:
        _check_same(batches or (options.global_batch,), options.global_batch, f"{where}: workload.global_batch")
        batches = (options.global_batch,)
    if options.precision != unset.precision:
        _check_same(precisions or (options.precision,), options.precision, f"{where}: workload.precision")
    precisions = precisions or (options.precision,)
    if options.time_limit_s is not None and options.time_limit_s != unset.time_limit_s:
        limit_s = options.time_limit_s if limit_s is None else limit_s
        _check_same((limit_s,), options.time_limit_s, f"{where}: time limit")
        options = replace(options, time_limit_s=unset.time_limit_s)
    options = replace(options, global_batch=unset.global_batch, precision=unset.precision)
    return replace(question, options=options, global_batches=batches, precisions=precisions, time_limit_s=limit_s)


def _check_same(values: tuple[Any, ...], option: Any, label: str) -> None:
    if values != (option,):
        found = f"{', '.join(map(str, values))}, and {option} in the options"
        raise InputError.of(label, found=found, expected="one of the two", fix="leave it out of the options")


def check_single(question: Question, *, where: str) -> None:
    """Refuse several workloads or conditions where one is asked for: only clusters may differ.

    Raises: UsageError naming the field.
    """
    for name, values in (
        ("--global-batch", question.global_batches),
        ("--precision", question.precisions),
        ("network_scale", question.network_scales),
        ("host_link", question.host_links),
        ("nics", question.nics),
        ("money, reliability and loading", [condition.words for condition in question.conditions]),
        *((f"sweep of {name}", values) for name, values in question.sweeps),
    ):
        if len(values) > 1:
            raise UsageError(
                f"{where}: {name}: found {len(values)} values: {'; '.join(map(str, values))}\n"
                "  expected: one, since only clusters are compared\n"
                "  fix: ask once for each (--given TABLE.FIELD=VALUE takes the place of a list), or use autoplan whatif"
            )


def _host_links(table: Table, label: str) -> tuple[str, ...]:
    if "nvlink" not in table:
        return texts_at(table, label, "host_link", default=("",))
    if "host_link" in table:
        raise InputError.of(f"{label}.nvlink", found="host_link, too", expected="one of them", fix="delete the other")
    words = texts_at(table, label, "nvlink")
    for word in words:
        check_choice(word, NVLINK, f"{label}.nvlink")
    return tuple(NVLINK[word] for word in words)


def _prices_file(table: Table, label: str, folder: Path | None) -> str | None:
    return str((folder or Path()) / text_at(table, label, "prices")) if "prices" in table else None


def _model(name: str, folder: Path | None) -> str:
    return name if is_hugging_face(name) else str((folder or Path()) / name)


def _hardware(name: str, folder: Path | None) -> str:
    """A .toml file beside the question, or the name of a hardware profile."""
    return str(folder / name) if folder is not None and ".toml" in name else name
