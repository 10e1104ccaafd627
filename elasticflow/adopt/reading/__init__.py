"""What a training script does, as far as its text is certain: its form, its loops, its data, what moves its model."""
