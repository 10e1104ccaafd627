"""What torch.compile has made, kept for the run: a folder on each node, an archive beside the snapshots."""
