"""Job -> LaunchPlan: everything a launch needs, decided; pure."""
