"""What events and their fields are to other programs: types, names elsewhere, a JSON Schema."""
