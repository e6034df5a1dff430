"""Advise: should this model go multi-device on these links, and how? Each rule is a claim with figures of its own.

    one device -> 2, 4, ... up to half a host -> a host -> the same devices over two hosts -> 2, 4, ... hosts   `look`
    Facts -> rules -> Advice, in the order of `RULES`; those that apply are the verdict

All clusters train the same global batch (strong scaling), and every figure is of searched plans; see `advice_rules`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import date
from typing import Any

from autoplan.cost.parameters import element_bytes
from autoplan.errors import UsageError
from autoplan.graph import OpGraph
from autoplan.hardware import HardwareProfile
from autoplan.hardware.cluster import is_cluster_file, load_hardware
from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.planning.problem import default_global_batch
from autoplan.what_if.advice_facts import STOPPED, AdviceAnswer, Facts, is_starved
from autoplan.what_if.advice_rules import MAX_BATCH_FACTOR, RULES
from autoplan.what_if.advising_mixed import advise_mixed
from autoplan.what_if.asking import Progress, ask, continued, trace_all
from autoplan.what_if.points import combinations
from autoplan.what_if.question import Question, check_single, checked_question
from autoplan.what_if.row_tables import row_to_dict
from autoplan.what_if.rows import WhatIfRow
from autoplan.what_if.sweep import INTERRUPTED


def advise(
    question: Question,
    *,
    max_hosts: int = 64,
    deadline_s: float | None = None,
    n_jobs: int = 1,
    today: date | None = None,
    progress: Progress = lambda done, total: None,
) -> AdviceAnswer:
    """What the rules say of a model on the one kind of host that the question names; `question.hosts` is not looked at.

    Of a mixed cluster it is whether its groups should train together; see `advising_mixed`.

    Raises: InputError for what a what-if cannot be asked.
    """
    question = checked_question(question, where="advise")
    check_single(question, where="advise")
    if is_cluster_file(question.hw[0]):
        return advise_mixed(question, deadline_s=deadline_s, n_jobs=n_jobs, today=today, progress=progress)
    facts = look(question, max_hosts=max_hosts, deadline_s=deadline_s, n_jobs=n_jobs, today=today, progress=progress)
    if not isinstance(facts, Facts):
        return AdviceAnswer(STOPPED, (), facts, is_interrupted=True)
    rules = tuple(rule(facts) for rule in RULES)
    applying = [item.advice for item in rules if item.applies]
    rows = {repr(row): row for row in (*facts.in_a_host, facts.split, *facts.hosts)}
    return AdviceAnswer("; ".join(applying) or NO_RULE, rules, tuple(rows.values()))


NO_RULE = "no rule applies: a host without much communication; compare more hosts with autoplan whatif"


def look(
    question: Question,
    *,
    max_hosts: int,
    deadline_s: float | None,
    n_jobs: int,
    today: date | None,
    progress: Progress,
) -> Facts | tuple[WhatIfRow, ...]:
    """Search everything that the rules need; after an interrupt, the rows found until then.

    Raises: UsageError for more than one kind of host.
    """
    name = question.hw[0]
    hardware = load_hardware(name, n_hosts=2)  # with the network between them
    if not isinstance(hardware, HardwareProfile) or len(question.hw) > 1:
        raise UsageError.of("--hw", found=", ".join(question.hw), expected="one kind of host", fix="name one profile")
    n_devices = hardware.n_devices_per_host
    batch = (question.global_batches or (default_global_batch(n_devices),))[0]
    powers = [2**k for k in range(21)]
    counts = [count for count in powers if count <= max_hosts]
    parts = [fragment(name, count) for count in powers if count == 1 or 2 * count < n_devices]
    half = fragment(name, max(1, n_devices // 2))
    wanted = [*((part, (1,)) for part in parts), (half, (1, 2)), (name, tuple(counts))]
    found: dict[tuple[str, int], WhatIfRow] = {}
    n_all = sum(len(hosts) for _, hosts in wanted)
    for hw, hosts in wanted:
        asked = replace(question, hw=(hw,), hosts=hosts, global_batches=(batch,))
        answer = ask(asked, n_jobs=n_jobs, today=today, progress=continued(progress, n_before=len(found), n_all=n_all))
        found.update({(hw, row.n_hosts): row for row in answer.rows if row.status != INTERRUPTED})
        if answer.sweep.is_interrupted:
            return tuple(found.values())
    batches, is_interrupted = _larger_batches(question, found[name, 1], n_jobs=n_jobs, today=today)
    if is_interrupted:
        return (*found.values(), *(row for _, row in batches))
    graph = next(iter(trace_all(question, combinations(question.sweeps, fixed=question.overrides)[:1]).values()))
    layer, layer_bytes = _largest_segment(graph, question.precisions[0])
    return Facts(
        hardware=hardware,
        one=found[parts[0], 1],
        between=tuple(found[part, 1] for part in parts[1:]),
        half=found[half, 1],
        host=found[name, 1],
        split=found[half, 2],
        hosts=tuple(found[name, count] for count in counts),
        batches=batches,
        state_bytes=graph.n_parameters() * _element_bytes(graph, question.precisions[0]),
        layer_bytes=layer_bytes,
        layer=layer,
        deadline_s=deadline_s,
        can_compile=not graph.is_module_level,
    )


def fragment(name: str, n_devices: int) -> str:
    """The name of the same hosts with `n_devices` of each."""
    base, plus, network = (name, "", "") if name.rpartition("+")[2].endswith(".toml") else name.partition("+")
    head, _, tail = base.rpartition("/")
    base = head if head and tail.isdecimal() else base
    return f"{base}/{n_devices}{plus}{network}"


def _larger_batches(
    question: Question, host: WhatIfRow, *, n_jobs: int, today: date | None
) -> tuple[tuple[tuple[int, WhatIfRow], ...], bool]:
    """Whole host with 2, 4, ... times the batch, until it feeds all devices, and whether an interrupt ended that."""
    found: list[tuple[int, WhatIfRow]] = []
    row, factor = host, 2
    while row.exposed_share is not None and is_starved(row) and factor <= MAX_BATCH_FACTOR:
        batch = factor * host.global_batch
        asked = replace(question, hw=(host.hardware,), hosts=(1,), global_batches=(batch,))
        answer = ask(asked, n_jobs=n_jobs, today=today)
        if answer.sweep.is_interrupted:
            return tuple(found), True
        row = answer.rows[0]
        found.append((batch, row))
        factor *= 2
    return tuple(found), False


def _element_bytes(graph: OpGraph, precision: str) -> int:
    """Of one parameter on a device that shares nothing: weights, master copy, state, gradient."""
    size = element_bytes(precision, graph.n_optimizer_states)
    return size.master + size.optimizer + size.gathered + size.reduced


_NO_BLOCK = "what lies outside of the blocks"


def _largest_segment(graph: OpGraph, precision: str) -> tuple[str, int]:
    """Its name, or words where it is no block, and bytes of weights, gradients and optimizer state."""
    specs = graph.specs()
    trainable = {item.name for item in graph.parameters if item.is_trainable}
    sizes = [
        (
            segment.name if segment.is_block else _NO_BLOCK,
            sum(specs[name].n_elements(1) for name in segment.parameters if name in trainable),
        )
        for segment in graph.segments
    ]
    name, n_elements = max(sizes, key=lambda item: item[1])
    return name, n_elements * _element_bytes(graph, precision)


def advice_to_dict(answer: AdviceAnswer) -> dict[str, Any]:
    """The answer as JSON values; rows are those of `whatif_schema`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": answer.verdict,
        "rules": [asdict(item) for item in answer.rules],
        "rows": [row_to_dict(row) for row in answer.rows],
        "is_interrupted": answer.is_interrupted,
    }
