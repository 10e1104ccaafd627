"""Commands that write and check job files."""
