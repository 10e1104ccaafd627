"""The snapshots of a run at its URI: committed, set aside, pinned."""
