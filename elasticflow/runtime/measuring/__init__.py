"""Figures about a step beside its loss: scalars of the job's own, its speed, its gradient norm, traces of its parts."""
