"""The process of a node that has imported torch and the job's modules, and forks workers."""
