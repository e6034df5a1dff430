"""Commands about devices: their profiles and prices, what a model takes on one, and what this machine has."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import click

from autoplan.errors import UsageError
from autoplan.options import MEMORY_FORMATS

from .console import json_text, print_result, stdout_kept_clean, tell, told_while_tracing
from .shared_options import DEFAULTS, PrecisionName, model_argument, output_option, rules_option


@click.command("profile")
@model_argument
@click.option("--hw", required=True, metavar="NAME|FILE", help="Hardware profile whose device this machine has.")
@click.option("--precision", type=PrecisionName(), default=DEFAULTS.precision, show_default=True)
@click.option("--tp", "degrees", metavar="1,2,...", help="Tensor-parallel degrees [all that fit into a host].")
@click.option("--micro-batch", "sizes", default="1,2,4", show_default=True, metavar="1,2,...", help="Samples.")
@click.option(
    "--compile",
    type=click.Choice(["off", "on", "both"]),
    default="off",
    show_default=True,
    help="Measure blocks and the loss eager, compiled, or both ways; to compile takes up to a minute each.",
)
@click.option(
    "--memory-format",
    type=click.Choice([*MEMORY_FORMATS, "both"]),
    default=MEMORY_FORMATS[0],
    show_default=True,
    help="How images lie in memory, for models with convolutions.",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Append results; go on where it ends.")
@click.option("--fresh", is_flag=True, help="Measure again what earlier runs of this machine, of any model, measured.")
@click.option("--emit", type=click.Path(path_type=Path), metavar="DIR", help="Only write the folder that measures.")
@click.option("--force", is_flag=True, help="Replace DIR if autoplan wrote it.")
@rules_option
@output_option
def profile_command(
    model: Path,
    overrides: tuple[str, ...],
    hw: str,
    degrees: str | None,
    sizes: str,
    device: str,
    out: Path | None,
    fresh: bool,
    emit: Path | None,
    force: bool,
    output_format: str,
    **options: Any,
) -> None:
    """Measure the parts of MODEL on one device of this machine, for --profile of plan and estimate.

    With --emit nothing is measured here: copy DIR to the machine and run `python DIR/measure.py` (needs torch).
    """
    from autoplan import api
    from autoplan.checks.options import parse_overrides
    from autoplan.files import check_target, write_folder
    from autoplan.measure_model.run import cache_file, count_results, run_measurements
    from autoplan.report.measured_profile import results_table

    if (out is None) == (emit is None):
        raise UsageError("profile: expected one of --out FILE and --emit DIR\n  fix: --out measured.json measures here")
    if emit is not None:
        check_target(emit, force=force, option="--emit")
    with stdout_kept_clean():
        files = api.measurement_folder(
            model,
            hw=hw,
            overrides=parse_overrides(overrides),
            degrees=() if degrees is None else _counts(degrees, option="--tp"),
            micro_batch_sizes=_counts(sizes, option="--micro-batch"),
            while_tracing=told_while_tracing(model),
            **options,
        )
    if emit is not None:
        write_folder(emit, files, force=force)
        run = f"python {emit}/measure.py --out measured.json"
        print_result(json_text({"folder": str(emit), "command": run}) if output_format == "json" else run)
    if out is not None:
        rows = run_measurements(files, out=out, device=device, cache=cache_file(fresh))
        found = {"out": str(out), **count_results(rows)}
        print_result(json_text(found) if output_format == "json" else results_table(rows))


@click.group("hw")
def hw_group() -> None:
    """List, show, validate, measure and price hardware profiles."""


@hw_group.command("list")
@output_option
def hw_list(output_format: str) -> None:
    """Every hardware profile that comes with autoplan."""
    from autoplan.hardware import hardware_names, load_hardware_profile
    from autoplan.report.hardware import hardware_list

    profiles = [load_hardware_profile(name) for name in hardware_names()]
    if output_format == "json":
        rows = [{"name": item.name, "description": item.description} for item in profiles]
        print_result(json_text({"profiles": rows}))
    else:
        print_result(hardware_list(profiles))


@hw_group.command("show")
@click.argument("name")
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True)
@output_option
def hw_show(name: str, hosts: int, output_format: str) -> None:
    """Every figure of a hardware profile, with its source."""
    from autoplan.hardware import load_hardware_profile
    from autoplan.report.hardware import hardware_sheet

    hardware = load_hardware_profile(name, n_hosts=hosts)
    print_result(json_text(asdict(hardware)) if output_format == "json" else hardware_sheet(hardware))


@hw_group.command("validate")
@click.argument("file", type=click.Path(path_type=Path))
@output_option
def hw_validate(file: Path, output_format: str) -> None:
    """Check a hardware profile or a mixed cluster of your own."""
    from autoplan.hardware import validate_file
    from autoplan.hardware.cluster import is_cluster_file, load_cluster
    from autoplan.hardware.usual import unusual_of_file

    name = load_cluster(file).name if is_cluster_file(file) else validate_file(file).name
    warnings = unusual_of_file(file)
    found = {"valid": True, "name": name, "warnings": warnings}
    for warning in warnings:
        click.echo(f"warning: {file}: {warning}", err=True)
    print_result(json_text(found) if output_format == "json" else f"{file}: valid ({name})")


@hw_group.command("measure")
@click.option("--out", required=True, metavar="FILE.toml", type=click.Path(path_type=Path), help="Hardware profile.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--json", "with_json", is_flag=True, help="Write every time beside the profile, as FILE.json.")
@click.option("--force", is_flag=True, help="Replace the files.")
@output_option
def hw_measure(out: Path, output_format: str, **options: Any) -> None:
    """Measure this host, and write its hardware profile: devices, links between them, and what overlap costs.

    One device by itself; all of a host under: torchrun --standalone --nproc-per-node N -m autoplan hw measure ...
    """
    from autoplan.measure_hardware.measure import measure_host
    from autoplan.report.hardware import hardware_sheet

    with stdout_kept_clean():
        hardware = measure_host(out, **options, progress=tell)
    if hardware is not None:
        tell(f"wrote {out}")
        print_result(json_text(asdict(hardware)) if output_format == "json" else hardware_sheet(hardware))


@hw_group.command("prices")
@click.argument("catalogs", metavar="[VMS.CSV]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--date", "day", metavar="YYYY-MM-DD", help="When the catalogs were made. [today]")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["toml", "json"]),
    default="toml",
    show_default=True,
    help="toml: what --prices reads.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def hw_prices(catalogs: tuple[Path, ...], day: str | None, output_format: str) -> None:
    """Print the prices that come with autoplan, or those of SkyPilot catalogs, as a file for --prices."""
    import tomllib

    from autoplan.files import read_text_file
    from autoplan.hardware.file import shipped_prices
    from autoplan.what_if.prices import catalog_prices, read_prices

    try:
        made = date.today() if day is None else date.fromisoformat(day)
    except ValueError:
        raise UsageError(f"--date: found {day!r}\n  expected: a day such as 2026-05-01") from None
    texts = {path.name: read_text_file(path) for path in catalogs}
    found = catalog_prices(texts, names=read_prices(), day=made) if catalogs else shipped_prices()
    print_result(json_text(tomllib.loads(found)) if output_format == "json" else found)


@click.command("doctor")
@output_option
def doctor_command(output_format: str) -> None:
    """Versions, devices, links, and what is missing."""
    from autoplan.doctor import diagnose
    from autoplan.plain_text import text_table

    findings = diagnose()
    if output_format == "json":
        print_result(json_text({"findings": [asdict(item) for item in findings]}))
    else:
        print_result(
            text_table(("", "found", "to fix"), [(item.name, item.found, item.fix or "") for item in findings])
        )


def _counts(text: str, *, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"{option}: found {text!r}\n  expected: counts separated by commas, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))
