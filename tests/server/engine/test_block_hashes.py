"""Hashes of pages against numbers that cbor2 6.3.0, Python's pickle and SHA-256 give for vLLM's algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.kv_event_stream import BlockHasher, HashAlgorithm, _CborDigest, shown_hash
from tests.server.support.kv_reader import cbor

# Of the root with the seed "42", and of pages: three of one prefix, two of an adapter and a salt, one of a long key.
VECTORS = {
    HashAlgorithm.SHA256_CBOR: (
        "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780",
        "5accc84e2fa78c84d428cf8bee397cb0dfb391e047560b81b149bc8f6837bd68",
        "b5850bdc2b486c2623bc9d20b6d6fa721a00c2b34268da414619edbcd7b40749",
        "b869b18013cd8af39924117e752ab8a81bcc5dcd91971b8477916167945904d3",
        "b586abf40fa6b2dc0b09431af00588aa35b3a6f94cfaba2616e6c258c053963d",
        "d461b838bee3a76f4e997d47530d7a9b6e40d9a59c5424003a8ecb5a904365f6",
        "8f02de82678938022d9aaf06a5b6d1442e4f1fc0c430d7522071a098ec514f45",
    ),
    HashAlgorithm.SHA256: (
        "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a",
        "7f02c0bf53425e6792bde7680318b665a15eb105e1b916d078d65b11e03fbc88",
        "fb850e5861b8e9dc94f0100beb25b4b56ba836a693976ed8006dbc4e65375f82",
        "c20c06f11286c5c4083f59ae7f469e08412083c729ea13c1dbce9be94cebd1aa",
        "88d9b34e85845674cd5a0b5d73898b2c4329e6ab80d0b16d012878ec5e50086e",
        "e49a1d6ee8b229fbd8218191bfeb58df3e4f820d63460324dc78f809a92ccb6c",
        "64ba03a7b1fb89248e1eb9197f78672b64a56bd98a3328f95dbf5023b5f7ff5b",
    ),
}


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_hashes_are_vllms(algorithm):
    root, first, second, third, salted, after_it, long = VECTORS[algorithm]
    hasher = BlockHasher(algorithm, "42")
    hash_of = hasher.hash_of
    assert hasher.root.hex() == root
    assert hash_of(None, [0, 1, 23, 24], None).hex() == first
    assert hash_of(bytes.fromhex(first), [255, 256, 65535, 65536], None).hex() == second
    assert hash_of(bytes.fromhex(second), [128255, 2**31 - 1, 7, 7], None).hex() == third
    assert hash_of(None, [1, 2, 3, 4], ("pirate", "5eed")).hex() == salted
    assert hash_of(bytes.fromhex(salted), [5, 6, 7, 8], ("pirate",)).hex() == after_it
    assert hash_of(None, [1, 2, 3, 4], ("é" * 30,)).hex() == long


def test_events_have_the_last_64_bits():
    assert shown_hash(bytes.fromhex(VECTORS[HashAlgorithm.SHA256_CBOR][1])) == 0xB149BC8F6837BD68


def test_without_a_seed_every_engine_has_hashes_of_its_own():
    assert BlockHasher(HashAlgorithm.SHA256_CBOR, None).root != BlockHasher(HashAlgorithm.SHA256_CBOR, None).root


values = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30).map(tuple).filter(lambda item: not (item and isinstance(item[0], int))),
)


@given(values | st.lists(st.integers(0, 2**32), max_size=300).map(tuple))
def test_cbor_is_canonical(value):
    assert b"".join(_CborDigest()._parts(value)) == cbor(value)
