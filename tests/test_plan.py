# SPDX-License-Identifier: Apache-2.0
"""Launch plans with tensor maps: which are bound, and what is refused before a driver sees it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tunegen.errors import PlanError
from tunegen.model import DTYPE_BYTES, Argument, Launch, LaunchPlan, TensorMap

A_MAP = TensorMap(
    name="a_map", array="A", dtype="bf16", extents=("K", "M", "B"),
    strides=("2 * lda", "2 * M * lda"), box=(64, 128, 1), swizzle=128, l2_promotion=256,
)  # fmt: skip
PADDED = TensorMap(
    name="padded", array="workspace", dtype="fp32", extents=("N", "K"), strides=("4 * ldb",),
    box=(4, 8), swizzle=0, l2_promotion=0, offset="16 * B",
)  # fmt: skip
SIZES = {"B": 3, "M": 100, "N": 60, "K": 72, "lda": 80, "ldb": 64}
PADDED_END = 16 * 3 + 71 * 4 * 64 + 4 * 60


def launch(*maps: str, grid: int | str = 1, kernel: str = "k") -> Launch:
    arguments = tuple(Argument(name, "tensor_map") for name in maps)
    return Launch(kernel, (grid, 1, 1), (128, 1, 1), (*arguments, Argument("A", "pointer")))


def plan(*launches: Launch, workspace_bytes: int | str = 1 << 20, **changes) -> LaunchPlan:
    maps = (dataclasses.replace(A_MAP, **changes), PADDED)
    return LaunchPlan(launches, workspace_bytes, tensor_maps=maps)


def test_maps_are_bound_with_their_plan():
    bound = plan(launch("a_map", "padded")).bind(SIZES)
    a_map, padded = bound.tensor_maps
    assert (a_map.extents, a_map.strides, a_map.offset) == ((72, 100, 3), (160, 16000), 0)
    assert (padded.extents, padded.strides, padded.offset) == ((60, 72), (256,), 48)
    assert (padded.in_workspace, a_map.in_workspace) == (True, False)
    assert padded.end == PADDED_END
    assert bound.launches[0].tensor_maps == ("a_map", "padded")
    assert dataclasses.replace(a_map, extents=A_MAP.extents, strides=A_MAP.strides) == A_MAP
    assert bound.bind({}) == bound


@pytest.mark.parametrize("rows", [0, 100])
def test_maps_that_no_launch_takes_are_left_out(rows):
    """An empty launch would have a map without elements, which there is not."""
    made = plan(launch("a_map", grid="M / 50"), launch("padded"))
    bound = made.bind({**SIZES, "M": rows})
    assert [m.name for m in bound.tensor_maps] == ["a_map", "padded"][rows == 0 :]
    assert plan(launch("a_map", grid=0)).bind({}).tensor_maps == ()


def test_a_launch_takes_maps_that_the_plan_has():
    with pytest.raises(PlanError, match=r"k takes the tensor map b_map, .* has a_map, padded"):
        plan(launch("a_map", "b_map")).bind(SIZES)
    with pytest.raises(PlanError, match="the plan has none"):
        LaunchPlan((launch("a_map"),)).bind(SIZES)
    twice = LaunchPlan((launch("a_map"),), tensor_maps=(A_MAP, A_MAP))
    with pytest.raises(PlanError, match="one name: a_map, a_map"):
        twice.bind(SIZES)


def test_a_map_ends_inside_of_the_workspace():
    assert plan(launch("padded"), workspace_bytes=PADDED_END).bind(SIZES)
    with pytest.raises(PlanError) as refused:
        plan(launch("padded"), workspace_bytes=PADDED_END - 1).bind(SIZES)
    assert f"padded ends {PADDED_END} bytes into a workspace of {PADDED_END - 1}" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("init", "zeroed_bytes", "bound", "zeroed"),
    [
        ("zero", "4 * M", 400, 400),
        ("zero", "40 * M", 3000, 3000),  # no more than there are
        ("zero", 0, 0, 0),
        ("zero", None, None, 3000),
        ("none", None, None, 0),
        ("none", "4 * M", 400, 0),
    ],
)
def test_what_is_zeroed_is_bound_with_its_plan(init, zeroed_bytes, bound, zeroed):
    made = dataclasses.replace(
        plan(launch(), workspace_bytes="30 * M"), workspace_init=init, zeroed_bytes=zeroed_bytes
    ).bind(SIZES)
    assert (made.workspace_bytes, made.zeroed_bytes, made.zeroed) == (3000, bound, zeroed)
    assert made.bind({}) == made


def test_nothing_is_zeroed_for_a_plan_without_launches():
    made = dataclasses.replace(
        plan(launch(grid="M")), workspace_init="zero", zeroed_bytes="4 * N"
    ).bind({**SIZES, "M": 0})  # fmt: skip
    assert (made.launches, made.workspace_bytes, made.zeroed) == ((), 0, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "fp8"}, "elements of fp8, there are fp64, fp32, fp16, bf16"),
        ({"extents": ()}, "0 dimensions, the copy engine takes 1 to 5"),
        ({"extents": (8,) * 6}, "6 dimensions, the copy engine takes 1 to 5"),
        ({"strides": ("2 * lda",)}, "1 strides, 3 dimensions need 2"),
        ({"box": (64, 128)}, "box of 2 dimensions, the tensor has 3"),
        ({"swizzle": 16}, "swizzle 16, there are 0, 32, 64, 128"),
        ({"l2_promotion": 32}, "L2 promotion 32, there are 0, 64, 128, 256"),
        ({"offset": "lda"}, None),
        ({"offset": "lda + 8"}, "begins 88 bytes into A, it needs a multiple of 16"),
        ({"offset": -16}, "begins -16 bytes into A"),
        ({"extents": ("K", "M", "B - 3")}, "extent of 0, the copy engine takes 1 to 4294967296"),
        ({"extents": (2**32, 2**32, 2**32)}, None),
        ({"extents": ("K", 2**32 + 1, "B")}, "extent of 4294967297, the copy engine takes 1 to 4"),
        ({"strides": ("2 * lda + 8", 16)}, "stride of 168 bytes, the copy engine takes multiples"),
        ({"strides": (16, 2**40 - 16)}, None),
        ({"strides": (16, 2**40)}, "stride of 1099511627776 bytes, .* below 1099511627776"),
        ({"strides": (-16, 16)}, "stride of -16 bytes"),
        ({"box": (64, 256, 1)}, None),
        ({"box": (64, 257, 1)}, "box of 257 elements along a dimension, 1 to 256 are possible"),
        ({"box": (64, 8, 0)}, "box of 0 elements"),
        ({"box": (60, 8, 1)}, "rows of 120 bytes, they need a multiple of 16"),
        ({"box": (72, 8, 1)}, "rows of 144 bytes, swizzle 128 takes no longer ones"),
        ({"box": (72, 8, 1), "swizzle": 0}, None),
        ({"swizzle": 64}, "rows of 128 bytes, swizzle 64 takes no longer ones"),
        ({"dtype": "fp64"}, "rows of 512 bytes, swizzle 128"),
    ],
)
def test_what_the_driver_would_refuse_is_refused(changes, says):
    made = plan(launch("a_map"), **changes)
    if says is None:
        assert made.bind(SIZES).tensor_maps
        return
    with pytest.raises(PlanError, match=f"tensor map a_map .*{says}"):
        made.bind(SIZES)


@given(
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_the_end_is_that_of_the_last_element(dtype, dimensions, offset):
    width = DTYPE_BYTES[dtype]
    extents = tuple(extent for extent, _ in dimensions)
    strides, step = [], 16 * -(-extents[0] * width // 16)
    for extent, gap in dimensions[1:]:
        strides.append(step * gap)
        step *= gap * extent
    assume(all(stride < 2**40 for stride in strides))
    made = TensorMap(
        "m", "x", dtype, extents, tuple(strides), (16 // width,) + (1,) * len(strides), 0, 0,
        16 * offset,
    )  # fmt: skip
    last = sum(
        (extent - 1) * stride for extent, stride in zip(extents, (width, *strides), strict=True)
    )
    assert made.bind({}).end == 16 * offset + last + width
