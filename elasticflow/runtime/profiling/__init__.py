"""Traces of torch's profiler, which are asked for while training goes on."""
