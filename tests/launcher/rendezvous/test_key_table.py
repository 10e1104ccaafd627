"""The keys that a server holds, against a dictionary that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.launcher.rendezvous.key_table import KeyTable, Subscriptions, folders_of

PATHS = st.sampled_from(["a", "a/", "a/b", "a/bc/d", "a/b/c", "a/b/c/d", "ab/c", "/", "/a"])
ACTS = st.lists(st.tuples(PATHS, st.one_of(st.none(), st.binary(max_size=2))), max_size=30)


@given(acts=ACTS, folder=st.sampled_from(["a/", "a/b/", "a/bc/", "/", "x/"]))
def test_what_lies_in_a_folder_is_found(acts: list[tuple[str, bytes | None]], folder: str) -> None:
    """Whatever was put and removed before; None removes."""
    table, expected = KeyTable(), dict[str, bytes]()
    for path, value in acts:
        if value is None:
            assert (expected.pop(path, None) is not None) == table.delete(path)
        else:
            table.put(path, value)
            expected[path] = value
    below = {path: value for path, value in expected.items() if path.startswith(folder)}

    assert below == dict(table.below(folder))
    assert all(table.get(path) == expected.get(path) for path, _ in acts)
    assert all((path in table) == (path in expected) for path, _ in acts)


def test_folders_of_a_path_end_with_a_slash() -> None:
    """From the outermost on; a name in no folder has none."""
    assert ["a/", "a/b/"] == folders_of("a/b/c")
    assert [] == folders_of("a")


def test_those_are_told_of_a_change_whom_it_concerns() -> None:
    """Who waits for a path is told once; who watches, until he leaves."""
    subscriptions: Subscriptions[str] = Subscriptions()
    subscriptions.wait("one", "a/b")
    subscriptions.wait("two", "a/b")
    subscriptions.wait("three", "a/c")
    for client, folder in (("outer", "a/"), ("inner", "a/b/"), ("other", "b/")):
        subscriptions.watch(client, folder)
    assert 6 == len(subscriptions)
    assert ["one", "two"] == subscriptions.take_waiting("a/b")
    assert [] == subscriptions.take_waiting("a/b")
    assert {"outer", "inner"} == set(subscriptions.watching("a/b/c"))
    assert {"outer"} == set(subscriptions.watching("a/bc"))
    for client in ("three", "outer", "inner", "other", "one"):
        subscriptions.leave(client)

    assert 0 == len(subscriptions)
    assert [] == [*subscriptions.watching("a/b"), *subscriptions.take_waiting("a/c")]
