"""A module that is no Python."""


def build(:
    pass
