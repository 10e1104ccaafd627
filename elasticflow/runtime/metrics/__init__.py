"""What a step reports beside its loss: scalars of the job's own, how fast it was, the norm of its gradient."""
