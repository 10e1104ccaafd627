"""This process: who it is, its group, its clock, log and random numbers; knows no data and no model."""
