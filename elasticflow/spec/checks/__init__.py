"""What needs several tables: closed forms over the whole node range (floor 1)."""
