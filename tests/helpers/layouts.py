"""Hypothesis strategies for parameters and the layouts that hold them."""

from hypothesis import strategies as st

from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.layout import Layout, ParamSpec

WORLD_SIZES = st.integers(1, 9)
ITEMSIZES = {"float32": 4, "bfloat16": 2}
BUCKET_BYTES = st.sampled_from([1, 40, 200, 1 << 20])
# Per element, as all parameters under one optimizer have it.
STATE_BYTES, LONG = 8, 16_384


@st.composite
def spec_lists(draw: st.DrawFn, largest: int = 60) -> list[ParamSpec]:
    """Atomic and splittable, trained and frozen, several dtypes, devices and groups, some without elements."""
    sizes = draw(st.lists(st.integers(0, largest), max_size=16))
    return [
        ParamSpec(
            name=f"p{place}",
            shape=(size,),
            dtype=draw(st.sampled_from(sorted(ITEMSIZES))),
            device=draw(st.sampled_from(["cpu:0", "cuda:0"])),
            group=draw(st.integers(0, 2)),
            splittable=draw(st.booleans()),
            trainable=draw(st.integers(0, 3)) > 0,
        )
        for place, size in enumerate(sizes)
    ]


def fill_layout(specs: list[ParamSpec], world_size: int, bucket_bytes: int = 1 << 20, least_bytes: int = 0) -> Layout:
    costs = [Cost(STATE_BYTES * spec.numel, work=spec.numel**2 * (not spec.splittable)) for spec in specs]
    itemsizes = [ITEMSIZES[spec.dtype] for spec in specs]
    return plan_buckets(specs, world_size, bucket_bytes, itemsizes, costs, least_bytes=least_bytes)


layouts = st.builds(fill_layout, spec_lists(), WORLD_SIZES, BUCKET_BYTES, st.sampled_from([0, 30, 1 << 30]))
