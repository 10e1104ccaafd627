"""Back-ends of the storage door: one class per kind of store, and what is common to them (floor 0)."""
