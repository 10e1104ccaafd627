"""Python read as text: definitions of names, parameters of calls; nothing is imported.

Why not griffe or jedi: importing either takes about as long as all of `validate` may, jedi needs seconds to look up
torch's optimizers, and both guess if a decorator or a condition hides the answer; this room says that it cannot tell.
"""
