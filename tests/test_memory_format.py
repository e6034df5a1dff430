"""Images in channels_last as a choice of the plan: exact, priced, and beside measurements searched if measured."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from distributed.launch import run_ranks
from distributed.programs import EXAMPLES, check_programs, graph_of, make_plan, write_programs
from made_once import made_once
from torch import nn
from torch._prims_common import suggest_memory_format  # what operators of torch read from strides
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan import api
from autoplan.analysis.executions import execution_of, image_kinds
from autoplan.checks.plan import check_plan
from autoplan.errors import UsageError
from autoplan.hardware import load_hardware_profile
from autoplan.live import trace
from autoplan.measure_model.run import run_measurements
from autoplan.measured_profile.segment_times import parse_measured_profile
from autoplan.options import MEMORY_FORMATS, Options
from autoplan.parallel_plan import Execution
from autoplan.processes import start_process
from autoplan.report.measured_profile import results_table
from autoplan.report.plan import plan_report
from autoplan.runtime.input_pipeline.memory_format import plainly_channels_last, take_images
from autoplan.runtime.tensor_parallel import collectives
from autoplan.space.choices import executions

TOLERANCE = 1e-9
CHANNELS_LAST = Execution(memory_format="channels_last")
H200 = load_hardware_profile("h200_x4").device
RESNET = EXAMPLES.parent / "tests/families/resnet.py"
SIZES = {"depths": (2, 2)}


def in_channels_last(model, **fields):
    return model, make_plan(model, memory_format="channels_last", **fields)


class ConvolutionInputs(TorchDispatchMode):
    """Whether the input of each convolution lies in channels_last, by the strides that torch goes by."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.found.append(suggest_memory_format(args[0]) == torch.channels_last)
        if func is torch.ops.aten.convolution_backward.default:
            self.found.append(suggest_memory_format(args[1]) == torch.channels_last)
        return func(*args, **(kwargs or {}))


def checked_and_watched(root, rows):
    """On one rank: differences from one process, and the order of what each convolution of a step reads."""
    differences = check_programs(root, rows, 2)
    runtime, orders = importlib.import_module("runtime"), {}
    for name, overrides, fields, is_rewritten in rows:
        config = runtime.Config(**fields)
        model_file = importlib.import_module(f"model_{name}")
        parallel = importlib.import_module(f"parallel_{name}") if is_rewritten else None
        mesh = runtime.build_rank_mesh(config, "cpu")
        model = runtime.ParallelModel(config, model_file, parallel, mesh=mesh, overrides=overrides)
        torch.manual_seed(mesh.dp_rank)
        batch = model_file.make_batch(config.micro_batch_size * config.n_micro_batches)
        with ConvolutionInputs() as inputs:
            model.step(batch)
        orders[name] = inputs.found
    return differences, orders


FEW = ("resnet_ddp", "resnet_pp2", "unet_tp2")
MORE = ("resnet_zero3", "resnet_tp2", "unet_pp2")


@pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["few", "more"])
def test_programs_with_images_in_channels_last_equal_one_process(tmp_path, names):
    cases = {
        "resnet_zero3": in_channels_last("resnet", dp=2, zero_stage=3, zero_shard_degree=2, micro_batch_size=2),
        "resnet_ddp": in_channels_last("resnet", dp=2, recompute="full", n_micro_batches=2),
        "resnet_pp2": in_channels_last("resnet", pp=2, n_micro_batches=2),
        "resnet_tp2": in_channels_last("resnet", tp=2, sharding="R", micro_batch_size=2),
        "unet_pp2": in_channels_last("unet", pp=2, n_micro_batches=2),
        "unet_tp2": in_channels_last("unet", tp=2, sharding="R"),
    }
    rows = write_programs(tmp_path, {name: cases[name] for name in names})
    assert all(fields["memory_format"] == "channels_last" for _, _, fields, _ in rows)
    for differences, orders in run_ranks(checked_and_watched, 2, str(tmp_path), rows, timeout_s=400.0):
        for name, steps in differences.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)
            assert orders[name] and all(orders[name]), (name, orders)  # numbers are as exact in either order


def test_convolutions_behind_converted_images_hand_the_order_on():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    take_images(model, "channels_last")
    found = model(torch.randn(2, 3, 16, 16))
    assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_one_sample_whose_order_a_view_left_unclear_gets_plain_strides():
    images = torch.arange(1 * 8 * 4 * 4.0).view(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    unclear = images.view_as(images)
    assert (images.stride(), unclear.stride()) == ((128, 1, 32, 8), (8, 1, 32, 8))
    assert suggest_memory_format(unclear) == torch.contiguous_format
    plain = plainly_channels_last(unclear)
    assert plain.stride() == images.stride() and torch.equal(plain, images)
    assert plain.data_ptr() == images.data_ptr()
    assert plainly_channels_last(images) is images


def test_a_block_gets_the_list_that_it_writes_into_itself():
    class Block(nn.Module):
        def forward(self, x, seen):
            seen.append(x)
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            seen = []
            self.block(x, seen)
            return seen

    net = Net()
    take_images(net, "channels_last", blocks=["block"])
    assert len(net(torch.randn(2, 3, 4, 4))) == 1


CONVERSIONS = {
    **dict.fromkeys(("copy_to_tp", "all_reduce", "all_reduce_both", "first_rank_only", "keep_first_rank_grad"), ()),
    **{
        f"{name} {dim}": (dim,)
        for name in ("all_gather", "reduce_scatter", "shard", "pad_to_partial")
        for dim in (1, 2)
    },
    "all_gather_reduce_grad 1": (1,),
    "shard_partial_grad 3": (3,),
    "all_to_all 1": (1, 2),
    "all_to_all 3": (3, 1),
}


def converted_both_ways(n_samples):
    """On one rank, by conversion: whether images in channels_last stay so, and are those of contiguous ones."""
    tp, found = torch.distributed.group.WORLD, {}
    for name, dims in CONVERSIONS.items():
        values = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(tp.rank())
            images = torch.randn(n_samples, 4, 6, 8, dtype=torch.float64).contiguous(memory_format=memory_format)
            images = images.view_as(images).requires_grad_()  # as `fully_shard` hands them on
            moved = getattr(collectives, name.split()[0])(images, *dims, tp)
            (gradient,) = torch.autograd.grad(moved.pow(3).sum(), images)
            values.append((moved, gradient))
        same = all(torch.equal(a, b) for a, b in zip(*values, strict=True))
        found[name] = same, [suggest_memory_format(value) == torch.channels_last for value in values[1]]
    return found


def test_conversions_of_tensor_parallelism_keep_the_order_of_images():
    for n_samples in (1, 3):
        for found in run_ranks(converted_both_ways, 2, n_samples):
            assert found == dict.fromkeys(CONVERSIONS, (True, [True, True]))


# ------------------------------------------------------------------------------------------------ measured


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The rows of a small ResNet both ways, their file, and the hardware profile of a CPU."""
    folder = made_once(tmp_path_factory, "formats", write_measured)
    rows = [json.loads(line) for line in (folder / "measured.json").read_text().splitlines()]
    segments = [row for row in rows if row["what"] == "segment"]
    return SimpleNamespace(rows=segments, out=folder / "measured.json", hw=str(folder / "cpu_x4.toml"))


def write_measured(folder):
    text = (EXAMPLES.parent / "hardware_profiles/h200_x4.toml").read_text()
    (folder / "cpu_x4.toml").write_text(text.replace('name = "NVIDIA H200"', 'name = "CPU"'))
    files = api.measurement_folder(
        RESNET,
        hw=str(folder / "cpu_x4.toml"),
        overrides=SIZES,
        degrees=(1,),
        micro_batch_sizes=(2,),
        precision="fp32",
        memory_format="both",
    )
    run_measurements(
        files,
        out=folder / "measured.json",
        device="cpu",
        start=lambda command: start_process([*command, "--seconds", "0.005"]),
    )


@pytest.fixture
def problem(measured):
    options = Options(precision="fp32", global_batch=8, profile=str(measured.out), fix=(("pp", "1"), ("tp", "1")))
    return api.make_problem(RESNET, hw=measured.hw, overrides=SIZES, options=options)


def solved(problem, *fix):
    return api.solve(replace(problem, options=replace(problem.options, fix=(*problem.options.fix, *fix))))


def with_times(problem, factor):
    """The same measurements, but for the times in channels_last, which are `factor` times as long."""
    names = ("forward_s", "backward_s", "host_forward_s", "host_backward_s")
    rows = tuple(
        replace(row, **{name: factor * getattr(row, name) for name in names}) if row.execution == CHANNELS_LAST else row
        for row in problem.measured.segments
    )
    return replace(problem, measured=replace(problem.measured, segments=rows))


def test_what_reads_images_is_measured_both_ways_and_nothing_else(problem, measured):
    images = {
        segment.name for kind, segment in problem.graph.first_of_kind().items() if kind in image_kinds(problem.graph)
    }
    for name in {segment.name for segment in problem.graph.first_of_kind().values()}:
        found = {row["memory_format"] for row in measured.rows if row["segment"] == name}
        assert found == ({"contiguous", "channels_last"} if name in images else {"contiguous"}), name
    assert images and {row["status"] for row in measured.rows} <= {"measured", "noisy"}
    assert {row["module"] for row in measured.rows if row["memory_format"] == "channels_last"} == {"generated", "own"}


def test_a_search_takes_the_memory_format_that_was_measured_to_be_faster(problem):
    fast, slow = with_times(problem, 0.0), with_times(problem, 1e3)
    found = solved(fast)
    assert found.best.plan.mesh.memory_format == "channels_last"
    assert "memory_format='channels_last'," in api.program_files(fast, found)["train.py"].replace('"', "'")
    assert ", channels_last" in plan_report(found)
    assert solved(slow).best.plan.mesh.memory_format == "contiguous"
    assert solved(fast, ("memory_format", "contiguous")).best.plan.mesh.memory_format == "contiguous"
    assert solved(slow, ("memory_format", "channels_last")).best.plan.mesh.memory_format == "channels_last"
    check_plan(found.best.plan, problem.graph, problem.hardware)


def test_of_plans_that_are_as_fast_in_both_memory_formats_one_is_shown(problem):
    # devices wait for the host, which takes as long for both
    rows = [replace(row, host_forward_s=0.1, host_backward_s=0.1) for row in problem.measured.segments]
    found = solved(replace(problem, measured=replace(problem.measured, segments=tuple(rows)))).result
    meshes = [item.plan.mesh for item in (found.best, *found.alternatives)]
    assert len(meshes) > 2
    assert len({replace(mesh, memory_format="") for mesh in meshes}) == len(meshes)


def test_without_measurements_both_orders_are_priced_from_the_data_sheet():
    fix = (("pp", "1"), ("tp", "1"), ("micro_batch", "256"), ("compile", "off"))
    options = Options(precision="bf16", global_batch=2048, fix=fix)
    problem = api.make_problem(RESNET, hw="h200_x4", overrides=SIZES, options=options)
    contiguous, channels_last = (solved(problem, ("memory_format", name)).best for name in MEMORY_FORMATS)
    # kernels for 16 bits read all channels of a pixel together: contiguous images are copied (with 32 images of 4 x 4
    # pixels batch norm of channels_last has too few threads)
    assert channels_last.estimate.breakdown.compute_s < contiguous.estimate.breakdown.compute_s
    assert solved(problem).best.estimate.step_s <= min(contiguous.estimate.step_s, channels_last.estimate.step_s)


DP_1 = (("dp", "1"), ("pp", "1"), ("tp", "1"))


def test_one_device_that_a_plan_is_compared_with_may_have_channels_last_too():
    options = Options(precision="bf16", global_batch=32768)
    problem = api.make_problem(RESNET, hw="h200_x4/2", overrides=SIZES, options=options)
    free, alone = solved(problem), solved(problem, *DP_1)
    assert alone.best.plan.mesh.memory_format == "channels_last"
    assert free.result.one_device.step_s == pytest.approx(alone.best.estimate.step_s, rel=1e-3)


def test_beside_contiguous_measurements_channels_last_is_not_searched_but_named(problem):
    rows = tuple(row for row in problem.measured.segments if row.execution == Execution())
    plain = replace(problem, measured=replace(problem.measured, segments=rows))
    answer = solved(plain)
    assert answer.best.plan.mesh.memory_format == "contiguous"
    assert any("--memory-format both" in limit for limit in answer.workload.limits)
    assert not any("--memory-format both" in limit for limit in solved(problem).workload.limits)
    with pytest.raises(UsageError, match="memory_format=channels_last: found .*measured in channels_last"):
        solved(plain, ("memory_format", "channels_last"))


def test_a_model_without_images_has_no_memory_format_to_choose():
    graph = graph_of("gpt")
    assert not image_kinds(graph)
    with pytest.raises(UsageError, match="no segment that reads images(.|\\n)*fix: leave memory_format out"):
        executions(graph, Options(fix=(("memory_format", "channels_last"),)), None, device=H200)


def test_four_dims_are_no_images_where_nothing_is_convolved():
    batch = (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8))
    for layer, has_images in ((nn.Linear(8, 8), False), (nn.Conv2d(3, 3, 1), True)):
        graph = trace(nn.Sequential(layer, nn.Linear(8, 8)), batch, loss_fn=nn.functional.mse_loss)
        assert bool(image_kinds(graph)) == has_images


def test_a_compiled_model_without_images_has_none_either(problem):
    graph = graph_of("gpt")
    row = problem.measured.segments[0]
    measured = replace(problem.measured, segments=(row, replace(row, execution=Execution(compile=True))))
    assert executions(graph, Options(), measured, device=H200) == (Execution(), Execution(compile=True))


def test_a_block_that_needs_contiguous_images_leaves_a_line_and_only_contiguous_plans(problem, measured):
    row = next(row for row in measured.rows if row["memory_format"] == "channels_last" and row["module"] == "own")
    names = ("forward_s", "backward_s", "saved_bytes")
    failed = {key: row[key] for key in row if key not in names} | {"status": "not run", "why": "view"}
    assert "channels_last, not run" in results_table([failed])
    text = "\n".join(map(json.dumps, [*(other for other in measured.rows if other is not row), failed]))
    contents = {row["content"] for row in measured.rows}
    found = parse_measured_profile(
        text, where="m", device="CPU", precision="fp32", contents=contents, model="resnet.py"
    )
    (left_out,) = found.failed
    assert (left_out.segment, left_out.tp, left_out.execution) == (row["segment"], 1, CHANNELS_LAST)
    assert executions(problem.graph, Options(), found, device=problem.hardware.device) == (Execution(),)


def test_only_kinds_that_read_images_run_otherwise(problem):
    kinds, way = image_kinds(problem.graph), Execution(compile=True, memory_format="channels_last")
    for kind, segment in problem.graph.first_of_kind().items():
        found = execution_of(problem.graph, kind, way)
        assert (found.memory_format == "channels_last") is (kind in kinds)
        assert found.compile is (segment.is_block or kind == problem.graph.segments[-1].kind)
