"""Live objects <-> JSON plus named tensors."""
