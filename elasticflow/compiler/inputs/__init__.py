"""What a launch is made from: job, sources, git, versions, machine."""
