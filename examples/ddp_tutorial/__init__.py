"""The plain way: distributed training written by hand, for comparison."""
