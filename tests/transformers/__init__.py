"""Tests of models of transformers on the devices of a plan."""
