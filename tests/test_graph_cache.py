"""Cached graphs: read instead of traced, and never stale or trusted when damaged."""

from pathlib import Path

import pytest

from autoplan import user_cache
from autoplan.tracing.graph_cache import cached_graph
from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

MODEL = (Path(__file__).parent.parent / "examples" / "mlp.py").read_text()


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def counted(path, overrides, calls):
    def trace():
        calls.append(overrides)
        return trace_model(model_source(path, overrides))

    return cached_graph(path, overrides, trace)


def test_a_second_call_reads_the_same_graph_without_tracing(model):
    calls = []
    first, second = counted(model, {"width": 8}, calls), counted(model, {"width": 8}, calls)
    assert first == second
    assert len(calls) == 1


def test_another_override_or_another_text_is_traced_anew(model):
    calls = []
    counted(model, {"width": 8}, calls)
    counted(model, {"width": 16}, calls)
    model.write_text(MODEL + "\n# changed\n")
    counted(model, {"width": 8}, calls)
    assert len(calls) == 3


def test_a_damaged_entry_is_traced_anew_and_replaced(model):
    calls = []
    graph = counted(model, {"width": 8}, calls)
    (entry,) = (model.parent / "cache" / "graphs").glob("*.json")
    entry.write_text(entry.read_text().replace("linear", "lineaR", 1))
    assert counted(model, {"width": 8}, calls) == graph
    assert counted(model, {"width": 8}, calls) == graph
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_costs_only_the_trace(model, monkeypatch):
    (model.parent / "file").write_text("")
    monkeypatch.setattr(user_cache, "user_cache_dir", lambda name: str(model.parent / "file"))
    calls = []
    assert counted(model, {"width": 8}, calls) == counted(model, {"width": 8}, calls)
    assert len(calls) == 2
