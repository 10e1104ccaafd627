"""From a position in the schedule to this rank's batches."""
