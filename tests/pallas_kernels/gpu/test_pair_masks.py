"""The reader of PTX that finds pairs of values under one mask, on a few lines."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.gpu.pair_masks import pairs_under_one_mask


@pytest.mark.parametrize(("masks", "same"), [(("%p31", "%p32"), 0), (("%p31", "%p31"), 1)])
def test_the_halves_of_a_register_have_masks_of_their_own(masks, same):
    low, high = masks
    ptx = f"""
    mov.b32 \t{{%rs1, %rs2}}, %r857;
    selp.b16 \t%rs3, %rs2, 0x0000, {high};
    selp.b16 \t%rs4, %rs1, 0x0000, {low};
    mov.b32 \t%r717, {{%rs4, %rs3}};
    mov.b32 \t{{%rs5, %rs6}}, %r858;
    """
    assert pairs_under_one_mask(ptx) == (1, same)
