"""Whether a run goes on after a failure: classes of failures, budget, ledger, snapshots set aside."""
