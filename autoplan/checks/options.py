"""Checks of what a user asks for, once on entry; everything after trusts an Options value."""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from typing import Any

from autoplan.errors import UsageError
from autoplan.options import (
    AS_COMPUTED,
    BATCH_NORMS,
    GRAD_COMPRESSIONS,
    LOSS_AVERAGES,
    LOSSES,
    MAX_GLOBAL_BATCH,
    MAX_HOSTS,
    MAX_TIME_LIMIT_S,
    MEMORY_FORMATS,
    OBJECTIVES,
    PLAIN_SCHEDULE,
    PRECISIONS,
    Options,
)
from autoplan.parallel_plan import ZERO_STAGES

_RECOMPUTE = ("none", "full", "selective")
_SWITCH = ("on", "off")
_STAGES_OF_RANK = {"1f1b": "1", "gpipe": "1", PLAIN_SCHEDULE: "1", "zero_bubble_v": "2"}  # of schedules with one number
# What each name of `--fix` accepts: a list of words, or None for a positive integer.
FIX_VALUES: dict[str, tuple[str, ...] | None] = {
    "dp": None,
    "tp": None,
    "pp": None,
    "zero": tuple(map(str, ZERO_STAGES)),
    "shard": None,
    "micro_batch": None,
    "schedule": (),
    "stages_per_rank": None,
    "recompute": _RECOMPUTE,
    "keep_attention": _SWITCH,
    "loss": LOSSES,
    "compile": _SWITCH,
    "memory_format": MEMORY_FORMATS,
    "cuda_graph": _SWITCH,
    "generated": _SWITCH,
    "batch_norm": BATCH_NORMS,
    "loss_average": LOSS_AVERAGES,
    "grad_compression": GRAD_COMPRESSIONS,
    "powersgd_rank": None,
}
_OTHER_NAMES = {"chunks": "stages_per_rank"}  # which `--fix` takes too


def check_options(options: Options, *, schedules: Iterable[str] = ()) -> Options:
    """The options, `fix` as pairs, once every value is known to be possible.

    `schedules` are the legal names of `fix=schedule`; when empty, any name passes.

    Raises: UsageError that names the option, what it accepts and the nearest legal value.
    """
    _check_word("precision", options.precision, PRECISIONS)
    _check_word("objective", options.objective, OBJECTIVES)
    for name, number in (
        ("--global-batch", options.global_batch),
        ("--time-limit", options.time_limit_s),
        ("max_micro_batch_size", options.max_micro_batch_size),
        ("--top", options.top),
    ):
        if number is not None and (not isinstance(number, int | float) or isinstance(number, bool)):
            raise UsageError.of(name, found=number, expected="a number", fix="write it without quotes")
        if number is not None and not 0 < number < float("inf"):
            raise UsageError(
                f"{name}: found {number}\n  expected: a number above 0\n  fix: leave it out for the default"
            )
    if options.global_batch is not None and options.global_batch > MAX_GLOBAL_BATCH:
        raise UsageError(
            f"--global-batch: found {options.global_batch}\n  expected: at most {MAX_GLOBAL_BATCH} samples a step\n"
            "  fix: give the samples of one optimizer step, not of the whole run"
        )
    if options.time_limit_s is not None and options.time_limit_s > MAX_TIME_LIMIT_S:
        raise UsageError(
            f"--time-limit: found {options.time_limit_s:g}\n  expected: at most {MAX_TIME_LIMIT_S:g}\n"
            "  fix: use --require-optimal to search for as long as the proof takes"
        )
    if not AS_COMPUTED <= options.memory_confidence < 1.0:
        raise UsageError.of(
            "memory_confidence",
            found=f"{options.memory_confidence:g}",
            expected=f"a chance from {AS_COMPUTED:g}, for plans that fit as computed, to below 1",
            fix="leave it out for the default",
        )
    options = replace(options, fix=fix_pairs(options.fix))
    for name, value in options.fix:
        _check_fix(name, value, tuple(schedules))
    if options.module_level:
        _check_module_level(options)
    _check_compression(options)
    _check_schedule(options)
    return options


def options_of(given: Mapping[str, Any]) -> Options:
    """The options of a library call, by name; for `fix` see `fix_pairs`.

    Raises: UsageError for a name that is none.
    """
    names = [field.name for field in fields(Options)]
    for name in given:
        if name not in names:
            raise UsageError(
                f"options: unknown name {name!r}{nearest(name, names)}\n"
                f"  expected: one of {', '.join(names)}\n  fix: use one of these"
            )
    return Options(**{**given, "fix": fix_pairs(given.get("fix", ()))})


def fix_pairs(fix: object) -> tuple[tuple[str, str], ...]:
    """What a library call fixes as (name, value) pairs: of the text of --fix, of a dict, or of pairs.

    Raises: UsageError for anything else.
    """
    if isinstance(fix, str):
        return parse_fix([fix])
    items = tuple(fix.items() if isinstance(fix, Mapping) else fix) if isinstance(fix, Iterable) else (fix,)
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in items):
        raise UsageError.of(
            "fix",
            found=repr(fix),
            expected="the text of --fix, a dict, or pairs of a name and its value",
            fix='write fix="tp=2,pp=1", fix={"tp": 2, "pp": 1} or fix=(("tp", "2"), ("pp", "1"))',
        )
    return _named_once("fix", items)


def check_is_named(model: object) -> None:
    """Refuse a model itself where a file of one is to be named; the planner builds it anew, without memory.

    Raises: UsageError.
    """
    if not isinstance(model, str | PathLike):
        raise UsageError.of(
            "model",
            found=type(model).__name__,
            expected="the path of a model file, or hf:CONFIG.JSON",
            fix="write a file with build_model, make_batch and loss_fn, as examples/mlp.py;"
            " autoplan.parallelize(module, example_batch, hw=...) takes a module itself",
        )


def check_degrees(options: Options, *, counts: Sequence[int], n_devices_per_host: int) -> None:
    """Refuse fixed degrees that are for none of the numbers of devices that a plan may use, which are `counts`.

    Raises: UsageError with the products that are.
    """
    degrees = {name: int(value) for name, value in options.fix if name in ("dp", "tp", "pp")}
    product, n_devices, is_whole = math.prod(degrees.values()), max(counts), len(degrees) == 3
    if product in counts or (not is_whole and any(n % product == 0 for n in counts)):
        return
    small = ((n, d) for n in counts for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    usable = counts if is_whole else {own for n, d in small for own in (d, n // d)}
    near = ", ".join(map(str, sorted(sorted(usable, key=lambda number: abs(number - product))[:4])))
    where = "--fix " + ",".join(f"{name}={degree}" for name, degree in degrees.items())
    text = " x ".join(map(str, degrees.values())) + (f" = {product}" if len(degrees) > 1 else "")
    expected, more = f"{_one_of(counts)} of the {n_devices} devices, which a plan may use", ""
    if product > n_devices:
        n_hosts = -(-product // n_devices_per_host)
        expected = f"at most {n_devices} devices, as the cluster has"
        more = f", or more hosts: --hosts {n_hosts}" if n_hosts <= MAX_HOSTS else ""
    elif not is_whole:
        expected = f"a divisor of {expected}"
    name = " x ".join(degrees)
    raise UsageError(f"{where}: found {text} devices\n  expected: {expected}\n  fix: use {name} of {near}{more}")


N_LISTED = 12  # numbers of devices in a message


def _one_of(counts: Iterable[int]) -> str:
    """`1, 2, 4 or 8`; of very many the first and the last."""
    *others, last = sorted(counts)
    shown = [*map(str, others[:N_LISTED]), *["..."] * (len(others) > N_LISTED)]
    return f"{', '.join(shown)} or {last}" if shown else str(last)


def check_batch(options: Options, *, default_batch: int) -> None:
    """Refuse a fixed dp and micro-batch that the global batch cannot be divided by.

    Raises: UsageError with values that it can be.
    """
    fix = dict(options.fix)
    dp, micro_batch = int(fix.get("dp", "1")), int(fix.get("micro_batch", "1"))
    batch = options.global_batch or default_batch
    given = f"--global-batch {batch}" if options.global_batch else f"the default global batch of {batch}"
    if batch % dp:
        raise UsageError(
            f"--fix dp={dp} does not divide {given}\n"
            f"  expected: as many samples on each of the {dp} data-parallel ranks\n"
            f"  fix: use dp={math.gcd(dp, batch)}, or a global batch that is a multiple of {dp}"
        )
    share = batch // dp
    if share % micro_batch:
        ranks = f" / {dp} ranks = {share}" if dp > 1 else ""
        raise UsageError(
            f"--fix micro_batch={micro_batch} does not divide a rank's part of {given}\n"
            f"  expected: a divisor of {batch}{ranks} samples\n"
            f"  fix: use micro_batch={math.gcd(micro_batch, share)}, or a global batch that is a multiple of"
            f" {dp * micro_batch}"
        )


def parse_fix(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """`dp=4,zero=1` (any number of such texts) as (name, value) pairs; the same name twice is an error."""
    parts = (part for text in texts for part in text.split(",") if part.strip())
    return _named_once("--fix", (_split_pair("--fix", part) for part in parts))


def _named_once(option: str, pairs: Iterable[tuple[str, object]]) -> tuple[tuple[str, str], ...]:
    """The pairs by the names of `FIX_VALUES`, as texts; the same name twice is an error."""
    found: dict[str, str] = {}
    for given, value in pairs:
        name = _OTHER_NAMES.get(given, given)
        _check_once(option, name, found, value)
        found[name] = str(value)
    return tuple(found.items())


def _check_once(option: str, name: str, found: Mapping[str, object], value: object) -> None:
    if name in found:
        twice = f"found twice ({found[name]} and {value})"
        raise UsageError(f"{option} {name}: {twice}\n  expected: one value\n  fix: give it once")


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts as keyword arguments of build_model: Python literals where they are, else strings.

    Raises: UsageError for what is no pair, and for the same key twice.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        name, value = _split_pair("--set", text)
        _check_once("--set", name, overrides, value)
        try:
            overrides[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            if several := re.search(r",\s*(\w+=.*)", value):
                raise UsageError.of(
                    f"--set {name}",
                    found=value,
                    expected="one KEY=VALUE after each --set",
                    fix=f"--set {name}={value[: several.start()]} --set {several[1]}; a text with a comma in quotes",
                ) from None
            overrides[name] = value
    return overrides


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """`NAME=USD` texts as US dollars per device-hour by the name of the hardware profile.

    Raises: UsageError for what is no price, and for the same name twice.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, value = _split_pair("--price", text)
        _check_once("--price", name, prices, value)
        try:
            price = float(value)
        except ValueError:
            price = 0.0
        if not 0 < price < float("inf"):
            raise UsageError(
                f"--price {name}: found {value!r}\n  expected: US dollars per device-hour, above 0\n"
                f"  fix: --price {name}=2.50, or leave it out when it is unknown"
            )
        prices[name] = price
    return prices


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean "dp"?` when some legal word is close, else nothing."""
    close = difflib.get_close_matches(word, tuple(words), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def _split_pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = (part.strip() for part in text.partition("="))
    if not (name and separator and value):
        joined = re.fullmatch(r"([a-z_]+?)_?(\d+)", text.strip())  # as zero2 is often called
        is_fix = option == "--fix" and joined is not None and joined[1] in FIX_VALUES
        wanted = f"{joined[1]}={joined[2]}" if joined and is_fix else f"{name or 'name'}=VALUE"
        raise UsageError(f"{option}: found {text!r}\n  expected: name=value\n  fix: write {option} {wanted}")
    return name, value


def _check_word(name: str, word: str, words: Iterable[str]) -> None:
    words = tuple(words)
    if word not in words:
        found, expected = f"{word!r}{nearest(word, words)}", f"one of {', '.join(words)}"
        raise UsageError(f"{name}: found {found}\n  expected: {expected}\n  fix: use one of these")


def _check_module_level(options: Options) -> None:
    """Whole modules are neither split nor put on several stages, nor is it known what compiling them would gain."""
    for name, value in options.fix:
        if (name, value) == ("compile", "on"):
            raise UsageError(
                "--fix compile=on beside --module-level\n"
                "  expected: compile=off, since what torch.compile makes of operators that were not traced, and whether"
                " it can follow a forward that branches on data, is not known\n"
                "  fix: leave compile out, or leave --module-level out if the model can be traced"
            )
        if name in ("tp", "pp") and int(value) != 1:
            raise UsageError(
                f"--fix {name}={value} beside --module-level\n"
                f"  expected: {name}=1, since --module-level plans neither tensor nor pipeline parallelism\n"
                f"  fix: leave {name} out, or leave --module-level out if the model can be traced"
            )


def _check_schedule(options: Options) -> None:
    """Some schedules are of several ranks only, of one rank all are the same; and most have one number of stages."""
    fix = dict(options.fix)
    schedule, n_stages = fix.get("schedule"), fix.get("stages_per_rank")
    if fix.get("pp") == "1" and schedule in ("interleaved", "zero_bubble_v"):
        expected = "pp of 2 or more, as it is of a pipeline"
        raise UsageError.of(f"--fix schedule={schedule}", found="pp=1", expected=expected, fix="leave one of them out")
    only, why = _STAGES_OF_RANK.get(schedule or ""), f"the stages that each rank has under {schedule}"
    if fix.get("pp") == "1" and only is None:
        only, why = "1", "since a rank without a pipeline has one stage"
    if only is not None and n_stages not in (None, only):
        expected = f"stages_per_rank={only}, {why}"
        raise UsageError.of("--fix stages_per_rank", found=n_stages, expected=expected, fix="leave one of them out")


def _check_compression(options: Options) -> None:
    """Gradients are compressed where there is something to reduce, and by PowerSGD where ranks have all of them."""
    fix = dict(options.fix)
    name = fix.get("grad_compression", GRAD_COMPRESSIONS[0])
    if "powersgd_rank" in fix and name != "powersgd":
        raise UsageError.of(
            f"--fix powersgd_rank={fix['powersgd_rank']}",
            found=f"grad_compression {name}",
            expected="grad_compression=powersgd beside it",
            fix="add it, or leave powersgd_rank out",
        )
    if name == GRAD_COMPRESSIONS[0]:
        return
    where = f"--fix grad_compression={name}"
    if fix.get("dp") == "1":
        raise UsageError.of(
            where, found="dp=1", expected="dp of 2 or more, since one rank reduces nothing", fix="leave one of them out"
        )
    if name == "powersgd" and fix.get("zero", "0") != "0":
        expected = "zero=0, since PowerSGD needs all gradients on every rank"
        raise UsageError.of(where, found=f"zero={fix['zero']}", expected=expected, fix="take bf16, or leave zero out")
    if name == "powersgd" and options.precision == "fp16":
        expected = "bf16 or fp32, since gradients that overflow would stay in the errors it carries on"
        raise UsageError.of(where, found="--precision fp16", expected=expected, fix="take bf16, or another precision")


def _check_fix(name: str, value: str, schedules: tuple[str, ...]) -> None:
    if name not in FIX_VALUES:
        known = ", ".join(FIX_VALUES)
        raise UsageError(
            f"--fix: unknown name {name!r}{nearest(name, FIX_VALUES)}\n"
            f"  expected: one of {known}\n  fix: use one of these names"
        )
    words = schedules if name == "schedule" else FIX_VALUES[name]
    if words:
        _check_word(f"--fix {name}", value, words)
    elif words is None and not (value.isascii() and value.isdigit() and int(value) > 0):
        raise UsageError(
            f"--fix {name}: found {value!r}\n  expected: a whole number above 0\n"
            f"  fix: write --fix {name}=2, for instance"
        )
