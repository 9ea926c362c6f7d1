"""The reader of an attention kernel's final bundles, on a few of them, and what follows from the facts."""

from __future__ import annotations

import pytest

from pallas_kernels.chips import GIB, TPUS
from pallas_kernels.tpu import decode_memory, layout
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from scripts.lab.accounts.specs import MODELS
from scripts.lab.accounts.tpu_report import geometry
from tests.pallas_kernels.tpu.bundle_facts import GRANULE_BYTES, offsets_not_in_granules, runs_on_the_first_core

HEAD = "{ %s11_s30 = sld [smem:[#allocation0]] /* megacore core id :: core id */ }\n"
LEAVES = "{ %p25_p0 = scmp.ne.s32.totalorder %s11_s30, 0 }\n{ %21 = sbr.rel (%p25_p0) target = $region4 }\n"
COPY = "{ %30 = dma.hbm_to_vmem /*hbm=*/%s5_s1, /*size_in_granules=*/%s9_s2 }\n"
MAX_WAIT_BYTES = 8 << 20  # of a copy or of copies that are waited for together, which other waits have, too


@pytest.mark.parametrize(
    ("shift", "fits"),
    [
        ("sshll.u32 %s3_s4, 4", True),
        ("sshll.u32 (!%p69688_p8), %s3_s4, 9", True),
        ("sshll.u32 %s3_s4, 2", False),
        ("smul.u32 %s3_s4, 512", False),
    ],
)
def test_an_offset_in_other_units_is_found(shift, fits):
    place = f"{{ %s4_s9 = {shift} ;; %s5_s1 = scalar_lea.hbm %s2_s3, %s4_s9 }}\n"
    assert offsets_not_in_granules(place + COPY) == ([] if fits else ["%s5_s1 = scalar_lea.hbm %s2_s3, %s4_s9 "])


@pytest.mark.parametrize(("shift", "fits"), [("sshll.u32 %s3_s4, 4", True), ("sshll.u32 %s3_s4, 2", False)])
def test_a_sum_of_base_and_offset_in_other_units_is_found(shift, fits):
    place = f"{{ %s3_s4 = scalar_lea.hbm %s2_s3, %s1_s1 ;; %s4_s9 = {shift}  ;; %s5_s1 = int_to_ptr.hbm %s4_s9 }}\n"
    assert bool(offsets_not_in_granules(place + COPY)) != fits


@pytest.mark.parametrize(("bundles", "alone"), [(HEAD + LEAVES, True), (HEAD, False), ("", True)])
def test_a_kernel_of_both_cores_is_found(bundles, alone):
    assert runs_on_the_first_core(bundles + COPY) == alone


@pytest.mark.parametrize("name", TPUS)
def test_every_granule_of_a_chips_memory_has_an_address_of_32_bits(name):
    assert TPUS[name].memory_gib * GIB / GRANULE_BYTES < 1 << 32


@pytest.mark.parametrize("model", MODELS)
def test_the_write_backs_of_1024_rows_are_waited_for_like_one_copy(model):
    g: layout.Geometry = geometry(model)
    rows = decode_memory.max_rows(g, 1024)
    scratch = decode_memory.vmem_scratch(g, DecodeBlocks(kv_block=256, items_per_turn=8), rows)
    names = list(decode_memory.Refs.__dataclass_fields__)
    new_words = scratch[names.index("new_words") - names.index("tokens")]
    queries = scratch[0]
    assert new_words.shape == (g.num_planes, rows, 128)
    assert new_words.shape[0] * rows * 128 * 4 <= MAX_WAIT_BYTES
    assert queries.shape[0] * queries.shape[1] * 2 <= MAX_WAIT_BYTES
