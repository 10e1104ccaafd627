"""A worker's side of its node's snapshot writer."""
