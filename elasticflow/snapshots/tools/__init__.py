"""What people do with snapshots by hand: export, prune."""
