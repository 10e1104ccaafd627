from __future__ import annotations

import pytest

from elasticflow.run_folder import path_from_root


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("snapshots", "snapshots"),
        ("./a/b", "./a/b"),
        ("file://snapshots", "snapshots"),
        ("file:///shared/x", None),
        ("/shared/x", None),
        ("~/x", None),
        ("file://~/x", None),
        ("s3://bucket/x", None),
        ("simplecache::s3://bucket/x", None),
    ],
)
def test_only_relative_local_places_start_at_the_project_root(uri: str, path: str | None) -> None:
    """A place that depends on the working folder is told from one that means the same everywhere."""
    assert path_from_root(uri) == path
