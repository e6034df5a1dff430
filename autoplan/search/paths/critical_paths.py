"""The longest paths of a simulated step, read backwards from the end of each rank's part.

An action begins when the action before it on its rank stops, or when its input arrives. That leaves when its source
has stopped and the action before has, too, or, where ranks receive ahead, what `schedules.Call` names. Times are equal
to the last bit where one waits for the other, because each is the maximum of them.
"""

from __future__ import annotations

from collections import Counter

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import StagePlan
from autoplan.schedules import GRADIENT_KINDS, receives_ahead, result_boundary
from autoplan.search.paths.schedule_paths import CUT, Path, carry_symbol, counted, symbol_of
from autoplan.simulator.replay import Replay, replay_plan


def critical_paths(table: CostTable, stages: tuple[StagePlan, ...]) -> tuple[Path, ...]:
    """Per rank, the longest path to its last action; raises what `simulate` does."""
    replay = replay_plan(table, stages)
    trace = _Trace(replay, goes_ahead=receives_ahead(table.mesh.schedule))
    return tuple(dict.fromkeys(trace.path_to(places[-1]) for places in replay.places()))


class _Trace:
    """A replayed step that can be asked what an action waited for; actions are places in the order of the schedule."""

    def __init__(self, replay: Replay, *, goes_ahead: bool) -> None:
        self._ordered, self._runs, self._goes_ahead = replay.ordered, replay.runs(), goes_ahead
        # (when it leaves, when it arrives) of each result that travels
        self._sends = {
            source: (run.sent_s, run.arrived_s)
            for source, run in zip(self._ordered.awaited, self._runs, strict=True)
            if source is not None and run.arrived_s > run.sent_s
        }

    def path_to(self, place: int) -> Path:
        """The path that ends with this action."""
        counts: Counter[tuple[str, int]] = Counter()
        current: int | None = place
        while current is not None:
            own = self._ordered.passes[self._ordered.cues[current]]
            counts[symbol_of(own), own.stage] += 1
            current = self._before(current, counts)
        return counted(counts, last_stage=self._ordered.actions[place].stage)

    def _before(self, place: int, counts: Counter[tuple[str, int]]) -> int | None:
        """What an action waited for; transfers and carried communication in between are counted."""
        previous, source = self._ordered.before[place], self._ordered.awaited[place]
        if previous is not None and self._runs[previous].stop_s >= self._runs[place].start_s:
            own = self._ordered.passes[self._ordered.cues[previous]]
            if own.kind in GRADIENT_KINDS:
                counts[carry_symbol(symbol_of(own)), own.stage] += 1
            return previous
        if source is None or self._goes_ahead:
            return None if source is None else self._before_transfers(source, counts)
        self._count_cut(source, counts)
        is_free_later = previous is not None and self._runs[previous].stop_s > self._runs[source].stop_s
        return previous if is_free_later else source

    def _before_transfers(self, source: int, counts: Counter[tuple[str, int]]) -> int:
        """The action that set off the chain of transfers which ends with that of the result of `source`."""
        while source in self._sends:
            self._count_cut(source, counts)
            sent_s, call = self._sends[source][0], self._ordered.calls[source]
            assert call is not None
            if self._runs[source].stop_s >= sent_s:
                break
            if call.behind not in self._sends or self._sends[call.behind][1] < sent_s:
                return source if call.after is None or self._runs[call.after].stop_s < sent_s else call.after
            source = call.behind
        return source

    def _count_cut(self, source: int, counts: Counter[tuple[str, int]]) -> None:
        """Count the transfer of its result, if it travels."""
        stage, kind, _ = self._ordered.actions[source]
        if source in self._sends:
            counts[CUT, result_boundary(stage, kind)] += 1
