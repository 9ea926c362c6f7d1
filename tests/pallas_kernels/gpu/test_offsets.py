"""The reader of PTX that finds the products of page numbers, on programs of a few lines."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.gpu.offsets import page_products

TABLE = """
    ld.global.v2.b32 	{%r1, %r2}, [%rd1];
    mul.wide.s32 	%rd2, %r1, 4;
    add.s64 	%rd3, %rd9, %rd2;
    ld.global.b32 	%r3, [%rd3];
    ld.global.b32 	%r4, [%rd8];
    add.s32 	%r5, %r3, %r4;
"""
PAGE = 131072
COPY = "cp.async.cg.shared.global [%rd20], [%rd7+1024], 16;"


@pytest.mark.parametrize(
    "product",
    [
        "mul.wide.s32 %rd4, %r5, 262144;",
        "mul.lo.s32 %r6, %r5, 262144;\ncvt.s64.s32 %rd4, %r6;",
        "shl.b32 %r6, %r5, 18;\ncvt.u64.u32 %rd4, %r6;",
    ],
)
def test_the_product_of_a_page_is_found(product):
    program = f"{TABLE}{product}\nadd.s64 %rd7, %rd9, %rd4;\n{COPY}"
    assert page_products(program, PAGE) == [product.splitlines()[0]]


def test_products_of_other_numbers_are_none():
    """The row of the page table, the token in the page, and a product that no copy depends on."""
    others = "shl.b32 %r6, %r2, 5;\nmul.wide.s32 %rd4, %r6, 256;\nmul.lo.s32 %r7, %r5, 262144;"
    assert page_products(f"{TABLE}{others}\nadd.s64 %rd7, %rd9, %rd4;\n{COPY}", PAGE) == []
