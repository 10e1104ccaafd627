"""Checks that all ranks are still equal."""
