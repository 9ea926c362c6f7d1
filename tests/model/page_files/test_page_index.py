"""The order of use and the bytes of pages, against a list that is sorted anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model.page_files.page_index import KeptPage, PageIndex

NAMES = st.sampled_from("abcdef")
ACTIONS = st.one_of(
    st.tuples(st.just("add"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("use"), NAMES, st.just(0)),
    st.tuples(st.just("forget"), NAMES, st.just(0)),
    st.tuples(st.just("shrink"), st.just(""), st.integers(0, 30)),
    st.tuples(st.just("list"), st.just(""), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=40))
def test_the_least_recently_used_leave_first(actions):
    index = PageIndex()
    expected: dict[str, tuple[int, int]] = {}  # time of use, bytes
    for now_s, (action, name, number) in enumerate(actions):
        if action == "add":
            index.add(KeptPage(name, number, now_s))
            expected[name] = (now_s, number)
        elif action == "use":
            index.use(name, now_s)
            if name in expected:
                expected[name] = (now_s, expected[name][1])
        elif action == "forget":
            index.forget(name)
            expected.pop(name, None)
        elif action == "list":  # the times on the disk are those of the writing
            index.replace([KeptPage(name, size, 0.0) for name, (_, size) in expected.items()], newer=())
        else:
            out = []
            while sum(size for _, size in expected.values()) > number:
                out.append(min(expected, key=expected.__getitem__))
                del expected[out[-1]]
            assert index.shrink(number) == out
        assert index.num_bytes == sum(size for _, size in expected.values())
        assert [name in index for name in "abcdef"] == [name in expected for name in "abcdef"]
        assert len(index) == len(expected)
