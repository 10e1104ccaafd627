"""Keeps the kernels of torch.compile for the run: a folder on each node, an archive beside the snapshots."""
