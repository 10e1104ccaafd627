"""The tables that say how a cluster's scheduler runs a job."""
