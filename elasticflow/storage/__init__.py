"""Snapshots' files on any store: local disk, object stores, sftp, http."""
