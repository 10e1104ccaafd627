"""What is asked of a model, and done to it, before and while it is trained."""
