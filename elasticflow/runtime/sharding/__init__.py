"""Models whose parameters are shared out among ranks: which rows of a tensor a rank holds, and which ranks hold the same."""
