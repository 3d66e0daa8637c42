"""Tests of exporting plans to other engines."""
