"""Python read as text: where a name is defined, what a call takes; nothing is imported.

Why not griffe or jedi: importing either takes about as long as all of `validate` may, jedi needs seconds to look up
torch's optimizers, and both guess where a decorator or a condition hides the answer; this says that it cannot tell.
"""
