"""What events and their fields are to other programs: types, names in OpenTelemetry, a JSON Schema."""
