"""Which sample stands at which place of the endless stream."""
