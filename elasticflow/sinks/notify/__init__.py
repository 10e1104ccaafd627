"""Who is told what becomes of a run: a webhook, a command."""
