"""Logs of nodes that have run folders of their own, sent to the machine that leads as it asks."""
