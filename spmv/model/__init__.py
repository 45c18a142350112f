"""Predicted and measured times of products, and the format that suits a matrix."""
