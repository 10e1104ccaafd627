"""A run on a Ray cluster: each node is an actor, which Ray places and watches; all else is as on any machines."""
