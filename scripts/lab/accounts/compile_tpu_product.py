"""Compiles the int4 product for a TPU that is not here and prints what its compiler says, one JSON object a line.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 LIBTPU_INIT_ARGS="$FLAGS" \
        python -m scripts.lab.accounts.compile_tpu_product v6e:1x1 FOLDER_OF_DUMPS

`FLAGS` are `bundles.dump_flags(FOLDER_OF_DUMPS)`. `bundles` are those of the whole product: one per cycle if nothing
stalls. `memory_cycles` are the cycles in which the memory delivers the kernel, its scales and its zeros, and
`int8_memory_cycles` those of a kernel in int8 with a scale for each output. `matrix_cycles` are those of the matrix
units at their peak in bfloat16. A product takes at least the largest of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.tpu import int4_product
from pallas_kernels.tpu.int4_product import Blocks
from scripts.lab.accounts.bundles import Loop, bundle_dumps, read_loops, read_vmem
from scripts.lab.accounts.targets import TpuTarget, tpu_target


@dataclass(frozen=True, kw_only=True)
class Product:
    """inputs [rows, num_in] times a kernel [num_in, num_out] in groups. All rows fit in one block."""

    rows: int
    num_in: int = 4096
    num_out: int = 14336
    group: int = 128
    has_zeros: bool = False
    is_float: bool = False  # NVFP4

    @property
    def blocks(self) -> Blocks:
        """Those of the kernel."""
        return int4_product.choose_blocks(self.rows, self.num_in, self.num_out, 2)


# Of Llama 3.1 8B: half of gate_up, and down.
PRODUCTS = (
    *(Product(rows=rows) for rows in (1, 16, 64, 256, 512)),
    *(Product(rows=rows, has_zeros=True) for rows in (16, 512)),
    *(Product(rows=16, group=group, has_zeros=has_zeros) for group in (32, 64) for has_zeros in (False, True)),
    *(Product(rows=rows, num_in=14336, num_out=4096) for rows in (16, 512)),
    *(Product(rows=rows, group=16, is_float=is_float) for rows in (16, 512) for is_float in (False, True)),
)


def compile_product(product: Product, target: TpuTarget, folder: Path) -> dict[str, int]:
    """Its account. Errors of the compiler are raised."""
    shape, of_groups = (product.num_in, product.num_out), (product.num_in // product.group, product.num_out)
    scales_and_zeros = (1 + product.has_zeros) * [(of_groups, jnp.bfloat16)]

    def multiply(*operands: jax.Array) -> jax.Array:
        names = ("inputs", "kernel", "scale", "row_scale" if product.is_float else "zero")
        return int4_product.multiply(**dict(zip(names, operands, strict=False)), out_dtype=jnp.bfloat16)

    operands = [((product.rows, product.num_in), jnp.bfloat16), (shape, jnp.int4), *scales_and_zeros]
    operands += [((1, product.num_out), jnp.float32)] if product.is_float else []
    compiled = target.compile_kernel(multiply, operands)
    (dump,) = bundle_dumps(folder, "int4_product")
    (vmem,) = (vmem for name, vmem in read_vmem(folder).items() if "int4_product" in name)
    chip, scales = target.chip, of_groups[0] * product.num_out * 2
    narrow_bytes = product.num_in * product.num_out // 2 + (1 + product.has_zeros) * scales
    int8_bytes = product.num_in * product.num_out + 4 * product.num_out
    flops = 2 * product.rows * product.num_in * product.num_out
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "bundles": count_bundles(read_loops(dump), product),
        "memory_cycles": round(narrow_bytes / target.memory_bytes_per_cycle),
        "int8_memory_cycles": round(int8_bytes / target.memory_bytes_per_cycle),
        "matrix_cycles": round(flops / chip.flops_per_cycle),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "vmem_used": vmem.used,
        "vmem_capacity": vmem.capacity,
    }


def count_bundles(loops: list[Loop], product: Product) -> int:
    """The bundles of all turns. A turn has no loops of its own."""
    (turn,) = loops
    return turn.bundles * -(-product.num_out // product.blocks.out)


def main(name: str, folder: Path) -> None:
    """Prints the account of each product."""
    target = tpu_target(name)
    for product in PRODUCTS:
        for old in folder.iterdir():
            old.unlink()
        print(json.dumps(vars(product) | compile_product(product, target, folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
