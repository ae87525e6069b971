"""Transfers of weights between processes."""
