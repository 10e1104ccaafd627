"""Writes one HTML file about a run or several runs, without network access or third-party scripts."""
