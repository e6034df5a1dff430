"""One problem on a mixed cluster as the search sees it; `priced` does the same for one kind of host.

    each group                        --priced_space-->        the plans inside of it
    pipelines, shares of the batch    --make_mixed_pricer-->   layouts solved for the first group, priced on each

A plan on a mixed cluster says on which groups its pipeline ranks, or shares of the batch, are (`Plan.groups`), also
when it is one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd

from autoplan.answers.intervals import memory_margin
from autoplan.cost.grad_compression import Compression
from autoplan.cost.mixed_price import make_mixed_pricer
from autoplan.cost.table import CostTable
from autoplan.errors import UsageError
from autoplan.graph import OpGraph
from autoplan.hardware.cluster import Cluster
from autoplan.options import AS_COMPUTED, Options
from autoplan.parallel_plan import GroupRanks, Mesh, Plan, StagePlan
from autoplan.rules import load_rules
from autoplan.search.meshes import MakePlan, divisors, fixed, fixed_int
from autoplan.search.mixed.meshes import Groups, GroupSpace, MixedSpace
from autoplan.space.choices import compression_choice, default_batch_norm, loss_choice
from autoplan.space.layouts import of_size, shardings_by_size
from autoplan.space.priced import priced_space


def mixed_space(graph: OpGraph, cluster: Cluster, options: Options, *, global_batch: int) -> MixedSpace:
    """Everything that may be searched on the cluster.

    Raises: UsageError for an option that no mixed cluster has.
    """
    check_mixed_options(options, cluster)
    _check_weights(graph, cluster)
    offered = [priced_space(graph, group, options, global_batch=global_batch) for group in cluster.groups]
    rules = load_rules(options.rules)
    pricers = {
        size: make_mixed_pricer(
            graph,
            cluster=cluster,
            precision=options.precision,
            shardings=shardings,
            rules=rules,
            loss=loss_choice(options),
            compression=compression_choice(options),
            memory_margin=partial(memory_margin, confidence=options.memory_confidence),
        )
        for size, shardings in shardings_by_size(graph, cluster.groups[0], options, rules).items()
    }
    return MixedSpace(
        groups=tuple(
            GroupSpace(own.space, own.price, partial(_plan_in_group, own.make_plan, cluster, index))
            for index, own in enumerate(offered)
        ),
        pipelines=replace(
            offered[0].space,
            n_devices=cluster.n_devices,
            n_devices_per_host=_common_host_size(cluster),
            n_devices_joined=None,
        ),
        price=lambda mesh, groups: of_size(pricers, mesh)(mesh, groups),
        make_plan=partial(_plan_over_groups, offered[0].make_plan, cluster),
        layout_sizes=tuple(pricers),
        batch_norm=default_batch_norm(graph),
    )


def price_mixed_plan(
    graph: OpGraph,
    cluster: Cluster,
    plan: Plan,
    *,
    rule_files: Sequence[str] = (),
    memory_confidence: float = AS_COMPUTED,
) -> CostTable:
    """The cost table of one given plan, as `priced.price_plan`."""
    price = make_mixed_pricer(
        graph,
        cluster=cluster,
        precision=plan.precision,
        shardings={(plan.mesh.tp, plan.mesh.sharding): plan.shardings},
        rules=load_rules(rule_files),
        loss=plan.loss,
        compression=Compression(plan.grad_compression, plan.powersgd_rank),
        memory_margin=partial(memory_margin, confidence=memory_confidence),
    )
    return price(plan.mesh, plan.groups)


def check_mixed_options(options: Options, cluster: Cluster) -> None:
    """Refuse what a mixed cluster cannot have, and name what to do instead."""
    alone = "or plan for a group alone: --hw " + " or --hw ".join(dict.fromkeys(g.name for g in cluster.groups))
    if options.objective == "cost":
        raise UsageError.of(
            "--objective",
            found="cost",
            expected=f"time, since a device-hour has several prices on {cluster.name}",
            fix=f"leave it out, {alone}",
        )
    if options.profile is not None:
        raise UsageError.of(
            "--profile",
            found=options.profile,
            expected=f"nothing: measurements are of one device, {cluster.name} has several kinds",
            fix=f"leave it out, {alone}",
        )
    for name, has_it in (("keep_attention", "keeps attention"), ("cuda_graph", "has its passes as a CUDA graph")):
        if fixed(options, name) == "on":
            raise UsageError.of(
                f"--fix {name}",
                found="on",
                expected=f"nothing: no plan over several groups of {cluster.name} {has_it}",
                fix=f"leave it out, {alone}",
            )
    tp, common = fixed_int(options, "tp"), _common_host_size(cluster)
    if tp is not None and common % tp != 0:
        hosts = ", ".join(f"{group.n_devices_per_host} ({group.name})" for group in cluster.groups)
        raise UsageError.of(
            f"--fix tp={tp}",
            found=f"{tp}, on hosts of {hosts} devices",
            expected="a divisor of the devices of every host",
            fix=f"use tp={' or tp='.join(map(str, divisors(common)))}, {alone}",
        )


def _check_weights(graph: OpGraph, cluster: Cluster) -> None:
    """Refuse a model that must be generated code, which no program has that shares the batch between groups."""
    if graph.replaces_weights:
        raise UsageError.of(
            "--hw",
            found=f"{cluster.name}, for a model that calls modules by torch.func.functional_call",
            expected="one kind of host",
            fix="plan for a group alone: --hw " + " or --hw ".join(dict.fromkeys(g.name for g in cluster.groups)),
        )


def _common_host_size(cluster: Cluster) -> int:
    return gcd(*(group.n_devices_per_host for group in cluster.groups))


def _plan_in_group(
    make_plan: MakePlan, cluster: Cluster, index: int, mesh: Mesh, stages: tuple[StagePlan, ...]
) -> Plan:
    return _on_cluster(make_plan(mesh, stages), cluster, (GroupRanks(index, mesh.pp),))


def _plan_over_groups(
    make_plan: MakePlan, cluster: Cluster, mesh: Mesh, groups: Groups, stages: tuple[StagePlan, ...]
) -> Plan:
    return _on_cluster(make_plan(mesh, stages), cluster, groups)


def _on_cluster(plan: Plan, cluster: Cluster, groups: Groups) -> Plan:
    named = tuple(replace(own, hardware=cluster.groups[own.group].name) for own in groups)
    return replace(plan, hardware=cluster.name, n_hosts=cluster.n_hosts, groups=named)
