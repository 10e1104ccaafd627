"""LaunchPlan -> launch folder on disk, and back."""
