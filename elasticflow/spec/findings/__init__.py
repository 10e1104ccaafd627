"""What is wrong with job files: codes' explanations, places, formats (floor 1)."""
