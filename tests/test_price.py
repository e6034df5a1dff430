"""The pricer: what meshes share is computed once, and sharing never changes a price."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from distributed.programs import graph_of, shardings_of

from autoplan.cost import rank_segments
from autoplan.cost.boundaries import legal_cuts
from autoplan.cost.local_segment import local_op, piece_values, strided_values
from autoplan.cost.op_time import host_s, op_time, peak_flops_per_s
from autoplan.cost.parameters import element_bytes, optimizer_s
from autoplan.cost.price import make_pricer
from autoplan.cost.segment_work import SegmentWork, timed
from autoplan.cost.work_context import work_contexts
from autoplan.errors import InputError
from autoplan.graph import COMPUTE, GraphFacts, Op, Ref, TensorSpec
from autoplan.hardware import NO_SHARDING, Device, load_hardware_profile
from autoplan.options import MEMORY_FORMATS, Options
from autoplan.overlap import Overlap
from autoplan.parallel_plan import Mesh
from autoplan.rules import LocalCall, load_rules
from autoplan.search.meshes import SearchSpace, list_meshes
from autoplan.tensor_parallel.op_strategies import legal_strategies
from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

RULES = load_rules()
PROFILE = load_hardware_profile("dgx_a100_x8", n_hosts=2)
TOY = Device("toy", (("fp32", 1e15),), 10**9, 1e9, 1.0, 1.0, 0.0, 0.0, 0.0, NO_SHARDING)
FP32 = "float32"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def counting(method, n_calls, name):
    """The method, which counts its calls under this name."""

    def counted(*given):
        n_calls[name] += 1
        return method(*given)

    return counted


def pricer_of(model, degrees=(2, 4), precision="bf16"):
    """A new pricer, and the meshes of two batches, which differ in how many micro-batches are accumulated."""
    shardings = {(tp, key): found for tp in degrees for key, found in shardings_of(model, tp).items()}
    graph = graph_of(model)
    price = make_pricer(graph, hardware=PROFILE, precision=precision, shardings=shardings, rules=RULES)
    keys = {1: [""]}
    for tp, key in shardings:
        keys.setdefault(tp, []).append(key)
    spaces = [
        SearchSpace(
            n_devices=PROFILE.n_devices,
            n_devices_per_host=PROFILE.n_devices_per_host,
            global_batch=global_batch,
            kinds=tuple(segment.kind for segment in graph.segments),
            cuts=legal_cuts(graph),
            shardings=tuple((tp, tuple(names)) for tp, names in keys.items()),
        )
        for global_batch in (16, 48)
    ]
    return price, [mesh for space in spaces for mesh in list_meshes(space, Options())[0]]


@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("llama", "fp32"), ("crossing", "bf16")])
def test_a_price_does_not_depend_on_the_meshes_priced_before(model, precision):
    (price, meshes), (other, _) = (pricer_of(model, precision=precision) for _ in range(2))
    found = {mesh: price(mesh) for mesh in meshes}
    assert {mesh: other(mesh) for mesh in reversed(meshes)} == found


def test_meshes_with_equal_costs_hold_the_same_objects():
    price, meshes = pricer_of("llama")
    tables = [price(mesh) for mesh in meshes]
    assert len({id(table.costs) for table in tables}) == len({table.costs for table in tables}) < len(tables) / 2
    assert len({id(table.cut_s) for table in tables}) < len(tables) / 2


@pytest.mark.parametrize(("parameter_s", "n_micro_batches"), [(1e-3, 1), (1e-3, 5), (1e-6, 1)])
def test_the_host_of_the_optimizer_is_late_by_what_it_takes_longer_than_all_passes_of_a_graph(
    parameter_s, n_micro_batches
):
    # pencil: parameters x time of each - passes of all segments, with the copies that are made once
    graph = graph_of("llama")
    sharding = replace(NO_SHARDING, optimizer_of_parameter_s=parameter_s)
    hardware = replace(PROFILE, device=replace(PROFILE.device, sharding=sharding))
    price = make_pricer(graph, hardware=hardware, precision="bf16", shardings={}, rules=RULES)
    table = price(Mesh(n_micro_batches=n_micro_batches, cuda_graph=True))
    costs = [table.costs[kind][0] for kind in table.kinds]
    adam_s = optimizer_s(
        sum(p.spec.n_elements(1) for p in graph.parameters), device=hardware.device, element=element_bytes("bf16")
    )
    once_s = sum(cost.optimizer_s - cost.launch_once_s for cost in costs) - adam_s
    passes_s = once_s + n_micro_batches * sum(cost.forward_s + cost.backward_s for cost in costs)
    expected_s = max(0.0, len(graph.parameters) * parameter_s - passes_s)
    assert once_s > 0 and (expected_s > 0) == (parameter_s > 1e-6)
    assert sum(cost.launch_once_s for cost in costs) == pytest.approx(expected_s)


def test_a_tied_weight_is_paid_once_on_one_stage_and_twice_in_a_pipeline():
    # examples/gpt.py ties the embedding to the head: the first and the last kind read it
    price, _ = pricer_of("gpt")
    single, piped = (price(Mesh(pp=pp, n_micro_batches=4)).costs for pp in (1, 2))
    table = next(p for p in graph_of("gpt").parameters if len(p.aliases) > 1)
    # bf16: 4 master + 8 Adam bytes per element, and 4 of gradients that accumulate
    held = piped[-1][0].state_bytes - single[-1][0].state_bytes
    assert held == 12 * table.spec.n_elements(1)
    assert piped[-1][0].gradient_bytes - single[-1][0].gradient_bytes == 4 * table.spec.n_elements(1)
    assert piped[0][0].state_bytes == single[0][0].state_bytes


def test_gradients_that_tensor_parallel_ranks_have_shares_of_are_summed_once_per_step():
    # examples/gpt.py, sequence split: the norms of its blocks and the last one, weight and bias, 4 bytes an element
    price, _ = pricer_of("gpt")
    graph = graph_of("gpt")
    norms = [p.spec.n_elements(1) for p in graph.parameters if "norm" in p.name]
    split, replicas = price(Mesh(tp=2, sharding="S(1)")), price(Mesh(dp=2))
    summed_s = work_contexts(graph, PROFILE, "bf16", RULES)(2).tp_collective_s("all_reduce", 4 * sum(norms))
    assert split.per_step_s - replicas.per_step_s == pytest.approx(summed_s)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_batch_is_copied_in_the_precision_of_the_dataset_and_held_twice_and_as_it_is_computed_and_by_a_graph(
    precision,
):
    price, _ = pricer_of("resnet", degrees=(), precision=precision)
    table = price(Mesh(dp=2, micro_batch_size=4, n_micro_batches=3))
    # 12 samples: images in fp32, and int64 labels; in bf16 the images of this step also in 2 bytes
    (pixels,) = [item.spec.n_elements(1) for item in graph_of("resnet").inputs if item.spec.is_float]
    copied = 12 * (4 * pixels + 8)
    assert table.batch_bytes == 2 * copied + (12 * 2 * pixels if precision == "bf16" else 0)
    assert table.batch_copy_s == copied / PROFILE.device.host_copy_bytes_per_s
    captured = price(replace(table.mesh, cuda_graph=True))
    assert captured.batch_bytes - table.batch_bytes == copied
    assert captured.batch_copy_s == table.batch_copy_s


def test_summing_gradients_over_hosts_is_in_the_last_reduction_and_not_in_the_optimizer():
    price, _ = pricer_of("gpt", degrees=())
    within, across = (
        price(Mesh(dp=dp, zero_stage=3, zero_shard_degree=8, micro_batch_size=1, n_micro_batches=2)) for dp in (8, 16)
    )
    once = price(Mesh(dp=16, zero_stage=1, zero_shard_degree=8, micro_batch_size=1, n_micro_batches=2))
    for (alone, *_), (cost, *_), (late, *_) in zip(within.costs, across.costs, once.costs, strict=True):
        assert (cost.reduce_s, cost.optimizer_s) == (alone.reduce_s, pytest.approx(alone.optimizer_s))
        assert alone.replicas_s == 0.0 < cost.replicas_s
        assert late.reduce_s == pytest.approx(cost.last_reduce_s)


def test_cuts_are_priced_at_what_a_rank_sends():
    price, _ = pricer_of("llama")
    whole, split = (price(Mesh(tp=2, pp=2, n_micro_batches=4, sharding=key)).cut_s for key in ("R", "S(1)"))
    one_stage = price(Mesh(tp=2, n_micro_batches=4, sharding="R")).cut_s
    assert all(a is None and b is None or a > b > 0 for a, b in zip(whole, split, strict=True))
    assert one_stage == tuple(0.0 if cut_s is not None else None for cut_s in whole)


@pytest.mark.parametrize(
    ("model", "precision", "memory_format"),
    [
        *((model, "fp32", "contiguous") for model in ("gpt", "llama", "crossing")),  # bf16: products with odd rows may
        *(way for way in product(("unet", "resnet"), ("bf16", "fp32"), MEMORY_FORMATS)),
    ],
)
def test_an_op_that_is_split_takes_no_longer_than_the_whole_op(model, precision, memory_format):
    graph = graph_of(model)
    facts = GraphFacts.of(graph)
    context = work_contexts(graph, PROFILE, precision, RULES)(2, memory_format)
    n_split = 0
    for segment in graph.first_of_kind().values():
        legal = legal_strategies(graph.ops_of(segment), facts.specs, facts.gradients, 2, RULES)
        for op, strategies in legal.items():
            times = [(strategy, timed(context, local_op(context, op, strategy), 4)) for strategy in strategies]
            whole_s = max(found.forward_s + found.backward_s for strategy, found in times if not strategy.is_split)
            n_split += len(times) - 1
            assert all(found.forward_s + found.backward_s <= whole_s * (1 + 1e-12) for _, found in times), op
    assert n_split > 100


def cost_of(target, *operands, result, device=TOY, precision="fp32"):
    """Forward and backward seconds of one call, by default on the toy device: 1 GB/s, and no time for a kernel."""
    op = Op("y", target, tuple(Ref(f"x{i}") for i in range(len(operands))), (), (result,), "")
    return cost_of_op(op, *operands, device=device, precision=precision)


def cost_of_op(op, *operands, device=TOY, precision="fp32", memory_format="contiguous", gradients=(), **more):
    """The same of a call whose arguments are given."""
    call = LocalCall(op, operands, operands, op.outputs, 1, precision, memory_format, gradients=gradients)
    found = op_time(RULES[op.target], call, device=device, has_gradient=True, **more)
    return found.forward_s, found.backward_s


def test_the_rows_of_an_embedding_are_added_slowly_to_a_gradient_that_was_zeroed():
    # 1000 rows of 250 numbers out of 4000: 1 MB, read and written; backward takes 100 us for 3072 positions, zeroes
    # 4 MB, and adds at 5.7 % where positions differ
    table, ids, rows = (TensorSpec(s, d) for s, d in (((4000, 250), FP32), ((1000,), "int64"), ((1000, 250), FP32)))
    forward_s, backward_s = cost_of("aten.embedding.default", table, ids, result=rows)
    assert forward_s == pytest.approx(2e-3, rel=0.01)
    n_distinct = 4000 * (1 - math.exp(-1000 / 4000))
    assert backward_s == pytest.approx(100e-6 * 1000 / 3072 + 4e-3 + n_distinct * 250 * 4 / 1e9 / 0.057)


def test_numbers_are_added_where_they_belong_at_the_same_pace_in_16_bits_and_in_32():
    # x[index]: 1000 rows of 250 numbers out of 4000; backward sorts, zeroes 4 MB or 2, and adds 4 bytes each at 43 %
    for dtype, zeroed_s in ((FP32, 4e-3), ("bfloat16", 2e-3)):
        table, ids, rows = (
            TensorSpec(s, d) for s, d in (((4000, 250), dtype), ((1000,), "int64"), ((1000, 250), dtype))
        )
        op = Op("y", "aten.index.Tensor", (Ref("x0"), (Ref("x1"),)), (), (rows,), "")
        forward_s, backward_s = cost_of_op(op, table, ids)
        assert forward_s == pytest.approx(zeroed_s / 2, rel=0.01)
        assert backward_s == pytest.approx(60e-6 + zeroed_s + 1e-3 / 0.43)


GRADIENT_S = 3.2e-6  # what each gradient of a convolution takes besides


def convolution_s(x, weight, result, *, precision, bytes_per_s=1e9, groups=1, **more):
    """Forward and backward of a convolution on a device with 1 (fp32) or 10 TFLOP/s (16 bits)."""
    args = (Ref("x0"), Ref("x1"), None, (1, 1), (0, 0), (1, 1), groups)
    op = Op("y", "aten.conv2d.default", args, (), (as_spec(result),), "")
    device = replace(TOY, peak_flops_per_s=(("fp32", 1e12), ("bf16", 1e13)), memory_bytes_per_s=bytes_per_s)
    return cost_of_op(op, as_spec(x), as_spec(weight), precision=precision, device=device, **more)


def as_spec(shape):
    return TensorSpec(shape, COMPUTE)


def test_a_convolution_copies_images_that_lie_in_the_other_order():
    # kernels of 16 bits read pixel by pixel, those of float32 channel by channel; copies run at half the rate of one
    shapes = (2, 128, 5, 5), (128, 128, 3, 3), (2, 128, 3, 3)
    n_elements = 2 * 128 * 25 + 128 * 128 * 9 + 2 * 128 * 9
    for precision, own, other, item in (
        ("bf16", "channels_last", "contiguous", 2),
        ("fp32", "contiguous", "channels_last", 4),
    ):
        fast, slow = (convolution_s(*shapes, precision=precision, memory_format=name) for name in (own, other))
        copy_s = 2 * item * n_elements / 1e9 / 0.5
        assert fast == pytest.approx((item * n_elements / 1e9, 2 * item * n_elements / 1e9 + 2 * GRADIENT_S))
        assert slow == pytest.approx((fast[0] + copy_s, fast[1] + 2 * copy_s))


def test_a_convolution_of_one_pixel_reads_contiguous_images_whose_channels_are_aligned():
    for size, copies in ((4, False), (3, True)):  # 16 and 9 numbers of 2 bytes
        shapes = (2, 128, size, size), (128, 128, 1, 1), (2, 128, size, size)
        found = [convolution_s(*shapes, precision="bf16", memory_format=name) for name in MEMORY_FORMATS]
        assert (found[0] > found[1]) is copies


def test_few_channels_fill_a_part_of_the_matrix_units_and_one_by_itself_none():
    # 32 of 128 channels: a quarter of 10 TFLOP/s; one in a group: 18 % of the 1 TFLOP/s of float32, 12 % backward
    x, result = (1, 32, 512, 512), (1, 32, 506, 506)
    way = {"precision": "bf16", "bytes_per_s": 1e15, "memory_format": "channels_last"}
    few = convolution_s(x, (32, 32, 7, 7), result, **way)
    one = convolution_s(x, (32, 1, 7, 7), result, groups=32, **way)
    n_flops = 2 * 32 * 506**2 * 32 * 49
    assert few == pytest.approx((n_flops / 2.5e12, 2 * n_flops / 2.5e12 + 2 * GRADIENT_S))
    assert one == pytest.approx((n_flops / 32 / 0.18e12, 2 * n_flops / 32 / 0.12e12 + 2 * GRADIENT_S))


def test_a_convolution_of_few_tiles_leaves_multiprocessors_idle():
    # 33 tiles of 128 pixels by 128 channels, for 132 multiprocessors: a quarter of 10 TFLOP/s, but for the weight
    way = {"precision": "bf16", "bytes_per_s": 1e15, "memory_format": "channels_last"}
    few, many = (convolution_s((n, 256, 8, 8), (128, 256, 1, 1), (n, 128, 8, 8), **way) for n in (2 * 33, 2 * 132))
    n_flops = 2 * 33 * 128 * 128 * 256
    assert few[0] == pytest.approx(n_flops / 2.5e12) == pytest.approx(many[0])
    assert few[1] == pytest.approx(n_flops / 5e12 + n_flops / 1e13 + 2 * GRADIENT_S)  # images have twice the channels
    assert many[1] == pytest.approx(2 * 4 * n_flops / 1e13 + 2 * GRADIENT_S)


@pytest.mark.parametrize("other", [3, 64, 300])
def test_a_convolution_of_more_channels_is_never_cheaper(other):
    for memory_format in MEMORY_FORMATS:
        way = {"precision": "bf16", "bytes_per_s": 1e12, "memory_format": memory_format}
        of_in = [convolution_s((2, n, 9, 9), (other, n, 3, 3), (2, other, 7, 7), **way) for n in range(1, 300)]
        of_out = [convolution_s((2, other, 9, 9), (n, other, 3, 3), (2, n, 7, 7), **way) for n in range(1, 300)]
        for times in (*zip(*of_in, strict=True), *zip(*of_out, strict=True)):
            assert all(fewer <= more * (1 + 1e-12) for fewer, more in pairwise(times))


def test_only_images_lie_in_channels_last():
    # [sample, channel, position]: copied for the kernels of 16 bits whatever the order of images
    shapes = (2, 128, 25), (128, 128, 3), (2, 128, 23)
    found = [convolution_s(*shapes, precision="bf16", memory_format=name) for name in MEMORY_FORMATS]
    assert found[0] == found[1]


def batch_norm_s(shape, *, precision="bf16", memory_format="channels_last", bytes_per_s=1e9, is_training=True):
    x, vector = TensorSpec(shape, COMPUTE), TensorSpec(shape[1:2], FP32)
    op = Op("y", "aten.batch_norm.default", (*(Ref(f"x{i}") for i in range(5)), is_training), (), (x,), "")
    device = replace(TOY, memory_bytes_per_s=bytes_per_s)
    return cost_of_op(op, x, *[vector] * 4, precision=precision, memory_format=memory_format, device=device)


def test_batch_norm_in_bf16_takes_its_small_kernels_and_a_pass_that_waits():
    # 2 x 64 x 25 numbers are read and written. Contiguous, a thread reads one of 2 x 25 of a channel: one turn. In
    # channels_last 64 x 4 threads of 150 x 512 are busy, a 300th. In fp16 images are read twice and written once
    n_numbers = 2 * 64 * 25
    copy_s = (2 * 2 * n_numbers + 4 * 4 * 64) / 1e11
    for precision, memory_format, expected_s in (
        ("bf16", "contiguous", copy_s + 11.6e-6 + 0.23e-6),
        ("bf16", "channels_last", copy_s + 11.6e-6 + 300 * n_numbers * 3.25e-12),
        ("fp16", "contiguous", copy_s / (2 / 3)),
    ):
        forward_s, _ = batch_norm_s((2, 64, 5, 5), precision=precision, memory_format=memory_format, bytes_per_s=1e11)
        assert forward_s == pytest.approx(expected_s), (precision, memory_format)


def test_batch_norm_in_evaluation_computes_no_statistics():
    shape = (64, 256, 56, 56)
    (forward_s, backward_s), (evaluated_s, backward_again_s) = (
        batch_norm_s(shape, bytes_per_s=1e12, is_training=is_training) for is_training in (True, False)
    )
    assert forward_s - evaluated_s == pytest.approx(3.25e-12 * math.prod(shape) + 11.6e-6, rel=1e-6)
    assert backward_s == backward_again_s


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
def test_no_pass_of_batch_norm_is_faster_than_memory(memory_format):
    shape, bytes_per_s = (64, 256, 56, 56), 265e9  # of an L4: 2 and 3 passes, and 1 and 2 for statistics and sums
    image_s = 2 * math.prod(shape) / bytes_per_s
    forward_s, backward_s = batch_norm_s(shape, memory_format=memory_format, bytes_per_s=bytes_per_s)
    assert forward_s >= 3 * image_s
    assert backward_s >= 5 * image_s


def test_statistics_of_batch_norm_do_not_depend_on_the_bandwidth():
    for memory_format in MEMORY_FORMATS:
        found = [batch_norm_s((64, 256, 56, 56), memory_format=memory_format, bytes_per_s=b)[0] for b in (1e12, 2e12)]
        assert found[0] - found[1] == pytest.approx(4 * 64 * 256 * 56**2 / 2e12, rel=1e-4)


def test_batch_norm_of_so_few_pixels_that_no_blocks_share_a_channel_is_slow():
    # 8 images of 14 x 14 pixels are 7 blocks, which become 1; 16 images are 13: torch 2.11, H100, ResNet-152
    few, more = (batch_norm_s((n, 256, 14, 14), bytes_per_s=1e15) for n in (8, 16))
    assert few[0] > 2 * more[0]


def test_a_piece_of_each_row_is_read_at_a_quarter_of_the_rate():
    # silu reads and writes 1 MB, backward moves 1.5 times that; of a piece, what is read takes 3 times 1 ms more
    x = TensorSpec((1000, 250), FP32)
    op = Op("y", "aten.silu.default", (Ref("x0"),), (), (x,), "")
    assert cost_of_op(op, x) == pytest.approx((2e-3, 3e-3))
    assert cost_of_op(op, x, pieces=(True,)) == pytest.approx((5e-3, 6e-3))
    graph, kinds = trace_model(model_source(BENCHMARKS / "models" / "mixture.py", {})), set[str]()
    for segment in graph.first_of_kind().values():
        pieces = piece_values(graph, segment, RULES)
        kinds |= {op.target for op in graph.ops_of(segment) if not pieces.isdisjoint(op.input_names())}
    assert "aten.silu.default" in kinds


def test_data_and_frozen_weights_have_no_gradient_that_takes_time():
    shapes = (2, 128, 5, 5), (128, 128, 3, 3), (2, 128, 3, 3)
    both, one = (convolution_s(*shapes, precision="bf16", gradients=pair) for pair in ((True, True), (False, True)))
    assert one == pytest.approx((both[0], both[1] / 2))
    rows, weights, ends = TensorSpec((64, 32), COMPUTE), TensorSpec((4, 32, 16), COMPUTE), TensorSpec((4,), "int32")
    op = Op(
        "y", "aten._grouped_mm.default", (Ref("x0"), Ref("x1"), Ref("x2")), (), (TensorSpec((64, 16), COMPUTE),), ""
    )
    found = (cost_of_op(op, rows, weights, ends, gradients=given) for given in ((), (True, True, False)))
    assert next(found) == next(found)  # integers never have one


def test_cross_entropy_goes_over_its_logits_five_times_and_back_more_than_three_times():
    # 1000 rows of 1000 classes: 4 MB
    logits, targets = TensorSpec((1000, 1000), FP32), TensorSpec((1000,), "int64")
    forward_s, backward_s = cost_of("aten.cross_entropy_loss.default", logits, targets, result=TensorSpec((), FP32))
    assert forward_s == pytest.approx(5 * 4e-3, rel=0.01)
    assert backward_s == pytest.approx(3.4 * 4e-3, rel=0.01)


def test_a_kernel_of_a_model_takes_the_host_five_times_as_long_as_a_bare_one():
    # 10 kernels x 5 x 1 ms
    assert host_s(replace(TOY, launch_s=1e-3), 10) == pytest.approx(50e-3)


@pytest.mark.parametrize(("n_columns", "times_as_long"), [(4096, 1), (4100, 1), (4098, 1 / 0.37), (4097, 1 / 0.16)])
def test_a_product_with_rows_of_odd_size_is_slow(n_columns, times_as_long):
    # [1000, 512] x [512, columns] at 1 TFLOP/s: 1000 x 512 x columns x 2 FLOPs, and twice that in backward
    device = replace(TOY, peak_flops_per_s=(("bf16", 1e12), ("fp32", 1e12)), memory_bytes_per_s=1e15)
    shapes = ((1000, 512), (n_columns, 512)), (1000, n_columns)
    for precision, factor in (("bf16", times_as_long), ("fp32", 1)):
        operands, result = tuple(TensorSpec(shape, "compute") for shape in shapes[0]), TensorSpec(shapes[1], "compute")
        found = cost_of("aten.linear.default", *operands, result=result, device=device, precision=precision)
        n_flops = 2 * 1000 * 512 * n_columns
        assert found == pytest.approx((factor * n_flops / 1e12, 2 * factor * n_flops / 1e12))


def test_a_pass_that_waits_for_the_host_does_not_wait_for_the_links_as_well():
    def pass_times_s(link_bytes_per_s):
        slow_host = replace(PROFILE.device, launch_s=1.0)
        links = (replace(PROFILE.links[0], bytes_per_s=link_bytes_per_s), *PROFILE.links[1:])
        hardware = replace(PROFILE, device=slow_host, links=links)
        shardings = {(2, key): found for key, found in shardings_of("llama", 2).items()}
        price = make_pricer(graph_of("llama"), hardware=hardware, precision="bf16", shardings=shardings, rules=RULES)
        cost = price(Mesh(tp=2, sharding="R")).costs[1][0]
        return cost.forward_s + cost.tp_forward_s + cost.launch_forward_s, cost.tp_forward_s

    (one_s, one_tp_s), (other_s, other_tp_s) = pass_times_s(100e9), pass_times_s(1e9)
    assert other_tp_s > 2 * one_tp_s
    assert other_s == pytest.approx(one_s)


def test_scores_of_plain_attention_lie_in_memory_as_they_were_computed():
    sizes = {"n_layers": 2, "n_heads": 4, "width": 32, "hidden": 64, "vocabulary": 128, "context": 16}
    graph = trace_model(model_source(BENCHMARKS / "models" / "megatron.py", sizes))
    block = next(segment for segment in graph.segments if segment.is_block)
    strided = strided_values(graph, block, RULES)
    core = [op for op in graph.ops_of(block) if op.module_path.endswith((".core", ".core.dropout"))]
    assert not strided & {op.name for op in core}
    assert {"aten.matmul.default", "aten.softmax.int", "aten.dropout.default"} < {op.target for op in core}


def test_clusters_share_what_a_rank_computes_exactly_where_its_device_and_links_are_equal():
    graph = graph_of("llama")

    def context(hardware, degree=4):
        return work_contexts(graph, hardware, "bf16", RULES)(degree)

    one = context(load_hardware_profile("dgx_a100_x8"))
    many = load_hardware_profile("dgx_a100_x8+ethernet_10g", n_hosts=4)
    assert context(many) is one and context(replace(many, price_usd_per_device_hour=9.0)) is one
    device = replace(PROFILE.device, memory_efficiency=0.5)
    link = replace(many.host_link, latency_s=2 * many.host_link.latency_s)
    others = [replace(many, device=device), replace(many, links=(link, *many.networks))]
    assert all(context(other) is not one for other in others)
    assert context(many, degree=8) is not one  # eight fill the host and may use multicast
    over_hosts = [
        context(load_hardware_profile(f"dgx_a100_x8+{name}", n_hosts=4), 16)
        for name in ("ethernet_10g", "infiniband_200g")
    ]
    assert over_hosts[0] is not over_hosts[1]


def test_clusters_of_other_hosts_work_out_no_compiled_pass_again(monkeypatch: pytest.MonkeyPatch) -> None:
    n_calls: Counter[str] = Counter()
    monkeypatch.setattr(rank_segments, "compiled_passes", counting(rank_segments.compiled_passes, n_calls, "passes"))
    costs = []
    for n_hosts in (1, 4):
        hardware = load_hardware_profile("dgx_a100_x8", n_hosts=n_hosts)
        price = make_pricer(graph_of("llama"), hardware=hardware, precision="fp16", shardings={}, rules=RULES)
        costs.append(price(Mesh(dp=8, micro_batch_size=3, compile=True)).costs)
        assert n_calls == {"passes": 2}  # of blocks and of the loss
    assert costs[0] == costs[1]


def test_tf32_takes_the_memory_of_float32_at_its_own_peak():
    (fp32, meshes), (tf32, _) = (pricer_of("gpt", precision=precision) for precision in ("fp32", "tf32"))
    saved = [[cost.saved_bytes for cost, *_ in price(meshes[0]).costs] for price in (fp32, tf32)]
    assert saved[0] == saved[1]
    assert peak_flops_per_s(PROFILE.device, "tf32") == 8 * peak_flops_per_s(PROFILE.device, "fp32") == 156e12
    with pytest.raises(InputError, match="without tf32"):
        peak_flops_per_s(load_hardware_profile("v100_x8").device, "tf32")


def test_parameters_that_are_kept_are_unpacked_before_the_forward_pass_alone() -> None:
    price = make_pricer(graph_of("gpt"), hardware=PROFILE, precision="bf16", shardings={}, rules=RULES)
    replicas, third = (price(Mesh(dp=2, zero_stage=z, zero_shard_degree=2 if z else 1)) for z in (0, 3))
    added = {}
    for kind in third.kinds:
        plain, sharded = replicas.costs[kind][0], third.costs[kind][0]
        added.setdefault(sharded.is_kept, []).append(
            (sharded.forward_s - plain.forward_s, sharded.backward_s - plain.backward_s)
        )
    # To pack an element of bf16 takes 1.1 times as long as to unpack it.
    assert all(0.0 < 2 * forward < backward for forward, backward in added[False])
    assert all(0.0 < backward < 1.5 * forward for forward, backward in added[True])


def test_of_one_micro_batch_stages_1_and_2_are_one() -> None:
    price = make_pricer(graph_of("gpt"), hardware=PROFILE, precision="bf16", shardings={}, rules=RULES)
    for pp, n, is_alike in ((1, 1, True), (2, 1, True), (1, 2, False)):
        meshes = [Mesh(dp=2, pp=pp, zero_stage=z, zero_shard_degree=2, n_micro_batches=n) for z in (1, 2)]
        first, second = (replace(price(mesh), mesh=meshes[0]) for mesh in meshes)
        assert (first == second) is is_alike


def test_shards_overlap_otherwise_than_all_reduces_and_links_drift():
    beside_reduces, beside_shards = Overlap(0.4, 0.1), Overlap(0.4, 0.3)
    links = tuple(replace(link, drift=drift) for link, drift in zip(PROFILE.links, (0.01, 0.04), strict=True))
    hardware = replace(PROFILE, overlap=beside_reduces, overlap_of_shards=beside_shards, links=links)
    price = make_pricer(graph_of("gpt"), hardware=hardware, precision="bf16", shardings={}, rules=RULES)
    for zero_stage, overlap in ((0, beside_reduces), (1, beside_shards), (3, beside_shards)):
        degree = 2 if zero_stage else 1
        table = price(Mesh(dp=4, zero_stage=zero_stage, zero_shard_degree=degree, n_micro_batches=2))
        assert (table.overlap, table.drift) == (overlap, 0.04)


def test_with_another_margin_of_memory_nothing_is_priced_again() -> None:
    price, meshes = pricer_of("gpt")
    other = price.with_margin(lambda sources: 0.25)
    for mesh in meshes[:: len(meshes) // 50]:
        table, again = price(mesh), other(mesh)
        assert (table.memory_margin, again.memory_margin) == (0.0, 0.25)
        assert again == replace(table, memory_margin=0.25)
        assert again.costs is table.costs


def test_work_in_a_graph_and_beside_receives_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_calls: Counter[str] = Counter()
    for name in ("captured", "slowed"):
        monkeypatch.setattr(SegmentWork, name, counting(getattr(SegmentWork, name), n_calls, name))
    price, _ = pricer_of("gpt")
    meshes = [
        Mesh(dp=dp, pp=2, zero_stage=stage, zero_shard_degree=dp, n_micro_batches=8, cuda_graph=True, schedule=schedule)
        for dp, stage, schedule in product((2, 4), (1, 2, 3), ("1f1b", "interleaved"))
    ]
    first, *others = meshes
    price(first)
    price(replace(first, schedule="interleaved", n_chunks=2))
    once = dict(n_calls)
    for mesh in others:
        price(mesh if mesh.schedule == "1f1b" else replace(mesh, n_chunks=2))
    assert dict(n_calls) == once and all(once.values())
