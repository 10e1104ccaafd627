"""A job as what a cluster's scheduler takes: text that is submitted there."""
