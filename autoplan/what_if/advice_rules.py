"""Rules of advice: each a claim about a model on these links, with the figures that it is made by (`advice_facts`).

The thresholds are computed for the model and its links; only what counts as much is fixed: `LITTLE` and `MUCH` of the
wall time spent waiting for communication, `DEARER` for the cost of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from autoplan.plain_text import count, rate_text
from autoplan.plan_words import CAPTURED, COMPILED
from autoplan.units import SECONDS_PER_HOUR, format_bytes, format_rate, format_seconds
from autoplan.what_if.advice_facts import (
    DEARER,
    LITTLE,
    MUCH,
    Advice,
    Facts,
    as_fast_as,
    efficiency,
    is_starved,
    passes,
    speed_up,
    stop_at,
)
from autoplan.what_if.conditions import SECONDS_PER_DAY
from autoplan.what_if.rows import WhatIfRow, off_by

WORTH = 0.01  # of speed: a cluster that gains less over a smaller one is no alternative to it
MANY_DEVICES, LONG_S = 256, 7 * SECONDS_PER_DAY  # from where on failures count
MAX_BATCH_FACTOR = 64
POOR_LINK = 0.5  # of the data-sheet rate of a link: a large all-reduce that reaches less has something in its way


# ------------------------------------------------------------------------------------------------------------- figures


def _share(row: WhatIfRow) -> str:
    return "no plan" if row.exposed_share is None else f"{row.exposed_share:.0%}"


def _waits(row: WhatIfRow) -> str:
    return "no plan" if row.exposed_share is None else f"{_share(row)} of the time waits for communication"


def _idle(row: WhatIfRow) -> str:
    return f", {row.n_idle_devices} of {row.n_devices} devices idle" if row.n_idle_devices else ""


def _unit(row: WhatIfRow) -> str:
    """What a model reads."""
    return "sample" if row.tokens_per_s is None else "token"


def _more(gain: float) -> str:
    """`+12%`; what is nothing has no minus."""
    return f"{round(gain - 1.0, 2) + 0.0:+.0%}"


def _fits(row: WhatIfRow) -> bool:
    return row.step_s is not None


def _meets(facts: Facts, row: WhatIfRow) -> bool:
    return facts.deadline_s is None or (row.train_s is not None and row.train_s <= facts.deadline_s)


# --------------------------------------------------------------------------------------------------------------- rules


def fewer_first(facts: Facts) -> Advice:
    """Fewer devices take as long as those that the other rules speak of, as far as can be told."""
    most = next((row for row in (stop_at(facts.hosts), facts.host) if row and _fewer(facts, row)), facts.host)
    found = _fewer(facts, most)
    row = found or facts.one
    fewer, more = count(row.n_devices, "device"), count(most.n_devices, "device")
    is_sure = row.step_s is not None and most.step_s is not None and row.step_s <= most.step_s
    return Advice(
        "fewer devices may be as fast",
        found is not None,
        f"take {fewer}: {'as' if is_sure else 'perhaps as'} fast as {more}",
        "no plan on one device or on hosts"
        if row.step_s is None or most.step_s is None
        else f"{fewer}: {format_seconds(row.step_s)} a step; {more}: {format_seconds(most.step_s)}, "
        f"off by {off_by(most)}",
    )


def _fewer(facts: Facts, most: WhatIfRow) -> WhatIfRow | None:
    """The fewest devices that may be as fast as `most`, and miss no deadline that it meets."""
    return next(
        (
            row
            for row in facts.in_a_host
            if row.n_devices < most.n_devices
            and as_fast_as(row, than=most)
            and (_meets(facts, row) or not _meets(facts, most))
        ),
        None,
    )


def feed_first(facts: Facts) -> Advice:
    """A device that waits for data gains nothing from others."""
    rows = [row for row in (facts.one, facts.host) if row.shares]
    waiting = max((dict(row.shares)["loading"] for row in rows), default=0.0)
    needed = f"; a host needs {facts.host.samples_per_s:,.0f} samples/s" if facts.host.samples_per_s else ""
    return Advice(
        "devices wait for data",
        waiting > LITTLE,
        "make loading faster before buying devices; n devices need n times the samples per second",
        f"{waiting:.0%} of the time waits for samples{'' if waiting else ', as far as loading was given'}{needed}",
    )


def busy_first(facts: Facts) -> Advice:
    """A device that waits for its host gains little from others."""
    rows = [row for row in (facts.one, facts.host) if row.shares]
    row = max(rows, key=lambda row: dict(row.shares)["launch"], default=None)
    waiting = dict(row.shares)["launch"] if row else 0.0
    return Advice(
        "the device waits for its host to launch kernels",
        waiting > LITTLE,
        f"keep devices busy first: {_busier(row, can_compile=facts.can_compile)}",
        f"{waiting:.0%} of the time waits for launches" + (f" on {count(row.n_devices, 'device')}" if row else ""),
    )


def _busier(row: WhatIfRow | None, *, can_compile: bool) -> str:
    """What shortens the wait for launches and is not in the plan; kernels of a CUDA graph are not waited for."""
    plan = row.plan or "" if row else ""
    is_captured, has_one_micro_batch = CAPTURED in plan, set(re.findall(r"\d+ x (\d+)", plan)) == {"1"}
    remedies = [
        *["larger micro-batches"] * (not has_one_micro_batch),
        *["compiled blocks (measure with autoplan profile --compile both)"] * (can_compile and COMPILED not in plan),
    ]
    if remedies and not is_captured:
        return ", ".join(remedies)
    left = "a larger batch" + (" or fewer devices" if row and row.n_devices > 1 else "")
    within = "" if is_captured else "in the passes, "
    return f"{left} is what remains; they wait for Python, {within}in the optimizer and between steps"


def mend_links(facts: Facts) -> Advice:
    """Links that reach little of their rate."""
    shares = {tier.name: tier.bus_efficiency for tier in facts.hardware.links}
    poor = ", ".join(name for name, share in shares.items() if share < POOR_LINK)
    texts = [
        f"{tier.name}: {format_rate(tier.bus_efficiency * tier.bytes_per_s)} of {format_rate(tier.bytes_per_s)}"
        for tier in facts.hardware.links
    ]
    return Advice(
        f"links reach less than {POOR_LINK:.0%} of their rate",
        bool(poor),
        f"look at {poor or 'them'} before buying: placement of devices, peer-to-peer access, NCCL's settings; then"
        " measure again with autoplan hw measure",
        "bus bandwidth of a large all-reduce, " + "; ".join(texts) if texts else "one device has no links",
    )


def stay_small(facts: Facts) -> Advice:
    """It fits on one device, or on a part of the host, and that is fast enough."""
    share = efficiency(facts.host, facts.one)
    cost = (
        ""
        if share is None
        else f"; on {facts.host.n_devices} devices a {_unit(facts.host)} costs {1 / share:.2f} times as much"
    )
    found = _enough(facts)
    row = found or facts.one
    devices = "one device" if row.n_devices == 1 else count(row.n_devices, "device")
    return Advice(
        f"fits on {devices}, and that is fast enough",
        found is not None,
        "stay on one device"
        if row.n_devices == 1
        else f"take {devices}: fewer miss the deadline, or are short of memory",
        (f"{devices}: {format_seconds(row.step_s)} a step{cost}" if row.step_s else f"does not fit on {devices}")
        + ("" if facts.deadline_s is not None else "; no deadline was given"),
    )


def _enough(facts: Facts) -> WhatIfRow | None:
    """The fewest devices, fewer than a host has, that meet the deadline; None without one."""
    if facts.deadline_s is None:
        return None
    parts = (row for row in facts.in_a_host if row.n_devices < facts.host.n_devices)
    return next((row for row in parts if _fits(row) and _meets(facts, row)), None)


def raise_batch(facts: Facts) -> Advice:
    """A small batch leaves devices idle, or waiting for communication."""
    enough = next((batch for batch, row in facts.batches if row.shares and not is_starved(row)), None)
    most = MAX_BATCH_FACTOR * facts.host.global_batch
    until = f"below {LITTLE:.0%}, and none idle, from batch {enough} on" if enough else f"no better with batch {most}"
    return Advice(
        "this batch is too small for a whole host",
        is_starved(facts.host),
        f"raise the batch, or accumulate gradients, to {enough} samples a step first"
        if enough
        else "run independent trainings on parts of the host; a larger batch does not help",
        f"{_waits(facts.host)} at batch {facts.host.global_batch}"
        + _idle(facts.host)
        + (f"; {until}" if facts.batches else ""),
    )


def data_parallel(facts: Facts) -> Advice:
    """It fits on one device, and the links of the host are fast."""
    share = efficiency(facts.host, facts.one)
    return Advice(
        "fits on one device, and the host's links are fast",
        _fits(facts.one)
        and facts.host.n_devices > 1
        and share is not None
        and not is_starved(facts.host)
        and _fewer(facts, facts.host) is None
        and _enough(facts) is None,
        "use the whole host by data parallelism"
        if not re.search(r"\b[tp]p (?!1\b)", facts.host.plan or "")
        else f"use the whole host, not by data parallelism alone: {facts.host.plan}",
        "no plan on one device or on the host"
        if share is None
        else f"{facts.host.n_devices} devices are {share * facts.host.n_devices:.2f} times as fast as one "
        f"(efficiency {share:.0%}), {_waits(facts.host)}{_idle(facts.host)}",
    )


def shard_state(facts: Facts) -> Advice:
    """The optimizer state is what does not fit."""
    limit = facts.hardware.device.memory_bytes
    return Advice(
        "does not fit on one device because of weights and optimizer state",
        not _fits(facts.one) and facts.state_bytes > limit >= facts.layer_bytes and _fits(facts.host),
        "shard them within the host (ZeRO)",
        f"state {format_bytes(facts.state_bytes)}, device {format_bytes(limit)}; "
        f"the host: {facts.host.plan or facts.host.status}",
    )


def drop_activations(facts: Facts) -> Advice:
    """Activations are what does not fit."""
    limit = facts.hardware.device.memory_bytes
    recomputed = dict(facts.host.shares).get("recompute", 0.0)
    return Advice(
        "activations do not fit beside the state",
        (not _fits(facts.one) and facts.state_bytes <= limit) or recomputed > LITTLE,
        "recompute, or split the sequence by tensor parallelism, before more ZeRO",
        f"state {format_bytes(facts.state_bytes)} of {format_bytes(limit)}; "
        f"the host's plan spends {recomputed:.0%} on recomputation",
    )


def split_layers(facts: Facts) -> Advice:
    """One layer alone is too large."""
    limit = facts.hardware.device.memory_bytes
    return Advice(
        "one layer does not fit on a device",
        facts.layer_bytes > limit,
        "tensor parallelism, within the host's fast links only",
        f"{facts.layer or 'the largest segment'}: {format_bytes(facts.layer_bytes)} of state, "
        f"device {format_bytes(limit)}",
    )


def leave_the_host(facts: Facts) -> Advice:
    """A whole host is too small."""
    first = next((row for row in facts.hosts if _fits(row)), None)
    return Advice(
        "a whole host does not hold it",
        not _fits(facts.host),
        "several hosts, by pipeline parallelism or sharding within each host; not ZeRO 3 over slow links"
        if first is None
        else f"at least {first.n_hosts} hosts: {first.plan}",
        f"one host: {facts.host.detail or facts.host.plan}",
    )


def not_over_two_hosts(facts: Facts) -> Advice:
    """The classic disappointment: the second host is slower than the first was."""
    gain = speed_up(facts.split, facts.half)
    n_half, n_all = facts.half.n_devices, facts.split.n_devices
    fits_inside = facts.host.n_devices >= n_all
    fix = speed_up(facts.host, facts.half) if facts.host.n_devices == n_all else None
    inside = "" if fix is None else f"; {n_all} devices in one host: {_more(fix)}"
    n_enough = (_fewer(facts, facts.host) or facts.half).n_devices
    advice = f"take {count(n_enough, 'device')}, or a larger batch: {n_all} may be no faster, in one host too"
    if not fits_inside:
        advice = "do not add a second host for speed: take a faster network, or a larger batch"
    elif not as_fast_as(facts.half, than=facts.host):
        advice = (
            f"do not add a second host for speed: take {n_all} devices in one host, a faster network, or a larger batch"
        )
    return Advice(
        f"{n_all} devices over two hosts instead of {n_half} in one",
        gain is not None and gain < 1.0 + MUCH,
        advice,
        "no plan"
        if gain is None
        else f"{_more(gain)} speed for {n_all / n_half:.0f} times the devices{_idle(facts.split)}{inside}",
    )


def meet_deadline(facts: Facts) -> Advice:
    """One host is not fast enough."""
    first = _in_time(facts)
    found = "no number of hosts looked at is fast enough"
    if first is not None and first.train_s is not None:
        found = f"{count(first.n_hosts, 'host')}: {format_seconds(first.train_s)}"
    return Advice(
        "one host misses the deadline",
        facts.deadline_s is not None and not (_fits(facts.host) and _meets(facts, facts.host)),
        "ask for a later deadline, faster hosts, or fewer samples"
        if first is None
        else f"take {first.n_hosts} hosts for the deadline",
        "no deadline was given" if facts.deadline_s is None else found,
    )


def _in_time(facts: Facts) -> WhatIfRow | None:
    """The fewest hosts that meet the deadline."""
    return next((row for row in facts.hosts if _fits(row) and _meets(facts, row)), None)


def add_hosts(facts: Facts) -> Advice:
    """The network keeps up."""
    last = stop_at(facts.hosts)
    return Advice(
        "the network keeps up with more hosts",
        last is not None and last.n_hosts > 1,
        f"up to {last.n_hosts if last else 1} hosts cost little more a {_unit(facts.host)}",
        "no plan on whole hosts"
        if last is None
        else f"up to {last.n_devices} devices a {_unit(last)} costs at most {DEARER - 1:.0%} more than at its "
        f"cheapest; {_share(last)} waits for communication there",
    )


def stop_scaling(facts: Facts) -> Advice:
    """Strong scaling ends."""
    last, little, much = stop_at(facts.hosts), passes(facts.hosts, LITTLE), passes(facts.hosts, MUCH)
    texts = [
        f"communication passes {share:.0%} at {row.n_devices} devices"
        for share, row in ((LITTLE, little), (MUCH, much))
        if row is not None
    ]
    most = facts.hosts[-1]
    gains = [gain for row in facts.hosts if last is not None and (gain := speed_up(row, last)) is not None]
    until = (
        f"; more of them gain less than {WORTH:.0%}"
        if max(gains, default=1.0) < 1.0 + WORTH
        else ", unless time is worth more than devices"
    )
    return Advice(
        "more hosts only shrink the share of each",
        last is not None and last.n_hosts < most.n_hosts,
        f"stop at {count(last.n_hosts if last else 1, 'host')} with batch {most.global_batch}{until};"
        " a larger batch scales further",
        ("; ".join(texts) or f"communication stays below {LITTLE:.0%} up to {most.n_devices} devices") + _idle(most),
    )


def failures_first(facts: Facts) -> Advice:
    """Large or long runs fail; looked at on the most hosts that other rules may speak for."""
    advised = [row for row in (stop_at(facts.hosts), _in_time(facts)) if row is not None]
    row = max(advised, key=lambda row: row.n_devices, default=facts.hosts[0])
    is_large = row.n_devices > MANY_DEVICES or (row.train_s or 0.0) > LONG_S
    lost = sum(dict(row.shares).get(name, 0.0) for name in ("checkpoints", "failures", "no_spare"))
    return Advice(
        f"more than {MANY_DEVICES} devices, or more than a week",
        is_large and row.mtbf_s is not None,
        "plan for failures first: spare hosts, fast checkpoints, automatic restart",
        f"{row.n_devices} devices: a failure every {rate_text((row.mtbf_s or 0.0) / SECONDS_PER_HOUR)} h, "
        f"a checkpoint every {row.checkpoint_interval_steps} steps, {lost:.1%} of the time lost"
        if row.mtbf_s is not None
        else "no plan",
    )


def rent_or_own(facts: Facts) -> Advice:
    """Owned hardware that stands idle."""
    share = facts.host.break_even_utilisation
    return Advice(
        "own hardware is used less than the break-even",
        share is not None
        and facts.host.own_cost_usd is not None
        and facts.host.own_cost_usd > (facts.host.cost_usd or 0),
        "rent",
        "no own hardware was given ([money.own]), or no amount to train on"
        if share is None
        else f"owning is cheaper above {share:.0%} of the hours in use",
    )


RULES: tuple[Callable[[Facts], Advice], ...] = (
    fewer_first,
    feed_first,
    busy_first,
    mend_links,
    leave_the_host,
    split_layers,
    stay_small,
    raise_batch,
    data_parallel,
    shard_state,
    drop_activations,
    not_over_two_hosts,
    meet_deadline,
    stop_scaling,
    add_hosts,
    failures_first,
    rent_or_own,
)
