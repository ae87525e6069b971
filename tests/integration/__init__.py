"""Tests with the packages of other projects, at the versions in constraints/integrations.txt."""
