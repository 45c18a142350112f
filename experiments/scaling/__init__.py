"""What a system takes on several GPUs, forecast from rates."""
