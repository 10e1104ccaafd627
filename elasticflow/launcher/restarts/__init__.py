"""Decides whether a run continues after a failure: classes of failures, budget, ledger, snapshots set aside."""
