"""The snapshots of a run as rows, trees and pages."""
