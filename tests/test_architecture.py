"""The import rules: torch, the solver, printing and files each have their place, and nothing leaks out of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import networkx as nx
import pytest

import autoplan
from autoplan.registry import load_table

CHECKOUT = Path(__file__).parent.parent
PACKAGE = CHECKOUT / "autoplan"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(CHECKOUT / "cost_models").glob("*.py")])
TORCH_PLACES = (
    *(f"autoplan/tracing/{name}.py" for name in ("constant_masks", "dissolved", "given_values", "in_place_writes")),
    *(f"autoplan/tracing/{name}.py" for name in ("module_level", "optimizer_trial", "overlaid_graph", "returned_loss")),
    *(f"autoplan/tracing/{name}.py" for name in ("batches", "operand_dtypes", "places", "same_operators")),
    *(
        f"autoplan/tracing/{name}.py"
        for name in (
            "known_branches",
            "meta_autocast",
            "model_source",
            "refused_writes",
            "second_run",
            "shapes_by_values",
            "sync_batch_norm",
            "trace",
            "host_reads",
            "whole_dropout",
            "written_slices",
        )
    ),
    "autoplan/measuring_program/",
    *(f"autoplan/measure_hardware/{name}.py" for name in ("measure", "device", "links")),
    *(f"autoplan/measure_hardware/{name}.py" for name in ("pipeline_host_time", "zero_host_time")),
    "autoplan/tensor_parallel/rule_trials.py",
    "autoplan/runtime/",
)
SOLVER_PLACES = ("autoplan/solver/second_solver.py", "autoplan/solver/solve.py")
PRINTING_PLACES = ("autoplan/cli/", "autoplan/runtime/")
# Readers of hardware files, the reader and writer of whole files, the cache, what starts a program and reads its
# report, the code generator, which reads its templates and the runtime it copies, and what is copied itself.
FILE_PLACES = (
    "autoplan/cli/",
    "autoplan/codegen/",
    "autoplan/files.py",
    "autoplan/hardware/file.py",
    "autoplan/tracing/hugging_face.py",  # reads a configuration, writes the model file that stands for it
    "autoplan/measuring_program/",
    "autoplan/measure_hardware/",  # NCCL's log, and the hardware profile
    "autoplan/output/alone.py",
    "autoplan/output/verify.py",
    "autoplan/runtime/",
    "autoplan/solver/solve.py",  # the null device, which takes what the solver prints
    "autoplan/tracing/trace.py",
    "autoplan/user_cache.py",
)
FILE_CALLS = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdtemp"}
# What knows only numbers: neither the model, nor the hardware, nor the rules that made the numbers.
NUMBERS_ONLY = (
    "autoplan/search/",
    "autoplan/simulator/",
    "autoplan/schedules/",
)
_MEASURED = ("measure_model", "measured_profile", "measuring_program")
_OF_MODEL = (*_MEASURED, "analysis", "codegen", "graph", "layout", "rules", "tensor_parallel", "tracing")
_ABOVE = ("answers", "api", "checks", "planning", "space", "what_if")
MODEL_AND_HARDWARE = tuple(f"autoplan.{name}." for name in (*_OF_MODEL, *_ABOVE, "hardware"))


def _name(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _imported(path: Path) -> tuple[str, ...]:
    return tuple(_names_in(_tree(path)))


@cache
def _imported_to_run(path: Path) -> tuple[str, ...]:
    return tuple(_names_in(_without_type_checking(ast.parse(path.read_text()))))


def _without_type_checking(tree: ast.Module) -> ast.Module:
    """The module as it runs: `if TYPE_CHECKING:` blocks removed."""

    class _Remover(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if is_typing else self.generic_visit(node)

    return _Remover().visit(tree)


def _importers(package: str) -> list[str]:
    return [
        _name(path)
        for path in SOURCES
        if any(name == package or name.startswith(package + ".") for name in _imported_to_run(path))
    ]


@cache
def _called(path: Path) -> set[str]:
    calls = (node.func for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))
    return {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}


def _callers(names: set[str]) -> list[str]:
    return [_name(path) for path in SOURCES if _called(path) & names]


def test_the_scanner_sees_an_import_inside_a_function() -> None:
    # torch is imported in trace.py, ortools inside a function of solver/solve.py: a blind scanner would find neither
    assert "autoplan/tracing/trace.py" in _importers("torch")
    assert sorted(_importers("ortools")) == list(SOLVER_PLACES)


def test_torch_is_imported_only_by_trace_measure_and_runtime() -> None:
    assert [name for name in _importers("torch") if not name.startswith(TORCH_PLACES)] == []


def test_the_solver_is_imported_only_by_solver() -> None:
    assert [name for name in _importers("ortools") if name not in SOLVER_PLACES] == []


def test_only_the_command_line_prints() -> None:
    assert [name for name in _callers({"print", "echo"}) if not name.startswith(PRINTING_PLACES)] == []


def test_only_loaders_writers_and_the_command_line_open_files() -> None:
    assert [name for name in _callers(FILE_CALLS) if not name.startswith(FILE_PLACES)] == []


def test_search_and_simulate_know_neither_model_nor_hardware() -> None:
    for path in _numbers_only():
        imported = set(_imported_to_run(path))
        assert not [name for name in imported if f"{name}.".startswith(MODEL_AND_HARDWARE)], _name(path)


def _numbers_only() -> list[Path]:
    paths = [path for path in SOURCES if _name(path).startswith(NUMBERS_ONLY)]
    assert {_name(path).rpartition("/")[0] + "/" for path in paths} >= set(NUMBERS_ONLY), "a package is missing"
    return paths


def _units() -> Iterator[tuple[str, str]]:
    """(importer, imported) of all packages of `autoplan`, and of the modules beside them, imports for types too."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in PACKAGE.rglob("*.py"):
        importer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in _imported(path):
            parts = name.split(".")
            if parts[0] == "autoplan" and len(parts) > 1 and parts[1] in names - {importer, "cost_models"}:
                yield importer, parts[1]


def test_no_packages_import_each_other_in_a_circle() -> None:
    graph = nx.DiGraph(_units())
    assert graph.has_edge("search", "cost"), "the scanner is blind"
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_only_what_writes_reports_imports_them() -> None:
    importers = {importer for importer, imported in _units() if imported in ("report", "html_report")}
    assert importers == {"api", "cli", "html_report", "output"}


def test_of_costs_the_search_sees_the_table_only() -> None:
    for path in _numbers_only():
        of_cost = {name for name in _imported(path) if name.startswith("autoplan.cost.")}
        assert all(name.startswith("autoplan.cost.table") for name in of_cost), _name(path)


def test_extension_folders_are_never_imported_by_their_bare_names() -> None:
    assert _importers("cost_models") == []
    assert _importers("hardware_profiles") == []


def test_runtime_imports_only_torch_the_standard_library_and_itself() -> None:
    paths = sorted((PACKAGE / "runtime").rglob("*.py"))
    assert paths, "the runtime is missing"
    for path in paths:
        roots = {name.partition(".")[0] for name in _imported(path)}
        assert roots <= {"torch", *sys.stdlib_module_names}, _name(path)


def test_folders_of_the_runtime_need_one_another_in_one_direction() -> None:
    runtime = PACKAGE / "runtime"
    needed: dict[str, set[str]] = {}  # by folder, or by module outside of one
    for path in (path for path in runtime.rglob("*.py") if path.parent != runtime or path.stem != "__init__"):
        own = path.stem if path.parent == runtime else path.parent.name
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == (1 if path.parent == runtime else 2):
                needed.setdefault(own, set()).add(node.module.partition(".")[0])
    assert len(list(TopologicalSorter(needed).static_order())) > 20  # raises CycleError where they do not


def test_importing_autoplan_loads_neither_torch_nor_the_solver() -> None:
    code = "import sys, autoplan, autoplan.cli; print(*[m for m in ('torch', 'ortools') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=True)
    assert done.stdout.strip() == ""


def test_copying_the_runtime_into_a_program_does_not_import_torch() -> None:
    code = (
        "import sys; from autoplan.codegen import runtime_files; assert runtime_files(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=True)
    assert done.stdout.strip() == "False"


def test_public_names_are_sorted_and_all_resolve() -> None:
    assert autoplan.__all__ == sorted(autoplan.__all__)
    for name in autoplan.__all__:
        assert getattr(autoplan, name) is not None


def test_no_public_name_is_also_a_module() -> None:
    # `import autoplan.x` would replace the public name x by the module
    modules = {path.stem for path in PACKAGE.iterdir()} | {"cost_models", "hardware_profiles"}
    assert not modules & set(autoplan.__all__)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert not path.read_text().strip() or ast.get_docstring(_tree(path))


MAPPED = [*sorted(PACKAGE.rglob("__init__.py")), CHECKOUT / "cost_models" / "__init__.py"]


@pytest.mark.parametrize("package", MAPPED, ids=lambda path: path.parent.name)
def test_every_package_has_a_map_that_names_its_modules(package: Path) -> None:
    words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(package.read_text())) or ""))
    modules = {path.stem for path in package.parent.glob("*.py") if not path.stem.startswith("__")}
    packages = {path.parent.name for path in package.parent.glob("*/__init__.py")}
    assert sorted((modules | packages) - words) == []


def test_the_readme_names_every_package() -> None:
    section = (CHECKOUT / "README.md").read_text().split("## How it works")[1].split("\n## ")[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(packages - set(re.findall(r"`(\w+)/`", section))) == []


@pytest.mark.parametrize(
    ("package", "table"),
    [
        ("autoplan.cost_models", "COLLECTIVES"),
        ("autoplan.schedules", "SCHEDULES"),
    ],
)
def test_every_function_of_every_table_is_documented(package: str, table: str) -> None:
    entries = load_table(package, table)
    assert entries, f"{package} has no {table}"
    for key, entry in entries.items():
        assert (entry.__doc__ or "").strip(), f"{table}[{key!r}]"
